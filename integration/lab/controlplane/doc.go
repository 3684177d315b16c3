// Package controlplane knows how etcd and the programs of the Kubernetes control plane are run:
// their flags, their certificates and when they are ready. It knows nothing of nodes.
//
// Tests that need only an API server start one themselves, in TestMain or per test; instances
// are independent of each other, need no root, and are gone when the process ends:
//
//	func TestMain(m *testing.M) { os.Exit(run(m)) }
//
//	func run(m *testing.M) int {
//		api, err := controlplane.StartAPI(ctx, controlplane.Options{Log: os.Stderr})
//		if err != nil { … }
//		defer api.Stop()
//		config = api.RESTConfig() // cluster-admin, not throttled
//		return m.Run()
//	}
//
// [API.RESTConfig] and [API.Kubeconfig] are cluster-admin's; [API.UserConfig] authenticates as
// anybody; a rest.Config's Impersonate acts as a ServiceAccount. [API.Kubectl] runs kubectl.
// [API.StopServer] and [API.StartServer] make an outage on the same address. Extra flags of
// kube-apiserver, such as an audit policy, go into [Options.APIServerArgs], other releases into
// [Options.KubernetesVersion]. Without [API.StartControllerManager] nothing creates default
// ServiceAccounts, garbage-collects owned objects or removes namespaces; with it, [API.StartScheduler]
// and [Options.Advertise], it is the control plane of nodes in a virtual machine.
//
// From a shell, `go run ./integration/lab api` prints the KUBECONFIG and runs until it is
// interrupted; `go run ./integration/lab api -- CMD` runs CMD with KUBECONFIG set.
package controlplane

// Package cluster tests Egresses as users have them: in a cluster with kubelets, a scheduler and
// kube-proxy between clients and routers.
//
// The nodes are in a virtual machine whose kernel has FoU. The control plane is outside, because
// kube-apiserver takes minutes to start where processors are emulated: it reaches kubelets by a proxy
// in the machine.
package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/build"
	lab "github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/integration/lab/controlplane"
	"github.com/coil-net/coil/integration/lab/vm"
	"github.com/coil-net/coil/integration/lab/vm/vmtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// Environment of the tests in the machine: where the control plane's files are, its address, the
// images, and the port of the proxy to kubelets.
const (
	apiDirEnv  = "COIL_TEST_API_DIR"
	apiAddrEnv = "COIL_TEST_API_ADDR"
	storeEnv   = "COIL_TEST_STORE"
	proxyEnv   = "COIL_TEST_KUBELETS_PORT"
)

// name is that of the cluster.
const name = "egress"

// modules are what nodes, kube-proxy and Coil need, as nothing loads them by itself in the machine.
var modules = strings.Fields("virtio_net veth bridge overlay fou fou6 ipip ip6_tunnel nf_tables nf_conntrack_netlink " +
	"nft_chain_nat nft_masq nft_nat nft_ct nft_fib_inet nft_reject_inet nft_numgen nft_hash nft_limit nft_log")

// nodes is how many of them there are: each costs minutes of emulated processors.
func nodes() int { return testkit.EgressForm.Times(1, 3) }

// TestEgress starts a control plane and applies everything here, and has the nodes in a machine.
func TestEgress(t *testing.T) {
	testkit.Need(t, testkit.VM)
	options := vm.Options{Kernel: "6.12", Memory: 3072 + 1024*nodes(), Network: true}
	if os.Getenv(apiDirEnv) == "" {
		proxy := testkit.Must(netip.ParseAddrPort(testkit.FreeAddr(t)))(t)
		options.Env, options.Forward = controlPlane(t, proxy), proxy.Port()
	}
	if vmtest.Reexec(t, options, modules...) {
		testEgress(t)
	}
}

// controlPlane starts one to which Coil and the test's objects are applied, and which reaches kubelets by a proxy. It returns the
// environment by which the nodes find it.
func controlPlane(t *testing.T, proxy netip.AddrPort) []string {
	t.Helper()
	testkit.Need(t, testkit.APIServer)
	ctx := t.Context()
	install := lab.Options{Nodes: nodes(), Log: os.Stderr, Kustomize: []string{"testdata/emulated"}}
	testkit.Check(t, lab.Build(ctx, "", os.Stderr), install.AddCoil(ctx))
	testkit.Must((&build.Builder{Log: os.Stderr}).Own(ctx, "cmd/coilctl"))(t)
	store := t.TempDir()
	testkit.Check(t, lab.MakeStore(ctx, store, os.Stderr, install.Images...))
	// An emulated node may be late; of one that is thought dead the pods are deleted.
	api := testkit.Must(controlplane.StartAPI(ctx, controlplane.Options{Advertise: vm.HostAddr, Nodes: proxySocket(t, proxy), Log: os.Stderr,
		APIServerArgs: []string{"--default-not-ready-toleration-seconds=3600", "--default-unreachable-toleration-seconds=3600"}}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			show(t, api)
		}
		if err := api.Stop(); err != nil {
			t.Error(err)
		}
	})
	testkit.Check(t, api.StartControllerManager(ctx, "--node-monitor-grace-period=10m"), api.StartScheduler(ctx))
	for _, dir := range install.Kustomize {
		testkit.Must(api.Kubectl(ctx, "apply", "-k", dir))(t)
	}
	// A kind is known a moment after its definition, and a namespace has its account a moment later.
	testkit.Eventually(t, 30*time.Second, "the objects are applied", func() error {
		_, err := api.Kubectl(ctx, "apply", "-f", "testdata/egress.yaml")
		return err
	})
	return []string{build.Built + "=1", apiDirEnv + "=" + api.Dir(), apiAddrEnv + "=" + api.Addr().String(), storeEnv + "=" + store, proxyEnv + "=" + strconv.Itoa(int(proxy.Port()))}
}

// show tells what the control plane knows.
func show(t *testing.T, api *controlplane.API) {
	ctx := context.WithoutCancel(t.Context())
	for _, args := range []string{
		"get nodes,pods,services -A -o wide", "get egresses,hpa -A", "get endpointslices -A", "get addresspools,addressblocks,blockrequests",
		"get addressclaims,egresspolicies -A -o wide", "get egresses,egresspolicies,addressblocks -A -o yaml",
		"get events -A --sort-by=.lastTimestamp",
	} {
		out, err := api.Kubectl(ctx, strings.Fields(args)...)
		t.Logf("kubectl %s\n%s%v", args, out, err)
	}
}

// up starts the nodes, and removes them at the end of the test.
func up(t *testing.T) *lab.Cluster {
	t.Helper()
	ctx := t.Context()
	addr := testkit.Must(netip.ParseAddrPort(os.Getenv(apiAddrEnv)))(t)
	opts := lab.Options{Name: name, Nodes: nodes(), Store: os.Getenv(storeEnv), Log: os.Stderr, ControlPlane: &lab.Remote{
		Dir: os.Getenv(apiDirEnv), Addr: netip.AddrPortFrom(vm.HostAddr, addr.Port()), Link: vm.Link, Local: vm.LinkAddr,
	}}
	c, err := lab.Up(ctx, opts)
	t.Cleanup(func() {
		if t.Failed() {
			kernels(t, c)
			logs(t)
		}
		if err := lab.Down(context.WithoutCancel(ctx), "", opts.Name); err != nil {
			t.Errorf("remove the nodes: %v", err)
		}
	})
	testkit.Check(t, err)
	return c
}

// kernels prints addresses, neighbours, routes, rules and connections of the nodes, of their pods and of the host outside.
func kernels(t *testing.T, c *lab.Cluster) {
	if c == nil {
		return
	}
	const own = "ip address; ip -s neighbour; ip neighbour show proxy; ip -6 neighbour show proxy; ip rule; ip -4 route show table all; ip -6 route show table all; " +
		"nft list ruleset; conntrack -L"
	const pods = "for n in /run/netns/*; do echo pod $n; nsenter --net=$n sh -c 'ip -s address; ip -4 route show table all; ip -6 route show table all; nft list ruleset; conntrack -L'; done"
	for _, n := range append(c.Nodes(), lab.Fabric) {
		out, err := c.Exec(context.WithoutCancel(t.Context()), n, "sh", "-c", own+"; "+pods+"; true")
		t.Logf("%s has\n%s%v", n, out, err)
	}
}

// logs shows what the nodes' programs and pods said last.
func logs(t *testing.T) {
	script := "cd " + lab.DefaultStateDir + "/" + name + "; tail -n 15 */log/*.log; tail -n 25 */disk/var/log/pods/*/*/*.log"
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", "-c", script).CombinedOutput()
	t.Logf("%s%v", out, err)
}

// since says how long something took, for whoever reads the log.
func since(start time.Time, what string) {
	fmt.Fprintf(os.Stderr, "%s after %s\n", what, time.Since(start).Round(100*time.Millisecond))
}

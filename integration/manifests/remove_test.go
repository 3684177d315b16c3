package manifests

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cluster"
	"github.com/coil-net/coil/integration/lab/image"
	"github.com/coil-net/coil/pkg/testkit"
)

const removedCluster = "removed"

// TestRemove does what README.md says under "Removing Coil" in a cluster whose pods have used it.
// The nodes must be as they were before.
func TestRemove(t *testing.T) {
	testkit.Need(t, testkit.Cluster)
	t.Parallel() // each cluster waits for its programs most of the time
	ctx := t.Context()
	down := func() {
		if err := cluster.Down(context.WithoutCancel(ctx), "", removedCluster); err != nil {
			t.Errorf("remove the cluster: %v", err)
		}
	}
	down() // what a killed run left
	t.Cleanup(down)
	opts := cluster.Options{Name: removedCluster, Nodes: 2, Log: t.Output(), Kustomize: []string{"testdata/hasty"}}
	if err := opts.AddCoil(ctx); err != nil {
		t.Fatal(err)
	}
	coil := opts.Kustomize[0]
	opts.Kustomize = nil // later
	c, err := cluster.Up(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	before := map[string][]string{}
	for _, n := range c.Nodes() {
		testkit.Eventually(t, 20*time.Second, "addresses are usable", func() error {
			out, err := c.Exec(ctx, n, "ip", "address")
			if err == nil && strings.Contains(string(out), "tentative") {
				err = errors.New("tentative addresses")
			}
			return err
		})
		if before[n], err = nodeState(ctx, c, n); err != nil {
			t.Fatal(err)
		}
	}

	if err := errors.Join(c.Apply(ctx, coil), c.WaitWorkloads(ctx, namespace)); err != nil {
		t.Fatal(err)
	}
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := c.Kubectl(ctx, args...)
		if err != nil {
			logs, _ := c.Kubectl(context.WithoutCancel(ctx), "-n", namespace, "logs", "--selector=app.kubernetes.io/name=coil", "--all-containers", "--prefix", "--tail=30")
			t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, logs)
		}
		return string(out)
	}
	useCoil(t, c, kubectl)
	for _, n := range c.Nodes() {
		// Links of deleted pods may go while the state is read.
		testkit.Eventually(t, 20*time.Second, "the state of "+n+" is read", func() error {
			state, err := nodeState(ctx, c, n)
			if err == nil && cmp.Equal(before[n], state) {
				t.Fatalf("Coil changed nothing on %s", n)
			}
			return err
		})
	}

	var logged string
	for _, args := range commands(t, "Removing Coil") {
		for i, a := range args {
			switch {
			case i > 0 && args[i-1] == "-k" && a == ".":
				args[i] = coil
			case i > 0 && args[i-1] == "-k" && a == "cleanup":
				args[i] = filepath.Join(manifestsDir(t), "cleanup")
			}
		}
		out := kubectl(args...)
		t.Logf("kubectl %s\n%s", strings.Join(args, " "), out)
		for _, a := range args {
			if a == "logs" {
				logged = out
			}
		}
	}
	for _, want := range []string{"removed rule 2000", "removed /host/etc/cni/net.d/10-coil.conflist", "removed /host/opt/cni/bin/coil"} {
		if got := strings.Count(logged, want+" ") + strings.Count(logged, want+":") + strings.Count(logged, want+"\n"); got < len(c.Nodes()) {
			t.Errorf("the log has %q %d times, for %d nodes", want, got, len(c.Nodes()))
		}
	}
	for _, n := range c.Nodes() {
		testkit.Eventually(t, 10*time.Second, n+" is as before", func() error {
			after, err := nodeState(ctx, c, n)
			if diff := cmp.Diff(before[n], after); err == nil && diff != "" {
				err = errors.New("(-before +after):\n" + diff)
			}
			return err
		})
	}
	if left := kubectl("-n", namespace, "get", "all,configmaps,serviceaccounts", "--selector=app.kubernetes.io/name=coil", "-o", "name"); strings.Contains(left, "daemonset") || strings.Contains(left, "configmap") {
		t.Errorf("objects are left:\n%s", left)
	}
}

// useCoil makes a pool, an Egress, and pods on all nodes, some of which come and go.
func useCoil(t *testing.T, c *cluster.Cluster, kubectl func(...string) string) {
	t.Helper()
	kubectl("apply", "-f", writeFile(t, "pool.yaml", `
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: default}
spec:
  blockSizeBits: 2
  subnets: [{ipv4: 10.100.0.0/24, ipv6: "fd00:100::/120"}]
---
apiVersion: coil.cybozu.com/v2
kind: Egress
metadata: {name: nat, namespace: default}
spec: {replicas: 1, destinations: [192.0.2.0/24]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: users, namespace: default}
spec:
  replicas: 6
  selector: {matchLabels: {app: users}}
  template:
    metadata: {labels: {app: users}}
    spec:
      terminationGracePeriodSeconds: 0
      tolerations: [{key: node-role.kubernetes.io/control-plane, operator: Exists}]
      containers: [{name: c, image: "`+image.Tools+`", imagePullPolicy: Never, command: [sleep, infinity]}]
`))
	kubectl("rollout", "status", "deployment/users", "--timeout=3m")
	testkit.Eventually(t, 2*time.Minute, "a router of an Egress has an address", func() error {
		if ips := kubectl("get", "pods", "--selector=app.kubernetes.io/instance=nat", "--output=jsonpath={.items[*].status.podIP}"); ips == "" {
			return errors.New(kubectl("get", "egresses,deployments,pods"))
		}
		return nil
	})
	kubectl("delete", "pods", "--selector=app=users")
	kubectl("rollout", "status", "deployment/users", "--timeout=3m")
	pods, err := kubernetes.NewForConfigOrDie(c.RESTConfig()).CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	for _, p := range pods.Items {
		if p.Status.Phase == corev1.PodRunning && strings.HasPrefix(p.Status.PodIP, "10.100.0.") {
			used[p.Spec.NodeName] = true
		}
	}
	if len(used) != len(c.Nodes()) {
		t.Fatalf("pods with addresses of Coil are on %v only", used)
	}
}

// nodeState is what Coil changes on a node. It fails if a link goes while it reads.
func nodeState(ctx context.Context, c *cluster.Cluster, node string) ([]string, error) {
	out, err := c.Exec(ctx, node, "sh", "-ec", `
		ip -d link | grep -v link-netnsid; ip -4 rule; ip -6 rule; ip -4 route show table all; ip -6 route show table all
		cd /proc/sys/net; grep -H . ipv4/ip_forward ipv4/conf/*/forwarding ipv4/conf/*/rp_filter ipv4/conf/all/accept_redirects ipv6/conf/*/forwarding ipv6/conf/*/accept_ra
		find /etc/cni/net.d /opt/cni/bin /var/lib/coil /run/coild.sock ! -type d 2>/dev/null | grep -v /coild.db | sort`)
	return strings.Split(string(out), "\n"), err
}

// writeFile writes a file of the test and returns its path.
func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestCleanupManifest: what cleans up finds what coild's DaemonSet has put on the node, by the same
// paths, and knows its flags.
func TestCleanupManifest(t *testing.T) {
	testkit.Need(t, testkit.APIServer)
	s := render(t, "cleanup")
	checkKinds(t, s)
	checkImages(t, s)
	if len(s.all) != 1 || len(s.daemonSets) != 1 {
		t.Fatalf("%d objects, want one DaemonSet", len(s.all))
	}
	mounts := func(spec corev1.PodSpec, cs ...corev1.Container) map[string]string {
		host := map[string]string{}
		for _, v := range spec.Volumes {
			host[v.Name] = v.HostPath.Path
		}
		all := map[string]string{}
		for _, c := range cs {
			for _, m := range c.VolumeMounts {
				all[m.MountPath] = host[m.Name]
			}
		}
		return all
	}
	spec := s.daemonSets[0].Spec.Template.Spec
	coild := render(t, ".")
	i := slices.IndexFunc(coild.daemonSets, func(d appsv1.DaemonSet) bool { return d.Name == "coild" })
	theirs := coild.daemonSets[i].Spec.Template.Spec
	put := mounts(theirs, append(theirs.InitContainers, theirs.Containers...)...)
	bin, err := (&build.Builder{Log: t.Output()}).Own(t.Context(), "cmd/coild")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range append(spec.InitContainers, spec.Containers...) {
		has := mounts(spec, c)
		for _, path := range []string{"/run", "/host/opt/cni/bin", "/host/etc/cni/net.d", "/var/lib/coil"} {
			if has[path] == "" || has[path] != put[path] {
				t.Errorf("container %s has %q at %s, coild %q", c.Name, has[path], path, put[path])
			}
		}
		if diff := cmp.Diff(theirs.Containers[0].Args, c.Args); diff != "" {
			t.Errorf("arguments of %s (-coild's +its):\n%s", c.Name, diff)
		}
		args := slices.Concat(c.Command[1:], c.Args, []string{"--version"})
		if out, err := exec.CommandContext(t.Context(), bin, args...).CombinedOutput(); err != nil || c.Command[0] != "/coild" {
			t.Errorf("%q %q: %v\n%s", c.Command, args, err, out)
		}
	}
	if !spec.HostNetwork || spec.ServiceAccountName != "" || !tolerates(spec.Tolerations, "node.kubernetes.io/not-ready", corev1.TaintEffectNoExecute) {
		t.Errorf("host network %v, account %q, tolerations %v", spec.HostNetwork, spec.ServiceAccountName, spec.Tolerations)
	}
}

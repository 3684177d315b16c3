package migrate

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// old is a cluster of nodes on which v1 runs.
type old struct {
	*cluster.Cluster
	core  kubernetes.Interface
	coil  versioned.Interface
	store *store
}

// v1Config is the network configuration of v1, under the name that Coil's own has.
const v1Config = `{"cniVersion":"0.3.1","name":"k8s-pod-network","plugins":[{"type":"oldcoil"}]}`

// startOld starts a cluster with v1.
func startOld(t *testing.T) old {
	t.Helper()
	const name = "v1"
	testkit.Check(t, cluster.Down(t.Context(), cluster.DefaultStateDir, name))
	o := old{store: startEtcd(t, nil)}
	o.store.put(t, map[string]string{
		"pool/default":            `{"subnets":["10.80.0.0/24"],"block_size":2}`,
		"subnet/10.80.0.0":        "",
		"block/default/10.80.0.0": `{"free":["10.80.0.0/24"],"nodes":{}}`,
		"pool/app":                `{"subnets":["10.81.0.0/26","10.82.0.0/26"],"block_size":1}`,
		"subnet/10.81.0.0":        "",
		"subnet/10.82.0.0":        "",
		"block/app/10.81.0.0":     `{"free":["10.81.0.0/26"],"nodes":{}}`,
		"block/app/10.82.0.0":     `{"free":["10.82.0.0/26"],"nodes":{}}`,
	})
	t.Cleanup(func() {
		testkit.Check(t, cluster.Down(context.WithoutCancel(t.Context()), cluster.DefaultStateDir, name))
	})
	o.Cluster = testkit.Must(cluster.Up(t.Context(), cluster.Options{Name: name, Nodes: 2, Families: []cluster.Family{cluster.IPv4}, Log: os.Stderr}))(t)
	o.core = testkit.Must(kubernetes.NewForConfig(o.RESTConfig()))(t)
	o.coil = testkit.Must(versioned.NewForConfig(o.RESTConfig()))(t)

	plugin := testkit.Must(os.ReadFile(testkit.Must((&build.Builder{}).Own(t.Context(), "integration/migrate/oldcoil"))(t)))(t)
	for _, n := range o.Nodes() {
		testkit.Check(t, os.WriteFile(o.Machine(n).Disk("/opt/cni/bin/oldcoil"), plugin, 0o755))
		testkit.Must(o.Exec(t.Context(), n, "sh", "-c", "echo '"+v1Config+"' > /etc/cni/net.d/10-coil.conflist"))(t)
		testkit.Check(t, o.netns(t, n).Sysctl("ipv4/ip_forward=1"))
		testkit.Must(netlab.NewProxy(t.Context(), o.netns(t, n), "127.0.0.1:12379", o.store.endpoint))(t)
	}
	o.apply(t, "testdata/v1.yaml")
	testkit.Check(t, o.WaitReady(t.Context()), o.WaitWorkloads(t.Context(), "kube-system"))
	o.apply(t, "testdata/pods.yaml")
	return o
}

func (o old) netns(t *testing.T, node string) *netlab.NS {
	t.Helper()
	ns := testkit.Must(netlab.Open(testkit.Must(o.NetNS(node))(t)))(t)
	t.Cleanup(func() { ns.Close() })
	return ns
}

func (o old) apply(t *testing.T, file string) {
	t.Helper()
	testkit.Must(o.Kubectl(t.Context(), "apply", "-f", file))(t)
}

// pods returns the pods with a network of their own, by name. Each address is that of one pod.
func (o old) pods(t *testing.T) map[string]corev1.Pod {
	t.Helper()
	pods, byAddr := map[string]corev1.Pod{}, map[string]string{}
	for _, ns := range []string{"app", "plain"} {
		for _, p := range testkit.Must(o.core.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{}))(t).Items {
			pods[ns+"/"+p.Name] = p
			if p.Status.PodIP == "" {
				continue
			}
			if other := byAddr[p.Status.PodIP]; other != "" {
				t.Errorf("%s is the address of %s and of %s", p.Status.PodIP, other, p.Name)
			}
			byAddr[p.Status.PodIP] = p.Name
		}
	}
	return pods
}

// awaitPods waits until n pods exist and are ready.
func (o old) awaitPods(t *testing.T, n int) map[string]corev1.Pod {
	t.Helper()
	var pods map[string]corev1.Pod
	testkit.Eventually(t, 2*time.Minute, fmt.Sprintf("%d pods are ready", n), func() error {
		pods = o.pods(t)
		var waiting []string
		for name, p := range pods {
			if p.DeletionTimestamp != nil || !slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
			}) {
				waiting = append(waiting, name)
			}
		}
		if len(pods) != n || len(waiting) > 0 {
			return fmt.Errorf("there are %d, of which these aren't: %v", len(pods), waiting)
		}
		return nil
	})
	return pods
}

// more lets pods be made until stop is called, which returns how many there shall be then.
func (o old) more(t *testing.T) (stop func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	const first, most = 2, 14
	n := first
	done := make(chan error, 1)
	go func() {
		for n < most {
			select {
			case <-ctx.Done():
				done <- nil
				return
			case <-time.After(400 * time.Millisecond):
			}
			patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, n+1)
			if _, err := o.core.AppsV1().Deployments("plain").Patch(t.Context(), "late", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
				done <- err
				return
			}
			n++
		}
		done <- nil
	}()
	return func() int {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		return n
	}
}

// killAt runs coil-migrator and kills it after a number of lines. It returns the lines, and whether it had ended by itself.
func (o old) killAt(t *testing.T, lines int, args ...string) (said []string, ended bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), migrator(t), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+o.Kubeconfig())
	var out bytes.Buffer
	cmd.Stdout = &out
	stderr := testkit.Must(cmd.StderrPipe())(t)
	testkit.Check(t, cmd.Start())
	killed := false
	for s := bufio.NewScanner(stderr); s.Scan(); {
		said = append(said, s.Text())
		if len(said) == lines {
			testkit.Check(t, cmd.Process.Kill())
			killed = true
		}
	}
	err := cmd.Wait()
	if !killed && err != nil {
		t.Fatalf("coil-migrator %q: %v\n%s\n%s", args, err, strings.Join(said, "\n"), out.String())
	}
	return said, err == nil
}

// repeat runs coil-migrator again and again, killed after one line more each time, up to a number of times; then it lets it end.
func (o old) repeat(t *testing.T, times int, args ...string) {
	t.Helper()
	for lines := 1; lines <= times; lines++ {
		said, ended := o.killAt(t, lines, args...)
		t.Logf("killed after %d lines: %t; the last: %s", lines, !ended, said[len(said)-1])
		if ended {
			return
		}
	}
	said, _ := o.killAt(t, -1, args...)
	t.Logf("the last run:\n%s", strings.Join(said, "\n"))
}

// hasty returns a directory for kubectl apply -k whose coild gives freed addresses, and so the reserved blocks, back at
// once. The long form takes the directory as it is.
func hasty(t *testing.T, dir string) string {
	t.Helper()
	if testkit.MigrateForm.Long() {
		return dir
	}
	hasty := t.TempDir()
	text := fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources:
- %s
patches:
- target: {kind: DaemonSet, name: coild}
  patch: |-
    - op: add
      path: /spec/template/spec/containers/0/args/-
      value: --cool-down=1s
`, testkit.Must(filepath.Rel(hasty, dir))(t))
	testkit.Check(t, os.WriteFile(filepath.Join(hasty, "kustomization.yaml"), []byte(text), 0o644))
	return hasty
}

// blocks returns the AddressBlocks with or without the label of reserved ones.
func (o old) blocks(t *testing.T, reserved bool) []v2.AddressBlock {
	t.Helper()
	selector := "!" + v2.LabelReserved
	if reserved {
		selector = v2.LabelReserved + "=" + v2.ReservedValue
	}
	return testkit.Must(o.coil.CoilV2().AddressBlocks().List(t.Context(), metav1.ListOptions{LabelSelector: selector}))(t).Items
}

// within returns the node of the block that has an address, or "".
func within(t *testing.T, blocks []v2.AddressBlock, addr string) string {
	t.Helper()
	for _, b := range blocks {
		if testkit.Must(netip.ParsePrefix(*b.IPv4))(t).Contains(netip.MustParseAddr(addr)) {
			return b.Labels[v2.LabelNode]
		}
	}
	return ""
}

// TestFromV1 moves a cluster while pods are made. Pods of v1 keep address and network until they are replaced, whichever
// step coil-migrator is killed at.
func TestFromV1(t *testing.T) {
	testkit.Need(t, testkit.Cluster)
	o := startOld(t)
	ctx := t.Context()
	before := o.awaitPods(t, 6)
	for name, p := range before {
		if pool := map[string]string{"app": "10.81.", "plain": "10.80."}[p.Namespace]; !strings.HasPrefix(p.Status.PodIP, pool) {
			t.Fatalf("v1 gave %s to %s, want one of %s", p.Status.PodIP, name, pool)
		}
	}

	// Each node pings its pods, and the pods of the other one, as a routing daemon would have it. The routes of blocks that
	// v1 takes later aren't known, so pods that are made later are pinged by their own node.
	o.routeBetween(t)
	pings := map[string]*netlab.Pinger{}
	for name, p := range before {
		for _, n := range o.Nodes() {
			pings[name+" from "+n] = testkit.Must(o.netns(t, n).Pings(name, netip.MustParseAddr(p.Status.PodIP)))(t)
		}
	}

	stop := o.more(t)
	file := filepath.Join(t.TempDir(), "coil.yaml")
	o.repeat(t, testkit.MigrateForm.Times(3, 100), "dump", "--etcd-endpoints="+o.store.endpoint, "--output="+file)
	count := len(before) + stop() - 2
	text := testkit.Must(os.ReadFile(file))(t)
	t.Logf("%d pods; the file:\n%s", count, text)
	for name, p := range o.pods(t) {
		if p.Status.PodIP == "" || before[name].Name != "" {
			continue
		}
		pings[name] = testkit.Must(o.netns(t, p.Spec.NodeName).Pings(name, netip.MustParseAddr(p.Status.PodIP)))(t)
	}

	root := testkit.Must(build.Root())(t)
	testkit.Must(o.Kubectl(ctx, "apply", "-k", filepath.Join(root, "manifests/crd")))(t)
	testkit.Eventually(t, 30*time.Second, "the file is applied", func() error { // the definitions take a moment
		_, err := o.Kubectl(ctx, "apply", "-f", file)
		return err
	})
	opts := cluster.Options{Nodes: 2, Log: os.Stderr}
	testkit.Check(t, opts.AddCoil(ctx), o.ImportImage(ctx, opts.Images[0]))
	testkit.Check(t, o.Apply(ctx, hasty(t, opts.Kustomize[0])), o.WaitWorkloads(ctx, "kube-system"))
	all := o.awaitPods(t, count)
	reserved := o.blocks(t, true)
	ofV1 := map[string]string{} // pods by address
	for name, p := range all {
		was, known := before[name]
		node := within(t, reserved, p.Status.PodIP)
		switch {
		case known && (was.UID != p.UID || was.Status.PodIP != p.Status.PodIP):
			t.Errorf("%s had %s, and has %s", name, was.Status.PodIP, p.Status.PodIP)
		case known && node != p.Spec.NodeName:
			t.Errorf("%s of %s on %s is in a reserved block of %q", name, p.Status.PodIP, p.Spec.NodeName, node)
		case pings[name] != nil && node != p.Spec.NodeName:
			t.Errorf("%s of %s on %s, made late, is in a reserved block of %q", name, p.Status.PodIP, p.Spec.NodeName, node)
		}
		if node != "" {
			ofV1[p.Status.PodIP] = name
		}
	}
	t.Logf("%d pods have addresses of v1, in %d blocks", len(ofV1), len(reserved))
	o.reached(t, all)
	for name, p := range pings {
		sent, answered, err := p.End()
		if err != nil || sent < 20 || answered != sent {
			t.Errorf("pings to %s: %d of %d were answered, %v", name, answered, sent, err)
		}
	}

	o.repeat(t, testkit.MigrateForm.Times(4, 100), "replace", "--interval=200ms")
	all = o.awaitPods(t, count)
	if left := o.blocks(t, true); len(left) > 0 {
		testkit.Eventually(t, 30*time.Second, "no reserved block is left", func() error {
			if left = o.blocks(t, true); len(left) > 0 {
				return fmt.Errorf("%d are, such as %s", len(left), left[0].Name)
			}
			return nil
		})
	}
	blocks := o.blocks(t, false)
	for name, p := range all {
		if node := within(t, blocks, p.Status.PodIP); node != p.Spec.NodeName {
			t.Errorf("%s of %s on %s is in a block of %q", name, p.Status.PodIP, p.Spec.NodeName, node)
		}
	}
	o.inLine(t, blocks, all)
}

// routeBetween adds the routes of each node's table 119 to the other nodes.
func (o old) routeBetween(t *testing.T) {
	t.Helper()
	for _, from := range o.Nodes() {
		via := testkit.Must(o.Addrs(from))(t)[0]
		for line := range strings.Lines(string(testkit.Must(o.Exec(t.Context(), from, "ip", "route", "show", "table", "119"))(t))) {
			for _, to := range o.Nodes() {
				if to != from {
					testkit.Must(o.Exec(t.Context(), to, "ip", "route", "add", strings.Fields(line)[0], "via", via.String(), "proto", "bird", "metric", "50"))(t)
				}
			}
		}
	}
}

// inLine waits until the nodes have the routes of their blocks and pods, and none of v1.
func (o old) inLine(t *testing.T, blocks []v2.AddressBlock, pods map[string]corev1.Pod) {
	t.Helper()
	want := map[string]map[string]bool{}
	for _, n := range o.Nodes() {
		want[n] = map[string]bool{}
	}
	for _, b := range blocks {
		want[b.Labels[v2.LabelNode]][strings.TrimSuffix(*b.IPv4, "/32")] = true
	}
	o.reached(t, pods)
	for _, n := range o.Nodes() {
		testkit.Eventually(t, time.Minute, "the routes of "+n+" are in line", func() error {
			got := map[string]bool{}
			for line := range strings.Lines(string(testkit.Must(o.Exec(t.Context(), n, "ip", "route", "show", "table", "119"))(t))) {
				got[strings.Fields(line)[0]] = true
			}
			var errs []error
			if !maps.Equal(got, want[n]) {
				errs = append(errs, fmt.Errorf("table 119 has %v, want %v", got, want[n]))
			}
			for line := range strings.Lines(string(testkit.Must(o.Exec(t.Context(), n, "ip", "route", "show", "table", "main"))(t))) {
				if strings.Contains(line, " dev veth") {
					errs = append(errs, fmt.Errorf("a route of v1 is left: %s", line))
				}
			}
			return errors.Join(errs...)
		})
	}
}

// reached checks that each node reaches all pods.
func (o old) reached(t *testing.T, pods map[string]corev1.Pod) {
	t.Helper()
	for _, n := range o.Nodes() {
		failed := 0
		for name, p := range pods {
			if err := o.netns(t, n).Ping(netip.MustParseAddr(p.Status.PodIP), testkit.Timeout(2*time.Second)); err != nil {
				t.Errorf("%s doesn't reach %s, %s on %s: %v", n, name, p.Status.PodIP, p.Spec.NodeName, err)
				failed++
			}
		}
		if failed > 0 {
			for _, n := range o.Nodes() {
				out, err := o.Exec(t.Context(), n, "sh", "-c", "ip rule; ip route show table all; nft list ruleset; sysctl -a 2>/dev/null | grep -E 'rp_filter|ip_forward|proxy_arp '")
				t.Logf("%s (%v):\n%s", n, err, out)
			}
			return
		}
	}
}

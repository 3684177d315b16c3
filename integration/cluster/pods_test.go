package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// Thirty pods over all nodes, of more blocks than one each, in the long form sixty: all run, all addresses differ, every pair of
// nodes pings in both families; when they are gone every block goes back to the pool.
func TestManyPods(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := e.pool(t, 3, "10.60.0.0/22", "fd00:60::/118")
	e.start(t, ns, "p", testkit.CrashForm.Times(30, 60), e.Nodes()...)
	pods := e.running(t, ns, 4*time.Minute)

	seen := map[string]string{}
	byNode := map[string][]corev1.Pod{}
	for _, p := range pods {
		if len(p.Status.PodIPs) != 2 {
			t.Errorf("pod %s has addresses %v, want one of each family", p.Name, ips(p))
		}
		for _, ip := range ips(p) {
			if other, ok := seen[ip]; ok {
				t.Errorf("%s is given to %s and %s", ip, p.Name, other)
			}
			seen[ip] = p.Name
		}
		byNode[p.Spec.NodeName] = append(byNode[p.Spec.NodeName], p)
	}
	for _, from := range e.Nodes() {
		var to []string
		for _, node := range e.Nodes() {
			to = append(to, ips(byNode[node][:3]...)...)
		}
		if failed := e.ping(t, &byNode[from][0], to); len(failed) > 0 {
			t.Errorf("a pod on %s did not reach %v", from, failed)
		}
	}
	for _, node := range e.Nodes() {
		var want []string
		for _, p := range byNode[node] {
			want = append(want, fmt.Sprintf("%s %s %s/%s", p.Status.PodIPs[0].IP, p.Status.PodIPs[1].IP, ns, p.Name))
		}
		slices.Sort(want)
		if got := e.allocations(t, node, "namespace = '"+ns+"'"); !slices.Equal(got, want) {
			t.Errorf("record of %s:\n%s\nwant\n%s", node, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}

	if err := e.core.CoreV1().Pods(ns).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	// Deletion, the cool-down, and the release itself.
	testkit.Eventually(t, 4*time.Minute, "all blocks are back in the pool", func() error {
		blocks, err := e.blocksOf(t, ns)
		if err != nil {
			return err
		}
		if len(blocks) > 0 {
			return fmt.Errorf("%d are not, such as %s: %+v", len(blocks), blocks[0].Name, blocks[0].Status)
		}
		return nil
	})
	// The other nodes' coil-router follows the blocks within moments.
	testkit.Eventually(t, 15*time.Second, "no node has a route left", func() error {
		for _, node := range e.Nodes() {
			out, err := e.Exec(t.Context(), node, "sh", "-c", "ip route show table all; ip -6 route show table all")
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, "10.60.") || strings.Contains(line, "fd00:60:") {
					return fmt.Errorf("%s has %s", node, strings.TrimSpace(line))
				}
			}
		}
		return nil
	})
}

// Deleting coild's pods must not disturb the pods of the cluster; the new coilds
// adopt them, and no address is given twice.
func TestCoildReplaced(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 5, "10.61.0.0/24", "fd00:61::/120")
	e.start(t, ns, "before", 6, e.Nodes()...)
	before := e.running(t, ns, 2*time.Minute)

	err := e.core.CoreV1().Pods("kube-system").DeleteCollection(t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=coild"})
	if err != nil {
		t.Fatal(err)
	}
	if failed := e.ping(t, &before[0], ips(before...)); len(failed) > 0 {
		t.Errorf("while coild is away, a pod did not reach %v", failed)
	}
	// Pods that are made meanwhile run as soon as coild is back.
	e.start(t, ns, "after", 6, e.Nodes()...)
	after := e.running(t, ns, 3*time.Minute)

	seen := map[string]string{}
	for _, p := range after {
		for _, ip := range ips(p) {
			if other, ok := seen[ip]; ok {
				t.Errorf("%s is given to %s and %s", ip, p.Name, other)
			}
			seen[ip] = p.Name
		}
	}
	for _, p := range before {
		for _, ip := range ips(p) {
			if seen[ip] != p.Name {
				t.Errorf("pod %s had %s, which now is of %q", p.Name, ip, seen[ip])
			}
		}
	}
	if failed := e.ping(t, &before[0], ips(after...)); len(failed) > 0 {
		t.Errorf("after coild came back, a pod did not reach %v", failed)
	}
}

// A power cut: the node's pods come back with addresses of its blocks, and the
// addresses of their old sandboxes are not lost.
func TestPowerCut(t *testing.T) {
	e := use(t)
	ns := e.pool(t, 4, "10.62.0.0/24", "fd00:62::/120")
	node := e.Nodes()[2]
	e.start(t, ns, "p", 6, e.Nodes()[1], node)
	e.running(t, ns, 2*time.Minute)
	if err := e.PowerOff(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	if err := e.PowerOn(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	if err := e.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The API still shows the pods as ready from before: only a reached pod counts.
	testkit.Eventually(t, 3*time.Minute, "the pods reach each other again", func() error {
		l, err := e.core.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, p := range l.Items {
			if p.Spec.NodeName == node && (len(p.Status.ContainerStatuses) == 0 || p.Status.ContainerStatuses[0].RestartCount == 0) {
				return fmt.Errorf("pod %s has not been restarted", p.Name)
			}
		}
		for _, p := range l.Items {
			if p.Spec.NodeName != node {
				if failed := e.ping(t, &p, ips(l.Items...)); len(failed) > 0 {
					return fmt.Errorf("pod %s did not reach %v", p.Name, failed)
				}
				break
			}
		}
		return nil
	})
	pods := e.running(t, ns, time.Minute)
	var want []string
	for _, p := range pods {
		if p.Spec.NodeName == node {
			want = append(want, fmt.Sprintf("%s %s %s/%s", p.Status.PodIPs[0].IP, p.Status.PodIPs[1].IP, ns, p.Name))
		}
	}
	slices.Sort(want)
	testkit.Eventually(t, time.Minute, "the record has only living pods", func() error {
		if got := e.allocations(t, node, "namespace = '"+ns+"'"); !slices.Equal(got, want) {
			return fmt.Errorf("it has\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		return nil
	})
	if blocks, err := e.blocksOf(t, ns); err != nil || len(blocks) != 2 {
		t.Errorf("%d blocks, %v; want the two from before the power cut", len(blocks), err)
	}
}

// The columns that an operator sees.
func TestPoolStatus(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := e.pool(t, 1, "10.63.0.0/29", "fd00:63::/125")
	e.start(t, ns, "p", 3, e.Nodes()[1])
	e.running(t, ns, 2*time.Minute)
	testkit.Eventually(t, 90*time.Second, "the pool's status has what is used", func() error {
		p, err := e.coil.CoilV2().AddressPools().Get(t.Context(), ns, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if b, a := p.Status.Blocks, p.Status.Addresses; b.Used != 2 || b.Total != 4 || a.Used != 3 || a.Total != 8 {
			return fmt.Errorf("blocks %d/%d, addresses %d/%d; want 2/4 and 3/8", b.Used, b.Total, a.Used, a.Total)
		}
		return nil
	})
	blocks, err := e.blocksOf(t, ns)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range blocks {
		if b.Labels[v2.LabelNode] != e.Nodes()[1] || b.Annotations[v2.AnnotationNodeUID] == "" || !slices.Contains(b.Finalizers, v2.Finalizer) {
			t.Errorf("block %s: labels %v, annotations %v, finalizers %v", b.Name, b.Labels, b.Annotations, b.Finalizers)
		}
		if o := metav1.GetControllerOf(&b); o == nil || o.Kind != "AddressPool" || o.Name != ns {
			t.Errorf("block %s is owned by %+v", b.Name, o)
		}
	}
}

// A deleted pool gives nothing new, keeps what is in use, and goes with its last pod.
func TestPoolDeleted(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := namespaceName(t)
	ipv4 := "10.64.0.0/26"
	pools := e.coil.CoilV2().AddressPools()
	_, err := pools.Create(t.Context(), &v2.AddressPool{
		ObjectMeta: metav1.ObjectMeta{Name: ns},
		Spec:       v2.AddressPoolSpec{BlockSizeBits: 3, Subnets: []v2.SubnetSet{{IPv4: &ipv4}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	e.namespace(t, ns, ns)
	e.start(t, ns, "early", 2, e.Nodes()[1:]...)
	early := e.running(t, ns, time.Minute)
	if err := pools.Delete(t.Context(), ns, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, time.Minute, "the blocks are marked", func() error {
		blocks, err := e.blocksOf(t, ns)
		if err != nil {
			return err
		}
		for _, b := range blocks {
			if b.DeletionTimestamp == nil {
				return fmt.Errorf("block %s is not", b.Name)
			}
		}
		return nil
	})
	e.start(t, ns, "late", 1, e.Nodes()[1])
	e.event(t, ns, "late-0", time.Minute, "AddressPool "+ns+" is being deleted")
	if failed := e.ping(t, &early[0], ips(early...)); len(failed) > 0 {
		t.Errorf("pods of the deleted pool did not reach %v", failed)
	}
	if err := e.core.CoreV1().Pods(ns).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 3*time.Minute, "the pool is gone", func() error {
		p, err := pools.Get(t.Context(), ns, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("its conditions are %+v", p.Status.Conditions)
		}
		return err
	})
}

// A static Pod has another UID at the runtime than its mirror has at the API server.
func TestStaticPod(t *testing.T) {
	e := use(t)
	t.Parallel()
	ns := e.pool(t, 1, "10.65.0.0/29", "fd00:65::/125")
	node := e.Nodes()[2]
	manifest := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "static", "namespace": %q}, "spec": {
		"terminationGracePeriodSeconds": 0,
		"containers": [{"name": "main", "image": %q, "imagePullPolicy": "Never", "command": ["sleep", "86400"]}]}}`, ns, tools)
	do := func(script string, args ...string) {
		t.Helper()
		testkit.Must(e.Exec(t.Context(), node, append([]string{"sh", "-ec", "mkdir -p $0; cd $0; " + script, cluster.StaticPodDir}, args...)...))(t)
	}
	do(`echo "$1" > static.json`, manifest)
	testkit.Eventually(t, 2*time.Minute, "the static Pod runs", func() error {
		p, err := e.core.CoreV1().Pods(ns).Get(t.Context(), "static-"+node, metav1.GetOptions{})
		if err == nil && (!isReady(p) || len(p.Status.PodIPs) != 2 || !strings.HasPrefix(p.Status.PodIP, "10.65.0.")) {
			err = fmt.Errorf("it is %s and has %v", p.Status.Phase, p.Status.PodIPs)
		}
		return err
	})
	do("rm static.json")
	testkit.Eventually(t, 2*time.Minute, "its address is free", func() error {
		if left := e.allocations(t, node, "namespace = '"+ns+"'"); len(left) > 0 {
			return fmt.Errorf("%v", left)
		}
		return nil
	})
}

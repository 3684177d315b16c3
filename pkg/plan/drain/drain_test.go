package drain_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/drain"
	"github.com/coil-net/coil/pkg/plan/plantest"
)

func namespace(name, pool string) *corev1.Namespace {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if pool != "" {
		n.Annotations = map[string]string{v2.AnnotationPool: pool}
	}
	return n
}

// pod returns a pod of a ReplicaSet that runs.
func pod(namespace, name, node string, ips ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name)}}
	p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "rs", Controller: new(true)}}
	p.Spec.NodeName, p.Status.Phase = node, corev1.PodRunning
	for _, ip := range ips {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
	}
	return p
}

func changed(p *corev1.Pod, change func(p *corev1.Pod)) *corev1.Pod {
	change(p)
	return p
}

// lines are the pods of a plan, each with what becomes of it.
func lines(p drain.Plan) (all []string) {
	for _, pod := range p.Pods {
		does := "moves"
		if pod.Ending {
			does = "ends"
		}
		if pod.Stays != "" {
			does = "stays: " + pod.Stays
		}
		all = append(all, fmt.Sprintf("%s %s %s %s", pod.Node, pod, pod.Address, does))
	}
	return all
}

func TestPlan(t *testing.T) {
	floating := func(index int32, owner string, released bool) *v2.AddressBlock {
		b := plantest.Block("blue", index, fmt.Sprintf("10.0.9.%d/32", index), "")
		delete(b.Labels, v2.LabelNode)
		b.Labels[v2.LabelFloating] = v2.FloatingValue
		b.Floating = &v2.Floating{Owner: v2.FloatingOwner{Summary: owner}}
		if released {
			b.Floating.ReleasedAt = new(metav1.Now())
		}
		return b
	}
	reserved := plantest.Block("blue", 30, "10.0.7.0/30", "n3")
	reserved.Labels[v2.LabelReserved] = v2.ReservedValue
	second := plantest.Block("blue", 1, "10.0.0.4/30", "n2")
	second.IPv6 = new("fd00::4/126")
	facts := drain.Facts{
		Pool: "blue",
		Blocks: []*v2.AddressBlock{
			plantest.Block("blue", 0, "10.0.0.0/30", "n1"), second, reserved,
			plantest.Block("red", 0, "10.1.0.0/30", "n1"),
			floating(40, "Egress a/b", false), floating(41, "Egress a/b", false), floating(42, "Egress a/c", true),
		},
		Namespaces: []*corev1.Namespace{namespace("shop", "red"), namespace("left", "blue"), namespace("plain", "")},
	}
	pods := []*corev1.Pod{
		pod("shop", "web-2", "n2", "10.0.0.5", "fd00::5"),
		pod("shop", "six", "n2", "fd00::6"),
		pod("shop", "web-1", "n1", "10.0.0.1"),
		pod("plain", "default-pool", "n1", "10.0.0.0"),
		pod("shop", "other-pool", "n1", "10.1.0.1"),
		pod("shop", "other-node", "n2", "10.0.0.2"), // of another cluster's plugin: the block is n1's
		pod("shop", "no-address", "n1"),
		pod("left", "web", "n1", "10.0.0.3"),
		pod("shop", "of-a-reserved-block", "n3", "10.0.7.1"),
		changed(pod("shop", "host", "n1", "10.0.0.1"), func(p *corev1.Pod) { p.Spec.HostNetwork = true }),
		changed(pod("shop", "done", "n1", "10.0.0.1"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
		changed(pod("shop", "failed", "n1", "10.0.0.1"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }),
		changed(pod("left", "ending", "n1", "10.0.0.2"), func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.Now()) }),
		changed(pod("shop", "bare", "n1", "10.0.0.2"), func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil }),
		changed(pod("shop", "static", "n1", "10.0.0.2"), func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "Node", Name: "n1", Controller: new(true)}}
		}),
	}
	const names = "stays: its namespace still names the pool, so its successor wouldn't start: name another one in the annotation coil.cybozu.com/pool of Namespace "
	for _, force := range []bool{false, true} {
		facts.Force = force
		p := drain.New(facts)
		for _, pod := range pods {
			p.Add(pod)
		}
		got := p.Plan()
		bare := "stays: it has no controller, so nobody makes it again: delete it, or use --force"
		moves := 5
		if force {
			bare, moves = "moves", 6
		}
		want := []string{
			"n1 left/ending 10.0.0.2 ends",
			"n1 left/web 10.0.0.3 " + names + "left",
			"n1 plain/default-pool 10.0.0.0 moves",
			"n1 shop/bare 10.0.0.2 " + bare,
			"n1 shop/static 10.0.0.2 stays: it is a static pod: move its manifest on the node away",
			"n1 shop/web-1 10.0.0.1 moves",
			"n2 shop/six fd00::6 moves",
			"n2 shop/web-2 10.0.0.5 moves",
			"n3 shop/of-a-reserved-block 10.0.7.1 moves",
		}
		if diff := cmp.Diff(want, lines(got)); diff != "" {
			t.Errorf("force %t (-want +got):\n%s", force, diff)
		}
		if len(got.Moves()) != moves || len(got.Ending()) != 1 || len(got.Stay()) != len(got.Pods)-moves-1 {
			t.Errorf("force %t: %d move, %d stay, %d end", force, len(got.Moves()), len(got.Stay()), len(got.Ending()))
		}
		got.Pods = nil
		if diff := cmp.Diff(drain.Plan{
			Naming: []string{"left"}, Blocks: 2, Nodes: 3, Reserved: []string{"blue-30"}, Owners: []string{"Egress a/b"}, Cooling: 1,
		}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// Pods of namespaces without the annotation have the pool of that name.
func TestDefaultPool(t *testing.T) {
	p := drain.New(drain.Facts{
		Pool: v2.DefaultPool, Blocks: []*v2.AddressBlock{plantest.Block("default", 0, "10.0.0.0/30", "n1")},
		Namespaces: []*corev1.Namespace{namespace("shop", "red"), namespace("plain", ""), namespace("explicit", "default")},
	})
	p.Add(pod("plain", "a", "n1", "10.0.0.0"))
	p.Add(pod("shop", "b", "n1", "10.0.0.1"))
	got := p.Plan()
	if diff := cmp.Diff([]string{"explicit", "plain"}, got.Naming); diff != "" {
		t.Error(diff)
	}
	if moves := got.Moves(); len(moves) != 1 || moves[0].Name != "b" {
		t.Errorf("%+v", got.Pods)
	}
}

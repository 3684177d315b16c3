package egress_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// routerOn is a router that is ready, of an age in minutes.
func routerOn(node, name string, age int) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "internet", Name: name, UID: types.UID(name + "-uid"), CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-time.Duration(age) * time.Minute)),
	}}
	p.Spec.NodeName = node
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	return p
}

func floatingBlock(i int) *v2.AddressBlock {
	return &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("partners-", i)}, Floating: &v2.Floating{}}
}

// internalIPs are the addresses of a node of any name but one.
func internalIPs(node string) []string {
	if node == "gone" {
		return nil
	}
	return []string{"ip of " + node}
}

func withAddresses() *v2.Egress {
	return &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"}, Spec: v2.EgressSpec{Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: "partners"}}}
}

func TestPlaces(t *testing.T) {
	on := func(node, pod string) v2.FloatingNode {
		return v2.FloatingNode{Node: node, Addresses: internalIPs(node), PodUID: types.UID(pod + "-uid")}
	}
	ending, starting := routerOn("a", "ending", 9), routerOn("a", "starting", 9)
	ending.DeletionTimestamp, starting.Status.Conditions = &metav1.Time{}, nil
	broken := routerOn("a", "broken", 9)
	broken.DeletionTimestamp, broken.Status.Conditions = &metav1.Time{}, nil
	// The address is on node a, by a router of a name.
	held := func(by string) v2.Floating {
		return v2.Floating{Successors: []v2.FloatingNode{on("a", by), on("b", "s")}, Holding: v2.FloatingHolding{Holder: "a", PodUID: types.UID(by + "-uid")}}
	}
	moving := held("ending")
	moving.Successors, moving.MovingTo = []v2.FloatingNode{on("b", "s"), on("a", "ending")}, "b"
	come := moving
	come.Holding = v2.FloatingHolding{Holder: "b", PodUID: "s-uid"}
	for _, tt := range []struct {
		name    string
		routers []*corev1.Pod
		have    v2.Floating
		want    *egress.Place
	}{
		{"its router ends, and forwards", []*corev1.Pod{ending, routerOn("b", "s", 1)}, held("ending"),
			&egress.Place{Successors: []v2.FloatingNode{on("b", "s"), on("a", "ending")}, MovingTo: "b"}},
		{"it is on its way", []*corev1.Pod{ending, routerOn("b", "s", 1), routerOn("c", "t", 9)}, moving,
			&egress.Place{Successors: []v2.FloatingNode{on("b", "s"), on("c", "t"), on("a", "ending")}, MovingTo: "b"}},
		{"it has come", []*corev1.Pod{ending, routerOn("b", "s", 1)}, come, &egress.Place{Successors: []v2.FloatingNode{on("b", "s")}}},
		{"its router ends, and doesn't forward", []*corev1.Pod{broken, routerOn("b", "s", 1)}, held("broken"), &egress.Place{Successors: []v2.FloatingNode{on("b", "s")}}},
		{"its router ends, and no other is ready", []*corev1.Pod{ending, starting}, held("ending"), nil},
		{"its router ends, and its node has another: that is for others", []*corev1.Pod{ending, routerOn("a", "r", 1), routerOn("b", "s", 1)}, held("ending"),
			&egress.Place{Successors: []v2.FloatingNode{on("b", "s"), on("a", "ending")}, MovingTo: "b"}},
		{"its router ends, and no other node has one", []*corev1.Pod{ending, routerOn("a", "r", 1)}, held("ending"), &egress.Place{Successors: []v2.FloatingNode{on("a", "r")}}},
		{"another router of its node ends", []*corev1.Pod{ending, routerOn("a", "r", 1), routerOn("b", "s", 1)}, held("r"), nil},
		{"the only router", []*corev1.Pod{routerOn("a", "r", 1)}, v2.Floating{}, &egress.Place{Successors: []v2.FloatingNode{on("a", "r")}}},
		{"the oldest router of a node", []*corev1.Pod{routerOn("a", "new", 1), routerOn("a", "old", 2)}, v2.Floating{}, &egress.Place{Successors: []v2.FloatingNode{on("a", "old")}}},
		{"the router that it has stays, though an older one is ready by now", []*corev1.Pod{routerOn("a", "new", 1), routerOn("a", "old", 2)},
			v2.Floating{Successors: []v2.FloatingNode{on("a", "new")}}, nil},
		{"a router of the name on another node is another one", []*corev1.Pod{routerOn("a", "r", 1)}, v2.Floating{Successors: []v2.FloatingNode{on("b", "r")}},
			&egress.Place{Successors: []v2.FloatingNode{on("a", "r")}}},
		{"one that ends, and one that isn't ready", []*corev1.Pod{ending, starting, routerOn("a", "r", 1)}, v2.Floating{}, &egress.Place{Successors: []v2.FloatingNode{on("a", "r")}}},
		{"a node that is gone", []*corev1.Pod{routerOn("gone", "r", 1)}, v2.Floating{}, nil},
		{"no router: nothing changes", nil, v2.Floating{Successors: []v2.FloatingNode{on("a", "r")}}, nil},
		{"as it is", []*corev1.Pod{routerOn("a", "r", 1)}, v2.Floating{Successors: []v2.FloatingNode{on("a", "r")}, Holding: v2.FloatingHolding{Holder: "a"}}, nil},
		{"its holder stays the first", []*corev1.Pod{routerOn("a", "r", 1), routerOn("b", "s", 1)}, v2.Floating{Holding: v2.FloatingHolding{Holder: "b"}},
			&egress.Place{Successors: []v2.FloatingNode{on("b", "s"), on("a", "r")}}},
		{"its holder has no router: it gives the address up by itself", []*corev1.Pod{routerOn("a", "r", 1)}, v2.Floating{Holding: v2.FloatingHolding{Holder: "b"}},
			&egress.Place{Successors: []v2.FloatingNode{on("a", "r")}}},
		{"where it was to move to is gone", []*corev1.Pod{routerOn("a", "r", 1)},
			v2.Floating{Successors: []v2.FloatingNode{on("b", "s"), on("a", "r")}, MovingTo: "b", Holding: v2.FloatingHolding{Holder: "a"}},
			&egress.Place{Successors: []v2.FloatingNode{on("a", "r")}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := floatingBlock(0)
			b.Floating = &tt.have
			want := map[string]egress.Place{}
			if tt.want != nil {
				want[b.Name] = *tt.want
			}
			if d := cmp.Diff(want, egress.Places(withAddresses(), []*v2.AddressBlock{b}, tt.routers, internalIPs), cmpEmpty); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

// cmpEmpty takes no map for an empty one.
var cmpEmpty = cmp.FilterValues(func(a, b map[string]egress.Place) bool { return len(a)+len(b) == 0 }, cmp.Ignore())

// Routers come and go, and addresses follow: they are spread evenly, each first on a node with a router, and a second look changes
// nothing. As many as can stay where they are.
func TestPlacesOfManyAddresses(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		e := withAddresses()
		var blocks []*v2.AddressBlock
		for i := range 1 + r.IntN(20) {
			blocks = append(blocks, floatingBlock(i))
		}
		up := map[string]bool{}
		for step := range 20 {
			up[fmt.Sprint("node-", r.IntN(9))] = r.IntN(3) > 0
			var routers []*corev1.Pod
			for node, is := range up {
				if is {
					routers = append(routers, routerOn(node, "router-on-"+node, 1))
				}
			}
			for name, p := range egress.Places(e, blocks, routers, internalIPs) {
				i := slices.IndexFunc(blocks, func(b *v2.AddressBlock) bool { return b.Name == name })
				blocks[i].Floating.Successors, blocks[i].Floating.MovingTo = p.Successors, p.MovingTo
			}
			if again := egress.Places(e, blocks, routers, internalIPs); len(again) > 0 {
				t.Fatalf("seed %d, step %d: a second look changes %v", seed, step, again)
			}
			if len(routers) == 0 {
				continue
			}
			counts := map[string]int{}
			for _, b := range blocks {
				first := b.Floating.Successors[0].Node
				if !up[first] {
					t.Fatalf("seed %d, step %d: %s is to be on %s, which has no router", seed, step, b.Name, first)
				}
				if h := b.Floating.Holding.Holder; b.Floating.MovingTo != "" && (!up[h] || b.Floating.MovingTo != first || h == first) {
					t.Fatalf("seed %d, step %d: %s moves from %q to %q, its first is %q", seed, step, b.Name, h, b.Floating.MovingTo, first)
				}
				if h := b.Floating.Holding.Holder; up[h] && !slices.ContainsFunc(b.Floating.Successors, func(n v2.FloatingNode) bool { return n.Node == h }) {
					t.Fatalf("seed %d, step %d: %s has to leave %s before it has moved", seed, step, b.Name, h)
				}
				counts[first]++
			}
			most, least := 0, len(blocks)
			for node, is := range up {
				if is {
					most, least = max(most, counts[node]), min(least, counts[node])
				}
			}
			if most-least > 1 {
				t.Fatalf("seed %d, step %d: spread %v", seed, step, counts)
			}
			for _, b := range blocks { // the nodes follow
				if r.IntN(4) > 0 {
					b.Floating.Holding.Holder, b.Floating.MovingTo = b.Floating.Successors[0].Node, ""
				}
			}
		}
	}
}

func TestAddressesOfTheStatus(t *testing.T) {
	e := withAddresses()
	claim := egress.AddressClaim(e)
	claim.Status.Addresses = []v2.ClaimedAddress{{Block: "partners-1", IPv4: "198.51.100.1"}, {Block: "partners-0", IPv4: "198.51.100.0", IPv6: "2001:db8::"}}
	blocks := []*v2.AddressBlock{floatingBlock(0), floatingBlock(1)}
	router := routerOn("a", "r", 1)
	blocks[0].Floating.Holding = v2.FloatingHolding{Holder: "a", PodUID: "of before"}
	blocks[0].Floating.Successors = []v2.FloatingNode{{Node: "a", PodUID: router.UID}}
	facts := egress.Facts{Egress: e, Claim: claim, Blocks: blocks, Routers: []*corev1.Pod{router}, Now: metav1.Now()}
	is := func(status metav1.ConditionStatus, reason string) {
		t.Helper()
		st := egress.Status(facts)
		i := slices.IndexFunc(st.Conditions, func(c metav1.Condition) bool { return c.Type == v2.EgressAddressesReady })
		if i < 0 || st.Conditions[i].Status != status || st.Conditions[i].Reason != reason {
			t.Errorf("conditions %+v, want AddressesReady %s for %s", st.Conditions, status, reason)
		}
	}
	is(metav1.ConditionFalse, egress.ReasonClaimPending)
	claim.Status.Conditions = []metav1.Condition{{Type: v2.ClaimReady, Status: metav1.ConditionFalse, Reason: v2.ReasonPoolNotFound}}
	is(metav1.ConditionFalse, v2.ReasonPoolNotFound)
	claim.Status.Conditions[0].Status = metav1.ConditionTrue
	is(metav1.ConditionFalse, egress.ReasonNoHolder)
	want := []v2.EgressAddressStatus{
		{Block: "partners-1", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.1"}},
		{Block: "partners-0", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.0", IPv6: "2001:db8::"}, Node: "a", Router: "r"},
	}
	if d := cmp.Diff(want, egress.Status(facts).Addresses); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
	blocks[1].Floating.Holding.Holder = "b"
	e.Spec.Addresses.Shared = []string{"198.51.100.1", "2001:db8:0::"} // of IPv6 another text
	is(metav1.ConditionTrue, egress.ReasonAddressesHeld)
	e.Spec.Addresses.Shared = []string{"198.51.100.1", "198.51.100.2"}
	is(metav1.ConditionFalse, egress.ReasonSharedOutside)
	facts.NoPools = true
	is(metav1.ConditionFalse, egress.ReasonNoPools)
	facts.Egress = &v2.Egress{Status: egress.Status(facts)}
	facts.Claim = nil
	if st := egress.Status(facts); len(st.Addresses) > 0 || slices.ContainsFunc(st.Conditions, func(c metav1.Condition) bool { return c.Type == v2.EgressAddressesReady }) {
		t.Errorf("an Egress without addresses has the status %+v", st)
	}
}

// Blocks say whether connections are copied all the time, and the same places are written again when that changes.
func TestStandbyIsWritten(t *testing.T) {
	e, block, routers := withAddresses(), floatingBlock(0), []*corev1.Pod{routerOn("a", "r", 1), routerOn("b", "s", 1)}
	for _, standby := range []bool{false, true, false} {
		e.Spec.Addresses.Standby = standby
		places := egress.Places(e, []*v2.AddressBlock{block}, routers, internalIPs)
		if p, changed := places[block.Name]; !changed || p.Standby != standby || len(p.Successors) != 2 {
			t.Errorf("with standby %t: %+v, changed %t", standby, p, changed)
		}
		apply([]*v2.AddressBlock{block}, places)
		if again := egress.Places(e, []*v2.AddressBlock{block}, routers, internalIPs); len(again) > 0 {
			t.Errorf("with standby %t it is written again: %+v", standby, again)
		}
	}
}

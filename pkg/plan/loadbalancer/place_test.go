package loadbalancer_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// clusterNode is a Node that is ready.
func clusterNode(name string, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.1"}, {Type: corev1.NodeInternalIP, Address: "fd00::1"}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	for _, c := range change {
		c(n)
	}
	return n
}

func TestNodesOf(t *testing.T) {
	notReady := func(n *corev1.Node) { n.Status.Conditions[1].Status = corev1.ConditionUnknown }
	excluded := func(n *corev1.Node) { n.Labels["node.kubernetes.io/exclude-from-external-load-balancers"] = "" }
	tainted := func(key string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: key}} }
	}
	for name, c := range map[string]struct {
		nodes []*corev1.Node
		want  []string
	}{
		"ready": {[]*corev1.Node{clusterNode("a"), clusterNode("b", notReady)}, []string{"a"}},
		"none is ready": {[]*corev1.Node{clusterNode("a", notReady), clusterNode("b", notReady, excluded), clusterNode("c", func(n *corev1.Node) { n.Status.Conditions = nil })},
			[]string{"a", "c"}},
		"all that are ready are excluded": {[]*corev1.Node{clusterNode("a", excluded), clusterNode("b", notReady)}, []string{"b"}},
		"about to be deleted": {[]*corev1.Node{
			clusterNode("a", tainted("ToBeDeletedByClusterAutoscaler")), clusterNode("b", func(n *corev1.Node) { n.DeletionTimestamp = &metav1.Time{} }), clusterNode("c", tainted("other")),
		}, []string{"c"}},
		"cordoned":           {[]*corev1.Node{clusterNode("a", func(n *corev1.Node) { n.Spec.Unschedulable = true })}, []string{"a"}},
		"without an address": {[]*corev1.Node{clusterNode("a", func(n *corev1.Node) { n.Status.Addresses = nil })}, nil},
	} {
		got := loadbalancer.NodesOf(c.nodes)
		if names := namesOf(got); !slices.Equal(names, c.want) {
			t.Errorf("%s: %v, want %v", name, names, c.want)
		}
		for _, n := range got {
			if !slices.Equal(n.Addresses, []string{"10.0.0.1", "fd00::1"}) {
				t.Errorf("%s: addresses %v", name, n.Addresses)
			}
		}
	}
}

func namesOf(nodes loadbalancer.Nodes) (names []string) {
	for _, n := range nodes {
		names = append(names, n.Node)
	}
	return names
}

// named are nodes of some names, which are sorted.
func named(names ...string) (nodes loadbalancer.Nodes) {
	for _, name := range names {
		nodes = append(nodes, v2.FloatingNode{Node: name, Addresses: []string{"10.0.0." + strings.TrimLeft(name, "n")}})
	}
	return nodes
}

func TestWithEndpoints(t *testing.T) {
	endpoint := func(node string, ready, serving *bool) discoveryv1.Endpoint {
		e := discoveryv1.Endpoint{Conditions: discoveryv1.EndpointConditions{Ready: ready, Serving: serving}}
		if node != "" {
			e.NodeName = &node
		}
		return e
	}
	yes, no := new(true), new(false)
	ends := endpoint("ends", no, yes)
	for name, c := range map[string]struct {
		endpoints []discoveryv1.Endpoint
		want      map[string]bool
	}{
		"ready, or unknown":      {[]discoveryv1.Endpoint{endpoint("a", yes, yes), endpoint("b", nil, nil), endpoint("c", no, no), ends}, map[string]bool{"a": true, "b": true}},
		"all are ending":         {[]discoveryv1.Endpoint{ends, endpoint("c", no, no), endpoint("d", no, nil)}, map[string]bool{"ends": true}},
		"not on a node":          {[]discoveryv1.Endpoint{endpoint("", yes, yes)}, map[string]bool{}},
		"none":                   {nil, map[string]bool{}},
		"one is ready, one ends": {[]discoveryv1.Endpoint{ends, endpoint("a", yes, yes)}, map[string]bool{"a": true}},
	} {
		// Each is in a slice of its own.
		var all []*discoveryv1.EndpointSlice
		for _, e := range c.endpoints {
			all = append(all, &discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{e}})
		}
		if diff := cmp.Diff(c.want, loadbalancer.WithEndpoints(all)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Nodes, addresses and endpoints come and go. In each moment an address has successors that may have it, its holder is the first of them as long as
// it may have the address.
func TestSuccessorsOfServices(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 7))
		holders := map[string]string{}
		for range 8 {
			var names []string
			for _, i := range r.Perm(9)[:r.IntN(10)] {
				names = append(names, fmt.Sprint("n", i))
			}
			slices.Sort(names)
			nodes := named(names...)
			var spots []loadbalancer.Spot
			for i := range r.IntN(12) {
				s := loadbalancer.Spot{Block: fmt.Sprint("p-", i)}
				s.Holder = holders[s.Block]
				if r.IntN(3) == 0 {
					s.Only = map[string]bool{}
					for _, j := range r.Perm(9)[:r.IntN(4)] {
						s.Only[fmt.Sprint("n", j)] = true
					}
				}
				spots = append(spots, s)
			}
			load := map[string]int{}
			for _, s := range spots {
				first := nodes.First(s, load)
				load[first]++
				may := 0
				for _, n := range names {
					if s.Only == nil || s.Only[n] {
						may++
					}
				}
				all := nodes.Successors(s, first)
				if len(all) != min(5, may) {
					t.Fatalf("history %d: %s has %d successors of %d", seed, s.Block, len(all), may)
				}
				known := map[string]bool{}
				for _, n := range all {
					if !slices.ContainsFunc(nodes, func(o v2.FloatingNode) bool { return o.Node == n.Node && slices.Equal(o.Addresses, n.Addresses) }) ||
						s.Only != nil && !s.Only[n.Node] || known[n.Node] || n.PodUID != "" {
						t.Fatalf("history %d: %s may be on %+v", seed, s.Block, all)
					}
					known[n.Node] = true
				}
				if slices.Contains(names, s.Holder) && (s.Only == nil || s.Only[s.Holder]) && all[0].Node != s.Holder {
					t.Fatalf("history %d: %s is to move from %s to %s", seed, s.Block, s.Holder, all[0].Node)
				}
				if delete(holders, s.Block); len(all) > 0 {
					holders[s.Block] = all[0].Node
				}
			}
		}
	}
}

// Addresses that no node has are spread evenly.
func TestFreshAddressesAreSpread(t *testing.T) {
	nodes := named("a", "b", "c")
	counts := map[string]int{}
	for i := range 8 {
		s := loadbalancer.Spot{Block: fmt.Sprint("p-", i)}
		counts[nodes.Successors(s, nodes.First(s, counts))[0].Node]++
	}
	if diff := cmp.Diff([]int{2, 3, 3}, slices.Sorted(maps.Values(counts))); diff != "" {
		t.Errorf("addresses of nodes (-want +got):\n%s", diff)
	}
}

// All nodes announce the address of a Service without conditions, and those with endpoints that may have it that of another one.
func TestAnnouncers(t *testing.T) {
	var names []string
	all := map[string]bool{}
	for i := range 2 * v2.MaxFloatingAnnouncers {
		names, all[fmt.Sprint(i)] = append(names, fmt.Sprint(i)), true
	}
	slices.Sort(names)
	nodes, many := named("n1", "n2", "n3"), named(names...)
	for _, c := range []struct {
		nodes loadbalancer.Nodes
		only  map[string]bool
		all   bool
		want  int
	}{
		{nodes, nil, true, 0},
		{nodes, map[string]bool{}, false, 0},
		{nodes, map[string]bool{"n3": true, "n1": true, "gone": true}, false, 2},
		{many, all, false, v2.MaxFloatingAnnouncers},
	} {
		got := c.nodes.Announcers(c.only)
		if got.All != c.all || len(got.Nodes) != c.want || !slices.IsSorted(got.Nodes) || slices.Contains(got.Nodes, "gone") {
			t.Errorf("of %d nodes, %d of which have endpoints: %+v", len(c.nodes), len(c.only), got)
		}
	}
}

// A Node serves if it is ready, and its owner doesn't exclude it.
func TestServes(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Node)
		want   bool
	}{
		"ready":               {func(*corev1.Node) {}, true},
		"not ready":           {func(n *corev1.Node) { n.Status.Conditions[1].Status = corev1.ConditionUnknown }, false},
		"excluded":            {func(n *corev1.Node) { n.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""} }, false},
		"about to be deleted": {func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler"}} }, false},
		"deleted":             {func(n *corev1.Node) { n.DeletionTimestamp = &metav1.Time{} }, false},
		"tainted":             {func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "dedicated"}} }, true},
	} {
		if got := loadbalancer.Serves(clusterNode("n", c.change)); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

package egress_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// An address moves to no node that drops its packets, as long as there is another one; and leaves it. Such nodes are its last successors.
func TestPlacesOffBlockedNodes(t *testing.T) {
	for _, tt := range []struct {
		name     string
		max      int32  // of addresses on a node
		nodes    string // with routers
		blocked  string // nodes that say that they drop packets, of the first addresses
		ended    bool   // they have said so
		holders  string // of the addresses
		movingTo string // of the first address
		want     string // the successors of each address, with the node to which it is to move
	}{
		{"none is", 0, "ab", "", false, "bb", "", "ba ab>a"},
		{"an address stays off a node though that has none", 0, "ab", "a", false, "bb", "", "ba ba"},
		{"it was", 0, "ab", "a", true, "bb", "", "ba ab>a"},
		{"a move is called off", 0, "ab", "a", false, "b", "a", "ba"},
		{"the holder is: it hands over", 0, "ab", "a", false, "a", "", "ba>b"},
		{"two of three are", 0, "abc", "ab", false, "ac", "", "cab>c cab"},
		{"all are", 0, "ab", "ab", false, "ab", "", "ab ba"},
		{"the other node has no room", 2, "ab", "a", false, "aabb", "", "a a ba ba"},
		{"the other node has room for one", 2, "ab", "a", false, "aab", "", "ba>b a ba"},
		{"nobody has the one for which there is no room", 1, "ab", "a", false, "ab-", "", "a ba "},
	} {
		for _, use := range []v2.EgressAddressUse{v2.EgressAddressOfClient, v2.EgressAddressOfRouter} {
			t.Run(tt.name+", "+string(use), func(t *testing.T) {
				e := withAddresses()
				e.Spec.Addresses.Use = use
				e.Spec.Addresses.Placement = &v2.EgressPlacement{MaxPerNode: tt.max}
				var routers []*corev1.Pod
				var all []v2.FloatingNode
				for i, node := range strings.Split(tt.nodes, "") {
					p := routerOn(node, node, 9-i)
					routers = append(routers, p)
					all = append(all, v2.FloatingNode{Node: node, Addresses: internalIPs(node), PodUID: p.UID})
				}
				var blocks []*v2.AddressBlock
				for i, holder := range strings.Split(tt.holders, "") {
					b := floatingBlock(i)
					b.Floating.Successors = slices.Clone(all)
					b.Floating.Holding = v2.FloatingHolding{Holder: holder, PodUID: successorOn(b, holder).PodUID}
					if i == 0 {
						b.Floating.MovingTo = tt.movingTo
					}
					if i < len(tt.blocked) {
						c := metav1.Condition{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Message: plan.AtNode(tt.blocked[i:i+1]) + "rules drop packets: let them"}
						if tt.ended {
							c.Status = metav1.ConditionFalse
						}
						b.Status.Conditions = []metav1.Condition{c}
					}
					blocks = append(blocks, b)
				}
				apply(blocks, egress.Places(e, blocks, routers, internalIPs))
				if again := egress.Places(e, blocks, routers, internalIPs); len(again) > 0 {
					t.Errorf("a second look changes %v", slices.Collect(maps.Keys(again)))
				}
				var got []string
				for _, b := range blocks {
					text := ""
					for _, n := range b.Floating.Successors {
						text += n.Node
					}
					if to := b.Floating.MovingTo; to != "" {
						text += ">" + to
					}
					got = append(got, text)
				}
				if text := strings.Join(got, " "); text != tt.want {
					t.Errorf("addresses may be at %s, want %s", text, tt.want)
				}
			})
		}
	}
}

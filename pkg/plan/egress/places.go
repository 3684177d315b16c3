package egress

import (
	"cmp"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/floating"
)

// mostSuccessors is how many nodes may have an address at a time. They all ask each other how they are.
const mostSuccessors = 5

// Places returns, by the name of its AddressBlock, where each of an Egress's addresses is to be, if it is to be elsewhere than the block says. The
// routers are those of the Egress, internalIPs has the addresses of Nodes by name. While no router is ready nothing is changed: the
// present holders are as good as any.
//
// Addresses are spread over homes: nodes with a router or, if the addresses are the routers', routers, of which a node may have
// several. An address has at most one home on each node, since nodes agree about who has it.
//
// A router that is ending forwards for a while. Addresses of clients move to another node meanwhile, with their connections. Connections
// by a router's own addresses stay with it until it has ended: it keeps these as long as there are enough for the others.
//
// A node that drops packets of one of the addresses gets none as long as another node may have them, and has room.
func Places(e *v2.Egress, blocks []*v2.AddressBlock, routers []*corev1.Pod, internalIPs func(node string) []string) map[string]Place {
	if !e.Spec.Addresses.Float() {
		return nil
	}
	h := homesOf(e.Spec.Addresses.Use, blocks, routers, internalIPs)
	if len(h.ready) == 0 {
		return nil
	}
	h.avoid(blocks)
	p := cmp.Or(e.Spec.Addresses.Placement, &v2.EgressPlacement{})
	placement := floating.Placement{Pack: p.Strategy == v2.EgressPlacementPack, MaxPerNode: int(p.MaxPerNode)}
	h.bounded = placement.MaxPerNode > 0
	names := slices.Sorted(maps.Keys(h.ready))
	open := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return h.blocked[h.ready[name].Node] })
	present := make([]floating.Place, 0, len(blocks))
	kept := h.kept(blocks)
	for _, b := range blocks {
		if kept[b.Name] == "" {
			present = append(present, floating.Place{Address: b.Name, Node: h.of(b, false)})
		}
	}
	orders := placement.Successors(open, present)
	h.fillBlocked(placement, blocks, kept, orders)
	for block, home := range kept {
		orders[block] = floating.Order(home, block, append(slices.Clone(open), home))
	}
	changed := map[string]Place{}
	for _, b := range blocks {
		want := h.place(b, h.thenBlocked(orders[b.Name], names))
		want.Standby = e.Spec.Addresses.Standby
		if !want.is(b) {
			changed[b.Name] = want
		}
	}
	return changed
}

// Place is where a floating address is to be.
type Place struct {
	// Successors are the nodes that may have it, the preferred ones first.
	Successors []v2.FloatingNode
	// MovingTo is the node to which its holder is to hand it over.
	MovingTo string
	// Standby says that connections of the address are copied all the time, to the first of the successors that isn't the holder.
	Standby bool
}

// is says whether a block says so already.
func (p Place) is(b *v2.AddressBlock) bool {
	return p.MovingTo == b.Floating.MovingTo && p.Standby == b.Floating.Standby && slices.EqualFunc(p.Successors, b.Floating.Successors, func(x, y v2.FloatingNode) bool {
		return x.Node == y.Node && x.PodUID == y.PodUID && slices.Equal(x.Addresses, y.Addresses)
	})
}

// homes are where addresses may be.
type homes struct {
	// routers says that they are routers, and not nodes.
	routers bool
	// ready has those with a router that is ready, by name, and ending the routers that have an address, and forward though they are ending, by UID.
	ready  map[string]v2.FloatingNode
	ending map[types.UID]v2.FloatingNode
	// nodes are those of all routers that are ready.
	nodes map[types.UID]string
	// blocked are the nodes that drop packets of the addresses; empty if all nodes do.
	blocked map[string]bool
	// bounded says that a node has room for some addresses only: those that are there come first.
	bounded bool
}

// name tells homes apart.
func (h homes) name(n v2.FloatingNode) string {
	if h.routers {
		return string(n.PodUID)
	}
	return n.Node
}

// homesOf returns each node that has a router that is ready, with the oldest of its routers, which stays while others come; or all these
// routers, if the addresses are theirs.
func homesOf(use v2.EgressAddressUse, blocks []*v2.AddressBlock, routers []*corev1.Pod, internalIPs func(node string) []string) homes {
	h := homes{routers: use == v2.EgressAddressOfRouter, ready: map[string]v2.FloatingNode{}, ending: map[types.UID]v2.FloatingNode{}, nodes: map[types.UID]string{}}
	of := func(p *corev1.Pod) v2.FloatingNode {
		return v2.FloatingNode{Node: p.Spec.NodeName, Addresses: internalIPs(p.Spec.NodeName), PodUID: p.UID}
	}
	for _, p := range readyRouters(routers) {
		n := of(p)
		h.nodes[n.PodUID] = n.Node
		if _, known := h.ready[h.name(n)]; !known && len(n.Addresses) > 0 {
			h.ready[h.name(n)] = n
		}
	}
	leaving := map[string]bool{}
	for _, p := range routers {
		has := slices.ContainsFunc(blocks, func(b *v2.AddressBlock) bool { return b.Floating.Holding.PodUID == p.UID })
		if n := of(p); has && p.DeletionTimestamp != nil && plan.Ready(p) && len(n.Addresses) > 0 {
			h.ending[p.UID] = n
			leaving[n.Node] = true
		}
	}
	if h.routers {
		return h
	}
	// Addresses move to another node, if there is one: only there connections can be copied to.
	others := maps.Clone(h.ready)
	maps.DeleteFunc(others, func(node string, _ v2.FloatingNode) bool { return leaving[node] })
	if len(others) > 0 {
		h.ready = others
	}
	return h
}

// readyRouters returns the routers that are on a node, ready and not ending, the oldest first.
func readyRouters(routers []*corev1.Pod) []*corev1.Pod {
	ready := slices.DeleteFunc(slices.Clone(routers), func(p *corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Spec.NodeName == "" || !plan.Ready(p)
	})
	slices.SortFunc(ready, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return ready
}

// kept returns the addresses that stay with routers that are ending, and whose they are: as many as the routers that are ready don't need.
func (h homes) kept(blocks []*v2.AddressBlock) map[string]string {
	kept := map[string]string{}
	if !h.routers {
		return kept
	}
	byName := slices.SortedFunc(slices.Values(blocks), func(a, b *v2.AddressBlock) int { return cmp.Compare(a.Name, b.Name) })
	for _, b := range byName {
		n, ending := h.ending[b.Floating.Holding.PodUID]
		if ending && n.Node == b.Floating.Holding.Holder && plan.Settled(b) && b.Floating.MovingTo == "" && len(blocks)-len(kept) > len(h.ready) {
			kept[b.Name] = string(n.PodUID)
		}
	}
	return kept
}

// home returns the home of a name.
func (h homes) home(name string) v2.FloatingNode {
	if n, ready := h.ready[name]; ready {
		return n
	}
	return h.ending[types.UID(name)]
}

// of is the name of the home that has an address, or is about to, among the nodes that drop packets, or else among the others; empty if no
// router there is ready.
func (h homes) of(b *v2.AddressBlock, blocked bool) string {
	about := []v2.FloatingNode{on(b, b.Floating.MovingTo)}
	if !h.routers || plan.Settled(b) { // else its node gives the address up
		about = append(about, on(b, b.Floating.Holding.Holder))
	}
	if blocked || !h.bounded || !h.blocked[b.Floating.Holding.Holder] {
		about = append(about, b.Floating.Successors...)
	}
	for _, n := range about {
		if _, ready := h.ready[h.name(n)]; ready && h.blocked[n.Node] == blocked {
			return h.name(n)
		}
	}
	return ""
}

// on is what a block says of one of its successors.
func on(b *v2.AddressBlock, node string) v2.FloatingNode {
	for _, n := range b.Floating.Successors {
		if n.Node == node {
			return n
		}
	}
	return v2.FloatingNode{Node: node}
}

// place is where an address is to be whose homes have an order.
func (h homes) place(b *v2.AddressBlock, order []string) Place {
	var want Place
	add := func(n v2.FloatingNode) bool {
		known := slices.ContainsFunc(want.Successors, func(s v2.FloatingNode) bool { return s.Node == n.Node })
		if n.Node == "" || known || len(want.Successors) == mostSuccessors {
			return known
		}
		want.Successors = append(want.Successors, n)
		return true
	}
	// A holder without a router that forwards gives the address up by itself. The others keep it until it has moved.
	holder := h.holder(b, order)
	for _, name := range order {
		n := h.with(b, h.home(name))
		if len(want.Successors) > 0 && n.Node == holder.Node {
			n = holder // packets don't go to another router there first
		}
		add(n)
	}
	if len(order) > 0 && holder.Node != "" && holder.Node != want.Successors[0].Node {
		want.MovingTo = want.Successors[0].Node
		if !add(holder) {
			want.Successors[len(want.Successors)-1] = holder
		}
	}
	return want
}

// holder is the home on the node that holds an address: the one that has it or, if its router doesn't forward, the first of an order. It is the zero
// value if no router of the node is ready.
func (h homes) holder(b *v2.AddressBlock, order []string) v2.FloatingNode {
	node := b.Floating.Holding.Holder
	if n, ending := h.ending[b.Floating.Holding.PodUID]; ending && n.Node == node {
		return n
	}
	if n, ready := h.ready[h.name(v2.FloatingNode{Node: node, PodUID: b.Floating.Holding.PodUID})]; ready && n.Node == node {
		return h.with(b, n)
	}
	for _, name := range order {
		if n := h.ready[name]; n.Node == node {
			return n
		}
	}
	return v2.FloatingNode{}
}

// with returns a node with the router that a block has there, if that is ready: connections live in it. A router is what it is.
func (h homes) with(b *v2.AddressBlock, n v2.FloatingNode) v2.FloatingNode {
	if uid := on(b, n.Node).PodUID; !h.routers && uid != "" && h.nodes[uid] == n.Node {
		n.PodUID = uid
	}
	return n
}

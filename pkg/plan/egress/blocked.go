package egress

import (
	"maps"
	"slices"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/floating"
)

// avoid notes the nodes that drop packets of one of the addresses, by the conditions of the blocks. If all nodes do, it notes none.
func (h *homes) avoid(blocks []*v2.AddressBlock) {
	blocked := map[string]bool{}
	for _, b := range blocks {
		for _, node := range plan.ForwardingBlockedAt(b) {
			blocked[node] = true
		}
	}
	for _, n := range h.ready {
		if !blocked[n.Node] {
			h.blocked = blocked
			return
		}
	}
}

// fillBlocked gives addresses for which the other nodes have no room orders of nodes that drop packets: they may drop those of one address
// alone, and nobody would answer for the others.
func (h *homes) fillBlocked(placement floating.Placement, blocks []*v2.AddressBlock, kept map[string]string, orders map[string][]string) {
	if len(h.blocked) == 0 {
		return
	}
	var rest []floating.Place
	for _, b := range blocks {
		if kept[b.Name] == "" && len(orders[b.Name]) == 0 {
			rest = append(rest, floating.Place{Address: b.Name, Node: h.of(b, true)})
		}
	}
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(h.ready)), func(name string) bool { return !h.blocked[h.ready[name].Node] })
	maps.Copy(orders, placement.Successors(names, rest))
}

// thenBlocked appends to an order those of all homes whose nodes drop packets: they may have the address when no other node is left. An
// address for which there is no room has no order, and gets none.
func (h *homes) thenBlocked(order, all []string) []string {
	if len(order) == 0 || len(h.blocked) == 0 {
		return order
	}
	order = slices.Clone(order)
	for _, name := range all {
		if h.blocked[h.ready[name].Node] && !slices.Contains(order, name) {
			order = append(order, name)
		}
	}
	return order
}

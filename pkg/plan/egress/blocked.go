package egress

import (
	"slices"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// avoid notes the nodes that drop packets of one of the addresses, by the conditions of the blocks. If all nodes do, it notes none.
func (h *homes) avoid(blocks []*v2.AddressBlock) {
	blocked := map[string]bool{}
	for _, b := range blocks {
		if node := plan.ForwardingBlockedAt(b); node != "" {
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

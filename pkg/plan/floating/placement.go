// Package floating derives where the floating addresses of an Egress are to be, and which of them each policy, or client of a router, has.
//
// It owns the strategies of placement, of assignment and of drawing. It must not know how addresses are held or announced, nor how policies
// choose pods.
package floating

import (
	"cmp"
	"slices"
)

// Placement says on which nodes the addresses of an Egress are to be.
type Placement struct {
	// Pack fills one node after the other. Otherwise the numbers of addresses of two nodes differ by at most one.
	Pack bool
	// MaxPerNode is how many addresses a node has at most, 0 for any number.
	MaxPerNode int
}

// Place is an address, and the node that has it. Node is empty if none has.
type Place struct {
	Address string
	Node    string
}

// Successors returns the nodes that may have each address, in order: the first is to have it, the next one takes over when that node
// fails, and so on. An address for which there is no room has none. As few addresses as possible change their node. Which nodes follow
// an address's first one depends on their names alone, so that they stay the same while other nodes come and go, and differ between
// addresses, so that not all of a node's addresses go to the same one.
func (p Placement) Successors(nodes []string, places []Place) map[string][]string {
	held := map[string][]string{}
	for _, n := range nodes {
		held[n] = nil
	}
	var homeless []string
	for _, pl := range slices.SortedFunc(slices.Values(places), func(a, b Place) int { return cmp.Compare(a.Address, b.Address) }) {
		if _, ok := held[pl.Node]; ok {
			held[pl.Node] = append(held[pl.Node], pl.Address)
		} else {
			homeless = append(homeless, pl.Address)
		}
	}
	// The nodes that have most get the largest quotas, so that most addresses stay.
	ranked := slices.SortedFunc(slices.Values(nodes), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(held[b]), len(held[a])), cmp.Compare(a, b))
	})
	quotas := p.quotas(len(nodes), len(places))
	var moving []string
	for i, n := range ranked {
		if len(held[n]) > quotas[i] {
			moving = append(moving, held[n][quotas[i]:]...)
			held[n] = held[n][:quotas[i]]
		}
	}
	// If there isn't room for all, those that are in use come first.
	homeless = append(moving, homeless...)
	all := map[string][]string{}
	for i, n := range ranked {
		room := min(quotas[i]-len(held[n]), len(homeless))
		for _, a := range append(held[n], homeless[:room]...) {
			all[a] = Order(n, a, nodes)
		}
		homeless = homeless[room:]
	}
	return all
}

// quotas returns how many of n addresses each of some nodes is to have, the largest numbers first.
func (p Placement) quotas(nodes, n int) []int {
	most := n
	if p.MaxPerNode > 0 {
		most = p.MaxPerNode
	}
	quotas := make([]int, nodes)
	for i := range quotas {
		share := most
		if !p.Pack {
			share = min(most, (n+nodes-i-1)/(nodes-i))
		}
		quotas[i] = min(share, n)
		n -= quotas[i]
	}
	return quotas
}

// Order returns the nodes of an address, the first one first, the others as the address has them (rendezvous hashing).
func Order(first, address string, nodes []string) []string {
	type weighed struct {
		node   string
		weight uint64
	}
	all := make([]weighed, len(nodes))
	for i, n := range nodes {
		all[i] = weighed{n, Hash(address + "\x00" + n)}
	}
	slices.SortFunc(all, func(a, b weighed) int {
		switch {
		case a.node == b.node:
			return 0
		case a.node == first:
			return -1
		case b.node == first:
			return 1
		}
		return cmp.Or(cmp.Compare(b.weight, a.weight), cmp.Compare(a.node, b.node))
	})
	names := make([]string, len(all))
	for i, w := range all {
		names[i] = w.node
	}
	return names
}

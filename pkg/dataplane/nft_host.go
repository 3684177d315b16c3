package dataplane

import "slices"

// HostRules are what nftables does on a node.
type HostRules struct {
	// SourceGuard drops packets that come in by links of LinkGroup from addresses that aren't routed
	// back by the same link.
	SourceGuard bool
	// Clients are the guards of pods that use Egresses, by the index of the node's end of their links.
	Clients map[int]ClientGuard
}

// ClientGuard drops, on the node, packets that a client sends to destinations past its tunnels. The
// ranges are sorted and don't overlap. The zero ClientGuard drops nothing.
type ClientGuard struct {
	// Destinations are reached by tunnels alone, whose own packets are for other addresses.
	Destinations []Range
	// Replies are the destinations to which answers pass, in connections that were opened from there.
	Replies []Range
}

// Equal says whether two guards drop the same.
func (g ClientGuard) Equal(o ClientGuard) bool {
	return slices.Equal(g.Destinations, o.Destinations) && slices.Equal(g.Replies, o.Replies)
}

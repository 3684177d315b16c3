package dataplane

import "slices"

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

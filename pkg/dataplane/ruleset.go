package dataplane

import "net/netip"

// GatewayRules are what nftables does in a router: it lets only registered clients in, only
// to destinations, and nothing out that doesn't have the router's own address.
type GatewayRules struct {
	// Uplink is the index of the link to the outside, and MTU is its.
	Uplink int
	MTU    int
	// Addresses are the router's own, from which it sends by the uplink.
	Addresses []netip.Addr
	// Port is the UDP port of FoU.
	Port uint16
	// Probers ask the router at the TCP port HealthPort how it is, and are answered though no
	// more connections can be tracked.
	Probers    []netip.Addr
	HealthPort uint16
	// Ports are those of TCP at which the router tells of itself, to Askers and nobody else.
	Ports  []uint16
	Askers []netip.Prefix
	// Destinations are what clients may reach.
	Destinations []netip.Prefix
	// Clients may send.
	Clients []GatewayClient
	// MaxPerClient is how many connections one address of a client may have at once, 0 any number.
	MaxPerClient int
	// Over are those that have more, and open none until they have fewer.
	Over []netip.Addr
}

// GatewayClient is who may send by a link.
type GatewayClient struct {
	Addr netip.Addr
	// Link is the index of the client's tunnel.
	Link int
}

// ClientRules are what nftables does in a client. What tunnels carry comes from routers alone, and
// from destinations; and nothing leaves to destinations but by tunnels.
type ClientRules struct {
	// Uplink is the index of the link to the node.
	Uplink int
	// Addresses are the client's own.
	Addresses []netip.Addr
	// Port is the UDP port of FoU, at which nobody is heard but Peers: Services and routers.
	Port  uint16
	Peers []netip.Addr
	// Destinations are sorted, and don't overlap.
	Destinations []Range
	// Originating is nil when all of the client's packets take the tunnels.
	Originating *OriginatingRules
}

// Range is the addresses from First to Last, both of one family.
type Range struct{ First, Last netip.Addr }

// String prints the range for logs and errors.
func (r Range) String() string { return r.First.String() + "-" + r.Last.String() }

// OriginatingRules are for a client whose connections from outside are answered by the way they
// came: packets of connections that came in by the uplink from Sources get Mark, within Mask.
type OriginatingRules struct {
	// Sources are sorted, and don't overlap.
	Sources []Range
	Mark    uint32
	Mask    uint32
}

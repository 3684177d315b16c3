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
	// Destinations are what clients may reach.
	Destinations []netip.Prefix
	// Clients may send.
	Clients []GatewayClient
}

// GatewayClient is who may send by a link.
type GatewayClient struct {
	Addr netip.Addr
	// Link is the index of the client's tunnel.
	Link int
}

// OriginatingRules are what nftables does in a client whose connections from outside are
// answered by the way they came: packets of connections that came in by the link with the
// name Uplink from Sources get Mark, within Mask.
type OriginatingRules struct {
	Uplink string
	// Sources don't overlap.
	Sources []netip.Prefix
	Mark    uint32
	Mask    uint32
}

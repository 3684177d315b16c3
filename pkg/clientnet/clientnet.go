// Package clientnet makes the objects that the client of an Egress has in its network namespace besides its link, and
// the kernel parameters of a router's namespace. It is to Egresses what package podnet is to addresses.
//
// It owns these objects of a client:
//
//	rules 1700-2100, tables 117 and 118     see client.StateOf
//	fou4_..., fou6_...                      one tunnel to each Service of an Egress, or router
//	nexthop objects, rules 1850, tables     of Egresses with peering Direct; see groups.go
//	coil_ipip4, coil_ipip6, UDP port        receivers of the packets of routers; the links are sinks, too
//	nftables table coil                     filters what comes by tunnels, and what leaves by none
//
// It must not know which Egresses a pod uses, nor why. A client is made closed first: at no moment does a packet to a
// destination leave by another way than its tunnel, once the rules are there. A tunnel to a new peer is made before the
// routes change to it, and the old one is removed after. A program in the pod may take all of that away; its packets
// then end at the node's guard: see podnet.Network.
package clientnet

import (
	"context"
	"errors"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/podnet"
)

var (
	// ErrGone: the network namespace is gone, or another one has its path.
	ErrGone = errors.New("the pod's network namespace is gone")
	// ErrUnguarded: coild has made the link of a client, and doesn't find its end on the node.
	ErrUnguarded = errors.New("the node doesn't keep what the pod sends past its tunnels")
)

// Network works in the network namespaces of a node's clients and routers. Its methods return ErrGone if the
// namespace isn't there any more. They may be called concurrently, but not two of them that change the same client.
type Network struct {
	protocol int
	tunnels  Tunnels
	host     *podnet.Network
}

// New returns a Network whose routes and rules have the protocol. The host has the node's ends of clients' links, and drops
// packets that come from there for a destination; without a host the node has no guards.
func New(protocol int, t Tunnels, host *podnet.Network) *Network {
	return &Network{protocol: protocol, tunnels: t, host: host}
}

// Outcome counts the changes, and has the state and the links that there are.
type Outcome struct {
	State                            client.State
	Rules, Routes, Tunnels, Nexthops dataplane.Result
	// Others are kernel parameters, and objects of nftables.
	Others int
	// Links are the links of the tunnels, by where they lead.
	Links map[netip.Addr]int
	// Pins are rules for single flows, which come and go with these. Pinned is how many there
	// are by each link, Unpinned how many flows should have one and don't.
	Pins     dataplane.Result
	Pinned   map[int]int
	Unpinned int
	// Moved are buckets of groups that have another router now.
	Moved int
}

// AllPinned is how many flows are pinned, by whatever link.
func (o Outcome) AllPinned() (all int) {
	for _, n := range o.Pinned {
		all += n
	}
	return all
}

// Changed says whether anything but pins was changed.
func (o Outcome) Changed() bool {
	return o.Rules.Changed() || o.Routes.Changed() || o.Tunnels.Changed() || o.Nexthops.Changed() || o.Others > 0
}

// Tunnels makes the tunnels of one network namespace; see FoU.
type Tunnels interface {
	// Make makes and changes tunnels, and the receivers of packets; it removes nothing. It
	// returns the links to the peers for which it succeeded.
	Make(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error)
	// Prune removes all that isn't kept, sinks but for some families.
	Prune(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, keep []dataplane.Tunnel, sinks ...dataplane.Family) (dataplane.Result, error)
	// Check returns an error for each object that isn't as Make makes it, and the links that
	// there are.
	Check(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error)
	// MakeSinks makes the links by which packets of some families get lost, and returns the links for
	// which it succeeded.
	MakeSinks(ctx context.Context, h *rtnl.Handle, mtu int, families ...dataplane.Family) (map[dataplane.Family]int, error)
	// Sink returns the link by which packets of a family get lost, once it is made, or there are tunnels.
	Sink(ctx context.Context, h *rtnl.Handle, f dataplane.Family) (int, error)
}

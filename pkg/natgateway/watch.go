package natgateway

import (
	"context"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
)

// Kinds of objects that are repaired.
const (
	kindTunnel = "egress_tunnel"
	kindRoute  = "egress_route"
	kindRule   = "egress_rule"
	kindFilter = "egress_filter"
)

var kinds = []string{kindTunnel, kindRoute, kindRule, kindFilter}

// watch notes the links that tunnels are, to be told when one is another.
func (g *Gateway) watch(tunnels []dataplane.Tunnel, links map[netip.Addr]dataplane.TunnelLink) {
	watched := make(map[int]dataplane.Tunnel, len(links))
	for _, t := range tunnels {
		if l, ok := links[t.Remote]; ok {
			watched[l.Index] = t
		}
	}
	g.mu.Lock()
	g.watched = watched
	g.mu.Unlock()
}

// doubt makes the next sync compare all with the kernel, and says whether there was one.
func (g *Gateway) doubt() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.doubtful = true
	return g.applied != nil
}

// Interest returns the notifications of the kernel that a gateway needs.
func Interest() rtnl.Interest {
	return rtnl.Interest{Protocol: dataplane.ProtocolNode, Tables: []int{dataplane.TableWide}, Rules: true, Links: true}
}

// Watch syncs when the kernel tells that something is gone or another:
//
//	route, rule                        lost
//	a client's tunnel                  lost, down, or of another MTU
//	the uplink                         lost, or of another MTU or state
//	notifications                      lost
//
// It ends with ctx.
func (g *Gateway) Watch(ctx context.Context, changes upkeep.Source) error {
	return upkeep.Watch(ctx, changes, kernelSettle, g.loop)
}

// lost returns the kinds of the objects that changes have destroyed. If there are some, the next sync compares all.
func (g *Gateway) lost(_ context.Context, changes []rtnl.Change) (kinds []string) {
	for _, c := range changes {
		if kind := g.kindOf(c); kind != "" {
			g.doubt()
			g.repairs.Saw(kind, c.String())
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// kindOf returns the kind of the object that a change has destroyed; empty if there is none.
func (g *Gateway) kindOf(c rtnl.Change) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	t, watched := g.watched[c.Link]
	uplink := c.Link == g.uplink.Index
	changed := c.Kind == rtnl.LinkChanged && c.State != nil
	switch {
	case c.Kind == rtnl.RouteLost:
		return kindRoute
	case c.Kind == rtnl.RuleLost:
		return kindRule
	case c.Kind == rtnl.Unknown,
		c.Kind == rtnl.LinkLost && (watched || uplink),
		changed && watched && (!c.State.Up || c.State.MTU != t.MTU),
		changed && uplink && (c.State.Up != g.uplink.Up || c.State.MTU != g.uplink.MTU):
		return kindTunnel
	}
	return ""
}

package clientnet

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// Way is how a pod's packets to an address go in its network namespace, as the kernel says now: by a link or, in tunnels, to routers and then by a link. The addresses from are
// the pod's. Nothing is sent, and nothing is changed.
func Way(ctx context.Context, at store.Netns, from []netip.Addr, to netip.Addr) (hops []inspection.Hop, err error) {
	err = visit(ctx, at, func(ns *netns.NS) error {
		h, err := rtnl.NewOfPod(ns)
		if err != nil {
			return err
		}
		defer h.Close()
		hops, err = wayIn(ctx, h, from, to)
		return err
	})
	return hops, err
}

func wayIn(ctx context.Context, h *rtnl.Handle, from []netip.Addr, to netip.Addr) ([]inspection.Hop, error) {
	inner, links, err := hopOf(ctx, h, rtnl.Packet{To: to})
	if err != nil || inner.Dropped != "" {
		return []inspection.Hop{inner}, err
	}
	if inner.From == "" {
		inner.From = sourceOf(from, to)
	}
	ends, err := farEnds(ctx, h, links)
	if err != nil || len(ends) == 0 {
		return []inspection.Hop{inner}, err
	}
	for _, a := range ends {
		inner.Tunnels = append(inner.Tunnels, a.String())
	}
	outer, err := HopOf(ctx, h, rtnl.Packet{To: ends[0]})
	if outer.From == "" {
		outer.From = sourceOf(from, ends[0])
	}
	outer.InTunnel = true
	return []inspection.Hop{inner, outer}, err
}

// HopOf is how a packet goes on in the namespace of a handle.
func HopOf(ctx context.Context, h *rtnl.Handle, p rtnl.Packet) (inspection.Hop, error) {
	hop, _, err := hopOf(ctx, h, p)
	return hop, err
}

// hopOf also returns the indexes of the links by which the packet may leave.
func hopOf(ctx context.Context, h *rtnl.Handle, p rtnl.Packet) (hop inspection.Hop, links []int, err error) {
	hop.To = p.To.String()
	if p.From.IsValid() {
		hop.From = p.From.String()
	}
	r, err := h.RouteOf(ctx, p)
	var refused *rtnl.Error
	switch {
	case errors.As(err, &refused): // there is no route, or one that is unreachable
		hop.Dropped = "the kernel has no way: " + refused.Errno.Error()
		return hop, nil, nil
	case err != nil:
		return hop, nil, err
	}
	hop.Table, hop.Route = r.Table, r.String()
	if r.Gateway.IsValid() {
		hop.Gateway = r.Gateway.String()
	}
	if hop.From == "" && r.Source.IsValid() {
		hop.From = r.Source.String()
	}
	if r.Type == dataplane.Unreachable {
		hop.Dropped = "the route is unreachable"
	}
	if links = r.Links; len(links) == 0 && r.Link != 0 {
		links = []int{r.Link}
	}
	for _, index := range links {
		if l, err := h.LinkByIndex(ctx, index); err == nil {
			hop.Links = append(hop.Links, l.Name)
		}
	}
	hop.Rule, err = ruleTo(ctx, h, p, r.Table)
	return hop, links, err
}

// ruleTo is the first rule that takes a packet to a table.
func ruleTo(ctx context.Context, h *rtnl.Handle, p rtnl.Packet, table int) (string, error) {
	rules, err := h.Rules(ctx, dataplane.FamilyOf(p.To))
	if err != nil {
		return "", err
	}
	seen := dataplane.Packet{From: p.From, To: p.To, Input: dataplane.Loopback, Mark: p.Mark}
	if p.In != 0 {
		l, err := h.LinkByIndex(ctx, p.In)
		if err != nil {
			return "", err
		}
		seen.Input = l.Name
	}
	slices.SortStableFunc(rules, func(a, b rtnl.Rule) int { return cmp.Compare(a.Priority, b.Priority) })
	for _, r := range rules {
		if !r.Blackhole && r.Table == table && r.Takes(seen) {
			return r.Rule.String(), nil
		}
	}
	return "", nil
}

// sourceOf is the pod's address of the family of a destination.
func sourceOf(from []netip.Addr, to netip.Addr) string {
	for _, a := range from {
		if dataplane.FamilyOf(a) == dataplane.FamilyOf(to) {
			return a.String()
		}
	}
	return ""
}

// farEnds are the other ends of the tunnels that some links are.
func farEnds(ctx context.Context, h *rtnl.Handle, links []int) (all []netip.Addr, err error) {
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		tunnels, err := h.Tunnels(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, l := range links {
			for _, t := range tunnels {
				if t.Index == l && t.Spec.Remote.IsValid() {
					all = append(all, t.Spec.Remote)
				}
			}
		}
	}
	return all, nil
}

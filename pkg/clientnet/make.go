package clientnet

import (
	"context"
	"errors"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/store"
)

// Client makes a client what it should be, or, without Egresses, a pod like any other. The MTU is that of its link.
// If an object couldn't be made, its destinations are unreachable, and the error names it. The Outcome counts the
// changes.
func (n *Network) Client(ctx context.Context, at store.Netns, c client.Client) (out Outcome, err error) {
	err = n.inside(ctx, at, func(in namespace) error {
		if len(c.Egresses) == 0 {
			out, err = in.clear(ctx, c.Port)
		} else if c, err = in.linked(ctx, c); err == nil {
			out, err = in.make(ctx, client.StateOf(c), c)
		}
		return err
	})
	return out, err
}

// linked returns a client with the index and the MTU of its link.
func (in namespace) linked(ctx context.Context, c client.Client) (client.Client, error) {
	link, err := in.handle.LinkByName(ctx, c.Link)
	c.Index, c.MTU = link.Index, link.MTU
	return c, err
}

// make makes all objects of a client. It goes on after a failure: a missing object leaves
// destinations unreachable.
func (in namespace) make(ctx context.Context, state client.State, c client.Client) (Outcome, error) {
	out := Outcome{State: state}
	var errs []error
	errs = append(errs, set(in.ns, &out, settingsOf(c.Link, spreadOf(state))...))
	// Before the tunnels to routers that it lets send, before the links that take what these send, and
	// before routes.
	errs = append(errs, in.filter(ctx, &out, state.Filter))
	// With the MTU of the link that answers take in the end.
	sinks, err := in.tunnels.MakeSinks(ctx, in.handle, c.MTU, state.Sinks()...)
	errs = append(errs, err)
	closed, err := in.routes.Ensure(ctx, state.Closed(sinks))
	errs = append(errs, err)
	faultpoint.At(faultpoint.EgressClosed)
	changed := c.Stale || closed.Changed() || err != nil
	out.Rules, err = in.rules.Sync(ctx, state.Rules)
	errs = append(errs, err)
	if changed {
		errs = append(errs, in.renew(ctx, c))
	}
	faultpoint.At(faultpoint.EgressRuled)
	links, tunnels, err := in.tunnels.Make(ctx, in.ns, in.handle, c.Port, state.Tunnels)
	complete := err == nil
	errs = append(errs, err)
	indexes, accepting := linksOf(links)
	errs = append(errs, set(in.ns, &out, accepting))
	faultpoint.At(faultpoint.EgressTunnelled)
	groups, err := in.group(ctx, state, indexes, complete, &out)
	errs = append(errs, err)
	grouped := err == nil
	faultpoint.At(faultpoint.EgressGrouped)
	out.Routes, out.Tunnels, out.Links = closed, tunnels, indexes
	if !complete {
		// Tunnels that couldn't even be looked at may well work. A range that isn't the cluster's any
		// more is for the tunnels, though; a route to their ends is one of a single address.
		opened, err := in.routes.EnsureBut(ctx, state.By(indexes, sinks), func(r dataplane.Route) bool {
			return r.Type == dataplane.Throw && !r.Dst.IsSingleIP()
		})
		out.Routes = out.Routes.Plus(opened)
		return out, errors.Join(append(errs, err, in.renew(ctx, c))...)
	}
	opened, err := in.routes.Sync(ctx, state.By(indexes, sinks))
	errs = append(errs, err)
	if opened.Changed() || err != nil {
		errs = append(errs, in.renew(ctx, c))
	}
	faultpoint.At(faultpoint.EgressOpened)
	if grouped {
		former, err := in.nexthops.Sync(ctx, groups)
		out.Nexthops = out.Nexthops.Plus(former)
		errs = append(errs, err)
	}
	pruned, err := in.tunnels.Prune(ctx, in.ns, in.handle, c.Port, state.Tunnels, state.Sinks()...)
	errs = append(errs, err)
	out.Routes, out.Tunnels = out.Routes.Plus(opened), out.Tunnels.Plus(pruned)
	return out, errors.Join(errs...)
}

// linksOf returns the indexes of the tunnels' links, and the kernel parameters that let packets in by these links.
func linksOf(links map[netip.Addr]dataplane.TunnelLink) (indexes map[netip.Addr]int, accepting group) {
	indexes = map[netip.Addr]int{}
	for peer, l := range links {
		indexes[peer] = l.Index
		accepting = append(accepting, accept(l.Name))
	}
	return indexes, accepting
}

// renew makes sockets look their routes up again. IPv4 does that after each change, IPv6 only when
// the table changes from which the route is, or rules change (ip6_dst_check, fib6_rules_flush_cache):
// a socket that is connected by the main table would never see that ours has a route now. The rule
// that comes and goes does what another one does already; one that is left goes with the next sync.
func (in namespace) renew(ctx context.Context, c client.Client) error {
	if !c.Address.IPv6.IsValid() {
		return nil
	}
	return in.rules.Touch(ctx, dataplane.Rule{
		Family: dataplane.IPv6, Priority: dataplane.PriorityNarrow, Mark: dataplane.MarkOriginating, Mask: dataplane.MarkOriginating,
		Table: dataplane.TableNarrow, Protocol: c.Protocol,
	})
}

// clear removes all objects that make has made, but for the parameters. The ruleset goes first: it
// drops packets to destinations that leave by no tunnel, as all do without the routes. Routes go
// before rules: without the rules for private ranges other rules would match these.
func (in namespace) clear(ctx context.Context, port uint16) (out Outcome, err error) {
	errs := []error{in.filter(ctx, &out, nil)}
	out.Routes, err = in.routes.Sync(ctx, nil)
	errs = append(errs, err)
	faultpoint.At(faultpoint.EgressRouteless)
	out.Rules, err = in.rules.Sync(ctx, nil)
	errs = append(errs, err)
	out.Pins, err = in.pins.Sync(ctx, nil)
	errs = append(errs, err)
	out.Nexthops, err = in.nexthops.Sync(ctx, nexthop.Set{})
	errs = append(errs, err)
	out.Tunnels, err = in.tunnels.Prune(ctx, in.ns, in.handle, port, nil)
	return out, errors.Join(append(errs, err)...)
}

// sinks returns the links by which packets of some families get lost. A missing link is left out, and
// is an error.
func (in namespace) sinks(ctx context.Context, families ...dataplane.Family) (map[dataplane.Family]int, error) {
	sinks := map[dataplane.Family]int{}
	var errs []error
	for _, f := range families {
		link, err := in.tunnels.Sink(ctx, in.handle, f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		sinks[f] = link
	}
	return sinks, errors.Join(errs...)
}

// filter makes the table of nftables what it should be: none if nil.
func (in namespace) filter(ctx context.Context, out *Outcome, want *ruleset.Client) error {
	return in.withTable(func(t *nft.Table) error {
		var rules dataplane.Ruleset
		if want != nil {
			rules = want.Ruleset()
		}
		result, err := t.Sync(ctx, rules)
		out.Others += result.Added + result.Replaced + result.Deleted
		return err
	})
}

// withTable does work on the table of nftables.
func (in namespace) withTable(work func(*nft.Table) error) error {
	t, err := nft.NewOfPod(in.ns, dataplane.NftTable)
	if err != nil {
		return err
	}
	defer t.Close()
	return work(t)
}

package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sockets"
	"github.com/coil-net/coil/pkg/plan"
)

// What a client has for an Egress that is direct, in each family:
//
//	a tunnel to each router        see Tunnels
//	a nexthop object by each       if the router takes flows
//	a resilient group of these     to which destinations lead
//	a table that leads to each     unless it is dead
//	rules 1850 to these tables     pins: flows that stay where they are
//
// A connected socket knows its route and doesn't look it up again, so that its bucket seems not to
// be used; but a change of the group makes it look. Before a group changes, the flows of all sockets
// are therefore pinned to the router that they go by. As long as a group is out of balance the kernel
// goes on moving buckets that seem to be idle: until it has ended, new flows are pinned, too, at each
// sync, of which there are many within the idle time. A pin goes when its socket has gone, or when its
// router is dead or no more.
//
// Between the look at the sockets and the change more flows begin. What leaves a group but keeps its
// flows is therefore held first: what has no pin and would go there gets lost, a packet of each flow at
// most, until the sockets have been looked at again and the group is changed.
//
// When the peering changes, what was sent to before keeps its flows in the same way: for so long there
// is a group of the Service alone, too.

// group makes the groups of routers, and returns what of them there should be. It removes nothing
// that routes may lead to. As long as the tunnels are incomplete, groups of which none is known
// stay as they are.
func (in client) group(ctx context.Context, state plan.ClientState, links map[netip.Addr]int, complete bool, out *Outcome) (nexthop.Set, error) {
	var want nexthop.Set
	before, err := in.nexthops.Groups(ctx)
	if err != nil || len(state.Groups)+len(before) == 0 {
		return want, err
	}
	want.Nexthops, want.Groups = state.NexthopsBy(links)
	pinRoutes, tables := state.PinRoutesBy(links)
	_, routeErr := route.New(in.handle, in.protocol, tables...).Sync(ctx, pinRoutes)
	moves := changes(before, want.Groups, complete)
	was := make([][]rtnl.Bucket, len(before))
	all := moves
	for i, g := range before {
		was[i] = in.buckets(ctx, g)
		all = all || !balanced(g, was[i])
	}
	k := &keeper{client: in, state: state, links: links, complete: complete, moves: moves, seen: map[plan.ClientFlow]bool{}, out: out}
	pinErr := k.pin(ctx, all)
	leaveErr := k.leave(ctx, leaving(before, want, state, links, complete), before)
	changed, err := in.nexthops.Ensure(ctx, want)
	out.Nexthops = out.Nexthops.Plus(changed)
	for i, g := range before {
		if moves {
			out.Moved += moved(was[i], in.buckets(ctx, g))
		}
	}
	return want, errors.Join(routeErr, pinErr, leaveErr, err)
}

// changes says whether groups come, go or have other members; as long as the tunnels are incomplete
// none goes.
func changes(before, want []dataplane.NexthopGroup, complete bool) bool {
	same := func(all []dataplane.NexthopGroup, g dataplane.NexthopGroup) int {
		return slices.IndexFunc(all, func(o dataplane.NexthopGroup) bool { return o.ID == g.ID })
	}
	for _, b := range before {
		if i := same(want, b); i < 0 && complete || i >= 0 && !slices.Equal(b.Members, want[i].Members) {
			return true
		}
	}
	return slices.ContainsFunc(want, func(w dataplane.NexthopGroup) bool { return same(before, w) < 0 })
}

// keeper keeps flows where they are while groups change.
type keeper struct {
	client
	state plan.ClientState
	links map[netip.Addr]int
	// complete says that links are all that there are, moves that the groups change now.
	complete, moves bool
	// have are the pins that there are, seen the flows whose link was looked up.
	have []dataplane.Rule
	seen map[plan.ClientFlow]bool
	out  *Outcome
}

// pin makes the rules that keep flows where they are: those that are kept already and, if all is
// set, those of all sockets. Those by links that aren't known stay if links are incomplete.
func (k *keeper) pin(ctx context.Context, all bool) (err error) {
	if k.have, err = k.pins.List(ctx); err != nil || len(k.have) == 0 && !all {
		return err
	}
	// To look up where a flow goes is to use its bucket, which would never be idle then.
	pins, flowErr := k.wanted(ctx, k.moves || all && len(k.have) < plan.MaxPins, nil)
	if flowErr != nil && len(pins) == 0 {
		return flowErr // whose the pins are isn't known
	}
	return errors.Join(flowErr, k.set(ctx, pins))
}

// wanted are the pins of flows; see flows.
func (k *keeper) wanted(ctx context.Context, all bool, held map[int]int) ([]dataplane.Rule, error) {
	flows, err := k.flows(ctx, all, held)
	if err != nil && len(flows) == 0 {
		return nil, err
	}
	pins, left := k.state.Pins(flows, k.have, k.links)
	if !k.complete {
		known := slices.Collect(maps.Values(k.links))
		pins = append(pins, slices.DeleteFunc(slices.Clone(k.have), func(h dataplane.Rule) bool {
			return slices.Contains(known, dataplane.LinkOf(h.Table))
		})...)
	}
	if k.moves {
		k.out.Unpinned += left
	}
	return pins, err
}

func (k *keeper) set(ctx context.Context, pins []dataplane.Rule) error {
	k.out.Pinned = map[int]int{}
	for _, p := range pins {
		k.out.Pinned[dataplane.LinkOf(p.Table)]++
	}
	changed, err := k.pins.Sync(ctx, pins)
	k.out.Pins = k.out.Pins.Plus(changed)
	k.have = pins
	return err
}

// leave lets no flow begin by members of groups any more, and pins those that have begun since the
// others were: one member after the other, so that it is known whose they are. The last one is
// still in its group then.
func (k *keeper) leave(ctx context.Context, members []dataplane.Nexthop, groups []dataplane.NexthopGroup) error {
	var errs []error
	for i, n := range members {
		errs = append(errs, k.hold(ctx, n))
		if i < len(members)-1 {
			groups = without(groups, n.ID)
			changed, err := k.nexthops.Ensure(ctx, nexthop.Set{Groups: groups})
			k.out.Nexthops = k.out.Nexthops.Plus(changed)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// hold makes that what would go by a member and has no pin gets lost, and then pins what did go by
// it: as quickly as can be.
func (k *keeper) hold(ctx context.Context, n dataplane.Nexthop) error {
	sink, err := k.tunnels.Sink(ctx, k.handle, n.Family)
	if err != nil {
		return err
	}
	link := n.Link
	n.Link = sink
	if err := k.handle.Do(ctx, rtnl.SetNexthop(n)); err != nil {
		return err
	}
	k.out.Nexthops.Replaced++
	pins, err := k.wanted(ctx, true, map[int]int{sink: link})
	has := make(map[dataplane.Rule]bool, len(k.have))
	for _, p := range k.have {
		has[p] = true
	}
	if !slices.ContainsFunc(pins, func(p dataplane.Rule) bool { return !has[p] }) {
		return err // those of flows that have ended can stay until the next time
	}
	return errors.Join(err, k.set(ctx, pins))
}

// leaving returns the members of groups that none of those that are wanted has, and that keep their
// flows. As long as the tunnels are incomplete no group goes.
func leaving(before []dataplane.NexthopGroup, want nexthop.Set, state plan.ClientState, links map[netip.Addr]int, complete bool) []dataplane.Nexthop {
	keeping := map[uint32]dataplane.Nexthop{}
	for _, n := range state.KeepingBy(links) {
		keeping[n.ID] = n
	}
	for _, n := range want.Nexthops {
		delete(keeping, n.ID)
	}
	var all []dataplane.Nexthop
	for _, g := range before {
		if !complete && !slices.ContainsFunc(want.Groups, func(w dataplane.NexthopGroup) bool { return w.ID == g.ID }) {
			continue
		}
		for _, m := range g.Members {
			if n, ok := keeping[m.ID]; ok {
				all = append(all, n)
				delete(keeping, m.ID)
			}
		}
	}
	return all
}

// without returns groups without a member; one that has no other stays as it is.
func without(groups []dataplane.NexthopGroup, member uint32) []dataplane.NexthopGroup {
	out := slices.Clone(groups)
	for i, g := range out {
		others := slices.DeleteFunc(slices.Clone(g.Members), func(m dataplane.NexthopMember) bool { return m.ID == member })
		if len(others) > 0 {
			out[i].Members = others
		}
	}
	return out
}

// flows returns the flows of sockets that have a pin or, if all is set, of all that weren't seen
// yet, with the link by which each goes: for one that is held, that of another in its place.
func (k *keeper) flows(ctx context.Context, all bool, held map[int]int) ([]plan.ClientFlow, error) {
	found, err := sockets.Flows(k.ns)
	if err != nil {
		return nil, fmt.Errorf("read sockets: %w", err)
	}
	pinned := make(map[plan.ClientFlow]int, len(k.have))
	for _, p := range k.have {
		f := plan.PinnedFlow(p)
		link := f.Link
		f.Link = 0
		if _, ok := pinned[f]; !ok { // the first rule counts
			pinned[f] = link
		}
	}
	open := make(map[plan.ClientFlow]sockets.Flow, len(found))
	note := func(found []sockets.Flow) {
		for _, s := range found {
			open[plan.ClientFlow{Transport: s.Protocol, Remote: s.Remote.Addr(), SourcePort: s.Local.Port(), DestinationPort: s.Remote.Port()}] = s
		}
	}
	note(found)
	for f := range pinned {
		if _, ok := open[f]; ok {
			continue
		}
		// One that lives may be missing while others come and go, hardly twice.
		if found, err = sockets.Flows(k.ns); err != nil {
			return nil, fmt.Errorf("read sockets: %w", err)
		}
		note(found)
		break
	}
	var flows []plan.ClientFlow
	var errs []error
	for f, s := range open {
		link, ok := pinned[f]
		if !ok && (!all || k.seen[f]) {
			continue
		}
		if !ok {
			link, err = k.handle.LinkOf(ctx, s.Protocol, s.Local, s.Remote)
			if errors.Is(err, rtnl.ErrNotExist) || errors.Is(err, rtnl.ErrInvalid) {
				continue // it goes nowhere, or its address is no more
			}
			if err != nil {
				errs = append(errs, err)
				continue
			}
			k.seen[f] = true
			if by, ok := held[link]; ok {
				link = by
			}
		}
		f.Link = link
		flows = append(flows, f)
	}
	return flows, errors.Join(errs...)
}

// buckets returns those of a group, which may not exist.
func (in client) buckets(ctx context.Context, g dataplane.NexthopGroup) []rtnl.Bucket {
	buckets, err := in.handle.Buckets(ctx, g.ID)
	if err != nil || len(buckets) != int(g.Buckets) {
		return make([]rtnl.Bucket, g.Buckets) // what leads nowhere
	}
	return buckets
}

// balanced says whether all members of a group, whose weights are the same, have their share.
func balanced(g dataplane.NexthopGroup, buckets []rtnl.Bucket) bool {
	share := make(map[uint32]int, len(g.Members))
	for _, m := range g.Members {
		share[m.ID] = 0
	}
	for _, b := range buckets {
		share[b.Nexthop]++
	}
	counts := slices.Collect(maps.Values(share))
	return len(counts) == 0 || slices.Max(counts)-slices.Min(counts) <= 1
}

// moved counts the buckets that have another member.
func moved(before, after []rtnl.Bucket) int {
	n := 0
	for i := range min(len(before), len(after)) {
		if before[i].Nexthop != after[i].Nexthop {
			n++
		}
	}
	return n
}

// checkGroups says what group has made and isn't there.
func (in client) checkGroups(ctx context.Context, made plan.ClientState, links map[netip.Addr]int) error {
	if len(made.Groups) == 0 {
		return nil
	}
	var want nexthop.Set
	want.Nexthops, want.Groups = made.NexthopsBy(links)
	errs := []error{in.nexthops.Check(ctx, want)}
	pinRoutes, tables := made.PinRoutesBy(links)
	missing, err := route.New(in.handle, in.protocol, tables...).Missing(ctx, pinRoutes)
	errs = append(errs, err)
	for _, r := range missing {
		errs = append(errs, fmt.Errorf("route %s is missing", r))
	}
	return errors.Join(errs...)
}

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
	"github.com/coil-net/coil/pkg/plan"
)

// What a client has for an Egress that is direct, in each family:
//
//	a tunnel to each router        see Tunnels
//	a nexthop object by each       if the router takes flows
//	a resilient group of these     to which destinations lead
//	a table that leads to each     unless it is dead, and another one takes flows
//	rules 1850 to these tables     pins: flows that stay where they are
//
// A connected socket knows its route and doesn't look it up again, so that its bucket seems not to
// be used; but a change of the group makes it look. Before a group changes, the flows of all sockets
// are therefore pinned to the router that they go by. As long as a group is out of balance the kernel
// goes on moving buckets that seem to be idle: until it has ended, new flows are pinned, too, at each
// sync, of which there are many within the idle time. A pin goes when its socket has gone, when its
// router is no more, or is dead and another one takes flows.
//
// Between the look at the sockets and the change more flows begin. What leaves a group but keeps its
// flows is therefore held first: what has no pin and would go there gets lost, for as long as it takes
// to look at the sockets again and to change the group.
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
	leaves, sinkErr := k.holdable(ctx, leaving(before, want, state, links, complete))
	pinErr := k.pin(ctx, all)
	err = k.change(ctx, leaves, before, want)
	for i, g := range before {
		if moves {
			out.Moved += moved(was[i], in.buckets(ctx, g))
		}
	}
	return want, errors.Join(routeErr, sinkErr, pinErr, err)
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

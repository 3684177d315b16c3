package clientnet

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/client"
)

// Objects of a client for an Egress with peering Direct, in each family:
//
//	tunnel to each router                      see Tunnels
//	nexthop object of each tunnel              if the router takes flows
//	resilient group of these                   to which destinations lead
//	table with a route by each tunnel          to which pins lead
//	rule 1850 for each flow that must stay     a pin; see pins.go
//
// A router is a member of the group as long as it gets new flows, and has a table as long as it keeps its flows:
//
//	router                        member    table
//	live                          yes       yes
//	draining                      no        yes
//	dead, and another one lives   no        no
//	dead, as all are              yes       yes
//	not listed any more           no        no
//
// The steps of a change:
//
//	1  nexthop objects and tables are there
//	2  pin     every flow of a socket is pinned to the router that it goes by
//	3  hold    a member that leaves and keeps its flows leads nowhere: flows that begin now get lost; see hold.go
//	4  pin     flows that began between 2 and 3
//	5  swap    the group gets its new members
//	6  prune   objects that nothing leads to any more go
//
// Pins are needed since a connected socket doesn't look its route up again: its bucket seems to be idle, and a change of
// the group, which makes the socket look, may have moved the bucket. The kernel goes on moving idle buckets as long as
// the group is out of balance: until it has ended, new flows are pinned at each sync. A pin goes with its socket, or when
// its router has no table any more.
//
// When the peering changes, the Service or the routers that were sent to before keep their flows in the same way: for so
// long there is a group of the Service alone, too.
//
// Marks of conntrack in place of groups and pins would be a third of this code. They were tried (Linux 6.12, one chain of
// type route, a rule for each mark, the tunnels' own packets untracked): a round trip takes 1.08 times that by a Service in
// IPv4 and 1.09 times in IPv6, for the tracking and the second look for a route; groups take 1.00 and 1.01 times.

// group gives the client the groups of its routers, and returns which there should be. It removes nothing that routes may
// lead to. As long as the tunnels are incomplete, groups of which no tunnel is known stay as they are.
func (in namespace) group(ctx context.Context, state client.State, links map[netip.Addr]int, complete bool, out *Outcome) (nexthop.Set, error) {
	var want nexthop.Set
	before, err := in.nexthops.Groups(ctx)
	if err != nil || len(state.Groups)+len(before) == 0 {
		return want, err
	}
	want.Nexthops, want.Groups = state.NexthopsBy(links)
	pinRoutes, tables := state.PinRoutesBy(links)
	_, routeErr := route.New(in.handle, in.protocol, tables...).Sync(ctx, pinRoutes)
	t := &transition{namespace: in, state: state, links: links, complete: complete, seen: map[client.Flow]bool{}, out: out}
	t.moves = changes(before, want.Groups, complete)
	was := make([][]rtnl.Bucket, len(before))
	all := t.moves
	for i, g := range before {
		was[i] = in.buckets(ctx, g)
		all = all || !balanced(g, was[i])
	}
	leaves := t.leaving(before, want)
	var families []dataplane.Family
	for _, n := range leaves {
		families = append(families, n.Family)
	}
	var sinkErr error
	if t.losing, sinkErr = in.sinks(ctx, families...); sinkErr != nil {
		leaves = nil // without links by which packets get lost nothing is held
	}
	pinErr := t.pin(ctx, all)
	err = t.swap(ctx, leaves, before, want)
	for i, g := range before {
		if t.moves {
			out.Moved += moved(was[i], in.buckets(ctx, g))
		}
	}
	return want, errors.Join(routeErr, sinkErr, pinErr, err)
}

// changes says whether groups come, go or have other members; as long as the tunnels are incomplete
// none goes.
func changes(before, want []dataplane.NexthopGroup, complete bool) bool {
	members := map[uint32][]dataplane.NexthopMember{}
	for _, b := range before {
		members[b.ID] = b.Members
	}
	for _, w := range want {
		if have, ok := members[w.ID]; !ok || !slices.Equal(have, w.Members) {
			return true
		}
		delete(members, w.ID)
	}
	return complete && len(members) > 0
}

// buckets returns the buckets of a group. If there is no such group they lead nowhere.
func (in namespace) buckets(ctx context.Context, g dataplane.NexthopGroup) []rtnl.Bucket {
	buckets, err := in.handle.Buckets(ctx, g.ID)
	if err != nil || len(buckets) != int(g.Buckets) {
		return make([]rtnl.Bucket, g.Buckets) // all lead nowhere
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

// checkGroups returns an error for each object of the groups that is missing or differs.
func (in namespace) checkGroups(ctx context.Context, made client.State, links map[netip.Addr]int) error {
	if len(made.Groups) == 0 {
		return nil
	}
	var want nexthop.Set
	want.Nexthops, want.Groups = made.NexthopsBy(links)
	pinRoutes, tables := made.PinRoutesBy(links)
	routes, err := route.New(in.handle, in.protocol, tables...).Missing(ctx, pinRoutes)
	lost, lostErr := in.nexthops.Missing(ctx, want)
	return errors.Join(lostErr, missing("nexthop", lost.Nexthops), missing("nexthop", lost.Groups), err, missing("route", routes))
}

package clientnet

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// changeTimeout bounds a swap that goes on though coild ends.
const changeTimeout = 10 * time.Second

// swap gives groups their new members. Once begun it goes on though ctx ends: a member that stays held would leave new
// flows without a way.
func (t *transition) swap(ctx context.Context, leaves []dataplane.Nexthop, before []dataplane.NexthopGroup, want nexthop.Set) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	if len(leaves) > 0 && t.ensure(ctx, nexthop.Set{Nexthops: want.Nexthops}) != nil {
		leaves = nil // a group that can't be changed now has no member held; the error comes again below
	}
	leaveErr := t.leave(ctx, leaves, before)
	err := t.ensure(ctx, want)
	if err != nil {
		err = errors.Join(err, t.ensure(ctx, nexthop.Set{Nexthops: leaves}))
	}
	return errors.Join(leaveErr, err)
}

func (t *transition) ensure(ctx context.Context, want nexthop.Set) error {
	changed, err := t.nexthops.Ensure(ctx, want)
	t.out.Nexthops = t.out.Nexthops.Plus(changed)
	return err
}

// leave takes members out of their groups: no flow begins by them any more, and flows that began since all others were
// pinned are pinned, too. Of each family one member at a time is held, so that the router of a lost flow is known. The
// last ones are in their groups until the swap.
func (t *transition) leave(ctx context.Context, members []dataplane.Nexthop, groups []dataplane.NexthopGroup) error {
	var errs []error
	for len(members) > 0 {
		held := map[dataplane.Family]dataplane.Nexthop{}
		var later []dataplane.Nexthop
		for _, n := range members {
			if _, ok := held[n.Family]; ok {
				later = append(later, n)
			} else {
				held[n.Family] = n
			}
		}
		errs = append(errs, t.hold(ctx, held))
		if len(later) > 0 {
			groups = without(groups, held)
			errs = append(errs, t.ensure(ctx, nexthop.Set{Groups: groups}))
		}
		members = later
	}
	return errors.Join(errs...)
}

// hold makes flows by members get lost if they have no pin, and then pins the flows that went by these members, as quickly
// as possible: TCP sends the lost packets again.
func (t *transition) hold(ctx context.Context, members map[dataplane.Family]dataplane.Nexthop) error {
	var errs []error
	for _, n := range members {
		n.Link = t.losing[n.Family]
		errs = append(errs, t.handle.Do(ctx, rtnl.SetNexthop(n)))
		t.out.Nexthops.Replaced++
	}
	pins, err := t.wantedPins(ctx, true, members)
	errs = append(errs, err)
	has := make(map[dataplane.Rule]bool, len(t.have))
	for _, p := range t.have {
		has[p] = true
	}
	more := slices.DeleteFunc(pins, func(p dataplane.Rule) bool { return has[p] })
	if len(more) > 0 { // those of flows that have ended, or seem to have, can stay until the next time
		errs = append(errs, t.setPins(ctx, append(more, t.have...)))
	}
	return errors.Join(errs...)
}

// leaving returns the members of groups that are in none of the wanted ones and keep their flows. As long as the tunnels
// are incomplete no group goes.
func (t *transition) leaving(before []dataplane.NexthopGroup, want nexthop.Set) []dataplane.Nexthop {
	keeping := t.state.KeepingBy(t.links)
	for _, n := range want.Nexthops {
		delete(keeping, n.ID)
	}
	var all []dataplane.Nexthop
	for _, g := range before {
		if !t.complete && !slices.ContainsFunc(want.Groups, func(w dataplane.NexthopGroup) bool { return w.ID == g.ID }) {
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

// without returns groups without some members. A group that has no other member stays as it is.
func without(groups []dataplane.NexthopGroup, members map[dataplane.Family]dataplane.Nexthop) []dataplane.NexthopGroup {
	gone := map[uint32]bool{}
	for _, n := range members {
		gone[n.ID] = true
	}
	out := slices.Clone(groups)
	for i, g := range out {
		others := slices.DeleteFunc(slices.Clone(g.Members), func(m dataplane.NexthopMember) bool { return gone[m.ID] })
		if len(others) > 0 {
			out[i].Members = others
		}
	}
	return out
}

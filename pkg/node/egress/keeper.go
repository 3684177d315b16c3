package egress

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sockets"
	"github.com/coil-net/coil/pkg/plan"
)

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
	// losing are by family where packets get lost of what is held.
	losing map[dataplane.Family]int
	out    *Outcome
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
func (k *keeper) wanted(ctx context.Context, all bool, held map[dataplane.Family]dataplane.Nexthop) ([]dataplane.Rule, error) {
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
	if err == nil {
		k.have = pins
	}
	return err
}

// changeTimeout bounds a change that was begun, though coild ends.
const changeTimeout = 10 * time.Second

// change makes the groups what they should be. What isn't finished would leave members held, without
// a way for new flows.
func (k *keeper) change(ctx context.Context, leaves []dataplane.Nexthop, before []dataplane.NexthopGroup, want nexthop.Set) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	if len(leaves) > 0 && k.ensure(ctx, nexthop.Set{Nexthops: want.Nexthops}) != nil {
		leaves = nil // what can't be changed now isn't held; why is told below
	}
	leaveErr := k.leave(ctx, leaves, before)
	err := k.ensure(ctx, want)
	if err != nil {
		err = errors.Join(err, k.ensure(ctx, nexthop.Set{Nexthops: leaves}))
	}
	return errors.Join(leaveErr, err)
}

func (k *keeper) ensure(ctx context.Context, want nexthop.Set) error {
	changed, err := k.nexthops.Ensure(ctx, want)
	k.out.Nexthops = k.out.Nexthops.Plus(changed)
	return err
}

// leave lets no flow begin by members of groups any more, and pins those that have begun since the
// others were: of each family one member after the other, so that it is known whose they are. The
// last ones are still in their groups then.
func (k *keeper) leave(ctx context.Context, members []dataplane.Nexthop, groups []dataplane.NexthopGroup) error {
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
		errs = append(errs, k.hold(ctx, held))
		if len(later) > 0 {
			groups = without(groups, held)
			errs = append(errs, k.ensure(ctx, nexthop.Set{Groups: groups}))
		}
		members = later
	}
	return errors.Join(errs...)
}

// holdable returns the members, if they can be held.
func (k *keeper) holdable(ctx context.Context, members []dataplane.Nexthop) ([]dataplane.Nexthop, error) {
	var families []dataplane.Family
	for _, n := range members {
		families = append(families, n.Family)
	}
	var err error
	if k.losing, err = k.sinks(ctx, families...); err != nil {
		return nil, err
	}
	return members, nil
}

// hold makes that what would go by members and has no pin gets lost, and then pins what did go by
// them: as quickly as can be.
func (k *keeper) hold(ctx context.Context, members map[dataplane.Family]dataplane.Nexthop) error {
	var errs []error
	for _, n := range members {
		n.Link = k.losing[n.Family]
		errs = append(errs, k.handle.Do(ctx, rtnl.SetNexthop(n)))
		k.out.Nexthops.Replaced++
	}
	pins, err := k.wanted(ctx, true, members)
	errs = append(errs, err)
	has := make(map[dataplane.Rule]bool, len(k.have))
	for _, p := range k.have {
		has[p] = true
	}
	more := slices.DeleteFunc(pins, func(p dataplane.Rule) bool { return has[p] })
	if len(more) > 0 { // those of flows that have ended, or seem to have, can stay until the next time
		errs = append(errs, k.set(ctx, append(more, k.have...)))
	}
	return errors.Join(errs...)
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

// without returns groups without some members; one that has no other stays as it is.
func without(groups []dataplane.NexthopGroup, members map[dataplane.Family]dataplane.Nexthop) []dataplane.NexthopGroup {
	out := slices.Clone(groups)
	for i, g := range out {
		others := slices.DeleteFunc(slices.Clone(g.Members), func(m dataplane.NexthopMember) bool {
			for _, n := range members {
				if m.ID == n.ID {
					return true
				}
			}
			return false
		})
		if len(others) > 0 {
			out[i].Members = others
		}
	}
	return out
}

// flows returns the flows of sockets that have a pin or, if all is set, of all that weren't seen
// yet, with the link by which each goes; what gets lost goes by what is held of its family. While
// anything is, there is no time for flows that may have ended: they are left out.
func (k *keeper) flows(ctx context.Context, all bool, held map[dataplane.Family]dataplane.Nexthop) ([]plan.ClientFlow, error) {
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
		if _, ok := open[f]; ok || held != nil {
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
			if family := dataplane.FamilyOf(f.Remote); link == k.losing[family] {
				by, ok := held[family]
				if !ok {
					continue // it is held since a coild was killed, and is looked at when this one holds it
				}
				link = by.Link
			}
			k.seen[f] = true
		}
		f.Link = link
		flows = append(flows, f)
	}
	return flows, errors.Join(errs...)
}

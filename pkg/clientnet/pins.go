package clientnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sockets"
	"github.com/coil-net/coil/pkg/plan/client"
)

// transition is a change of groups that keeps flows where they are; see groups.go.
type transition struct {
	namespace
	state client.State
	links map[netip.Addr]int
	// complete says that links are all that there are, moves that the groups change now.
	complete, moves bool
	// have are the pins that there are, seen the flows whose link was looked up.
	have []dataplane.Rule
	seen map[client.Flow]bool
	// losing are, by family, the links by which packets of held members get lost.
	losing map[dataplane.Family]int
	out    *Outcome
}

// pin makes the pins: of flows that have one already and, if all is set, of the flows of all sockets. As long as links
// are incomplete, pins by other links stay.
func (t *transition) pin(ctx context.Context, all bool) (err error) {
	if t.have, err = t.pins.List(ctx); err != nil {
		return err
	}
	// A program in the pod may have made others, which Sync removes.
	t.have = slices.DeleteFunc(t.have, func(r dataplane.Rule) bool { _, ok := client.PinnedFlow(r); return !ok })
	if len(t.have) == 0 && !all {
		return nil
	}
	// To look up where a flow goes is to use its bucket, which would never be idle then.
	pins, flowErr := t.wantedPins(ctx, t.moves || all && len(t.have) < client.MaxPins, nil)
	if flowErr != nil && len(pins) == 0 {
		return flowErr // it isn't known which flows the pins are for
	}
	return errors.Join(flowErr, t.setPins(ctx, pins))
}

// wantedPins are the pins of flows; see flows.
func (t *transition) wantedPins(ctx context.Context, all bool, held map[dataplane.Family]dataplane.Nexthop) ([]dataplane.Rule, error) {
	flows, err := t.flows(ctx, all, held)
	if err != nil && len(flows) == 0 {
		return nil, err
	}
	pins, left := t.state.Pins(flows, t.have, t.links)
	if !t.complete {
		known := slices.Collect(maps.Values(t.links))
		pins = append(pins, slices.DeleteFunc(slices.Clone(t.have), func(h dataplane.Rule) bool {
			return slices.Contains(known, dataplane.LinkOf(h.Table))
		})...)
	}
	if t.moves {
		t.out.Unpinned += left
	}
	return pins, err
}

func (t *transition) setPins(ctx context.Context, pins []dataplane.Rule) error {
	t.out.Pinned = map[int]int{}
	for _, p := range pins {
		t.out.Pinned[dataplane.LinkOf(p.Table)]++
	}
	changed, err := t.pins.Sync(ctx, pins)
	t.out.Pins = t.out.Pins.Plus(changed)
	if err == nil {
		t.have = pins
	}
	return err
}

// flows returns the flows of sockets that have a pin or, if all is set, of all that weren't looked up yet, with the link
// by which each goes. A flow that gets lost goes by the member of its family that is held. While a member is held there
// is no time to look whether flows have ended: those without a socket are left out.
func (t *transition) flows(ctx context.Context, all bool, held map[dataplane.Family]dataplane.Nexthop) ([]client.Flow, error) {
	found, err := sockets.Flows(t.ns)
	if err != nil {
		return nil, fmt.Errorf("read sockets: %w", err)
	}
	pinned := make(map[client.Flow]int, len(t.have))
	for _, p := range t.have {
		f, _ := client.PinnedFlow(p)
		link := f.Link
		f.Link = 0
		if _, ok := pinned[f]; !ok { // the first rule counts
			pinned[f] = link
		}
	}
	open := make(map[client.Flow]sockets.Flow, len(found))
	note := func(found []sockets.Flow) {
		for _, s := range found {
			open[client.Flow{Transport: s.Protocol, Remote: s.Remote.Addr(), SourcePort: s.Local.Port(), DestinationPort: s.Remote.Port()}] = s
		}
	}
	note(found)
	for f := range pinned {
		if _, ok := open[f]; ok || held != nil {
			continue
		}
		// One that lives may be missing while others come and go, hardly twice.
		if found, err = sockets.Flows(t.ns); err != nil {
			return nil, fmt.Errorf("read sockets: %w", err)
		}
		note(found)
		break
	}
	var flows []client.Flow
	var errs []error
	for f, s := range open {
		link, ok := pinned[f]
		if !ok && (!all || t.seen[f]) {
			continue
		}
		if !ok {
			link, err = t.handle.LinkOf(ctx, s.Protocol, s.Local, s.Remote)
			if errors.Is(err, rtnl.ErrNotExist) || errors.Is(err, rtnl.ErrInvalid) {
				continue // it goes nowhere, or its address is no more
			}
			if err != nil {
				errs = append(errs, err)
				continue
			}
			if family := dataplane.FamilyOf(f.Remote); link == t.losing[family] {
				by, ok := held[family]
				if !ok {
					continue // it is held since a coild was killed, and is looked at when this one holds it
				}
				link = by.Link
			}
			t.seen[f] = true
		}
		f.Link = link
		flows = append(flows, f)
	}
	return flows, errors.Join(errs...)
}

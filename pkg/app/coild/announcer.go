package coild

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	packets "github.com/coil-net/coil/pkg/kernel/announce"
	"github.com/coil-net/coil/pkg/kernel/neighbour"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node/announce"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
)

// announcer is the part that makes addresses of other parts known on the node's links. It is composed before them.
type announcer struct {
	*daemon
	// sources return the addresses; other parts add theirs when they are composed.
	sources []func(context.Context) ([]announce.Address, error)
	// rivals take what other hosts say about addresses of the sources, the last one first: each says whether the address is its own.
	rivals []func(announce.Rival) bool
	keeper *announce.Keeper
	loop   *upkeep.Loop
	// withdrawn says that the Node is gone, or another machine's: nothing is announced.
	withdrawn atomic.Bool
}

func (a *announcer) part() part {
	return part{
		kinds: announce.Kinds, compose: a.compose, withdraw: a.withdraw,
		run: func(ctx context.Context) error { return a.keeper.Run(ctx) },
	}
}

// announceSettle is for how long new addresses are collected: they are all read again each time.
const announceSettle = 20 * time.Millisecond

func (a *announcer) compose(context.Context) error {
	a.keeper = announce.New(announce.Config{
		Addresses: a.addresses, Handle: a.network.Handle(), Protocol: a.Protocol, Set: a.network.SetParameters,
		Send:    func(all []packets.Announcement) error { return packets.Send(nil, all) },
		Repairs: a.repairs, Warn: a.warn,
		Watch: func(ctx context.Context, link int, seen func(packets.Claim)) error {
			return packets.Watch(ctx, nil, link, seen)
		},
		Rival: a.rival,
	})
	a.registry.MustRegister(a.keeper)
	a.loop = a.upkeep(upkeep.Config{Name: "announcements", Sync: a.keeper.Sync, Settle: announceSettle}, announce.Kinds, a.keeper.Lost)
	return nil
}

// rival gives what another host says to the part whose address it is about.
func (a *announcer) rival(r announce.Rival) {
	for _, is := range slices.Backward(a.rivals) {
		if is(r) {
			return
		}
	}
}

// checkEntries is how often entries are looked for that others deleted: nothing tells of that.
const checkEntries = 4 * time.Second

// begin lets the entries be what they should be from then on. It is called when the records of the sources are in line: what an earlier
// process has announced stays as it is until then. Changes of links must be told to the loop.
func (a *announcer) begin(ctx context.Context, group *errgroup.Group) {
	group.Go(func() error { return a.loop.Run(ctx) })
	repeat(ctx, group, heal.Task{Name: "announcements", Every: checkEntries, Run: func(ctx context.Context) error {
		lost, err := a.keeper.Check(ctx)
		if lost {
			a.loop.Lost(announce.Entry)
		}
		return err
	}})
}

// addresses are those of all sources.
func (a *announcer) addresses(ctx context.Context) ([]announce.Address, error) {
	if a.withdrawn.Load() {
		return nil, nil
	}
	var all []announce.Address
	for _, source := range a.sources {
		addrs, err := source(ctx)
		if err != nil {
			return nil, err
		}
		all = append(all, addrs...)
	}
	return all, nil
}

// withdraw ends all announcements, or begins again. Before it is known which these are, nothing is announced when the Node doesn't exist
// at the start.
func (a *announcer) withdraw(ctx context.Context, withdrawn bool) error {
	if a.keeper == nil {
		h, err := rtnl.New(nil)
		if err != nil {
			return err
		}
		defer h.Close()
		_, err = neighbour.New(h, a.Protocol).Sync(ctx, nil)
		return err
	}
	if a.withdrawn.Swap(withdrawn) == withdrawn {
		return nil
	}
	err := a.keeper.Sync(ctx)
	if err != nil {
		a.loop.Changed() // which tries until it succeeds
	}
	return err
}

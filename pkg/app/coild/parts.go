package coild

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
	"github.com/coil-net/coil/pkg/store"
)

// part is a feature of coild. It has the daemon, and doesn't know the other features. A function that a part doesn't need
// is nil.
type part struct {
	// kinds are the kinds of objects that the part repairs, with advice for the admin: which program is likely to destroy
	// such objects again and again, and what to do about it.
	kinds map[string]string
	// watch adds the part's informers to the daemon's watches, which start before compose.
	watch func()
	// compose builds the part.
	compose func(context.Context) error
	// run works from then on, also while the API server is away.
	run func(context.Context) error
	// start brings the part's state in line when the caches are filled, and then starts its goroutines in the group. ADD
	// is served when all parts have started.
	start func(context.Context, *errgroup.Group) error
	// forget removes the part's state of an attachment, whose DEL has come.
	forget func(context.Context, attachment.ID) error

	// look adds to an attachment what there is of the part's objects, lookAtHost compares those that all pods share, and lookAtAddress those of a floating address of Services,
	// if they are to be here: for people who ask, see
	// package debug.
	look       func(ctx context.Context, alloc store.Allocation, into *inspection.Attachment)
	lookAtHost func(context.Context) []inspection.Comparison

	lookAtAddress func(context.Context, netip.Addr) []inspection.Comparison

	// check returns why the part can't work for a Node, and for how long at least.
	check func(*corev1.Node) (time.Duration, error)
	// withdraw stops announcing the part's pods, or begins again. It is called before compose, too.
	withdraw func(ctx context.Context, withdrawn bool) error
}

// makeParts makes the features that the options ask for, in the order in which they are composed and start, and collects
// the kinds of all features: the repairs of one that is switched off are 0.
func (d *daemon) makeParts() {
	g := &guard{daemon: d, ofSources: d.SourceGuard && d.IPAM, ofClients: d.Egress}
	n := &announcer{daemon: d}
	a, e := &addresses{daemon: d, guard: g, announcer: n}, &egresses{daemon: d, alone: !d.IPAM}
	c, floats := &chained{daemon: d, egresses: e, announcer: n}, d.Egress && (d.IPAM || d.Floating)
	h := &holder{daemon: d, egresses: e, announcer: n, attached: a}
	if !d.IPAM {
		h.attached = c
	}
	d.kinds = map[string]string{}
	for _, f := range []struct {
		on bool
		part
	}{
		{d.IPAM || floats, n.part()},
		{d.IPAM, a.part()},
		{floats && !d.IPAM, c.part()},
		{true, g.part()},
		{d.Egress, e.part()},
		{floats, h.part()},
		{d.IPAM && d.Egress, (&masquerader{daemon: d, addresses: a, egresses: e}).part()},
	} {
		maps.Copy(d.kinds, f.kinds)
		if f.on {
			d.parts = append(d.parts, f.part)
		}
	}
}

// Del takes an attachment down, whatever there is of it.
func (d *daemon) Del(ctx context.Context, id attachment.ID) error {
	for _, p := range d.parts {
		if p.forget != nil {
			if err := p.forget(ctx, id); err != nil {
				return err
			}
		}
	}
	return nil
}

// check returns why one of the parts can't work for a Node, and for how long at least.
func (d *daemon) check(n *corev1.Node) (time.Duration, error) {
	for _, p := range d.parts {
		if p.check != nil {
			if left, err := p.check(n); err != nil {
				return left, err
			}
		}
	}
	return 0, nil
}

// withdraw stops announcing the node's pods, or begins again.
func (d *daemon) withdraw(ctx context.Context, withdrawn bool) error {
	var errs []error
	for _, p := range d.parts {
		if p.withdraw != nil {
			errs = append(errs, p.withdraw(ctx, withdrawn))
		}
	}
	return errors.Join(errs...)
}

// drift is the time between two comparisons with the kernel without a notification.
const drift = 2 * time.Minute

// upkeep returns a loop that keeps objects of these kinds as they should be. lost says whether changes in the kernel may
// have destroyed some; a repair of any kind waits for those of all.
func (d *daemon) upkeep(cfg upkeep.Config, kinds map[string]string, lost func(context.Context, []rtnl.Change) bool) *upkeep.Loop {
	all := slices.Collect(maps.Keys(kinds))
	cfg.Every, cfg.Spread = drift, drift/10
	cfg.Lost = func(ctx context.Context, changes []rtnl.Change) []string {
		if lost(ctx, changes) {
			return all
		}
		return nil
	}
	return upkeep.New(cfg, d.repairs, d.metrics)
}

// reportRepairs tells the admin which kind of objects is destroyed again and again.
func (d *daemon) reportRepairs(_ context.Context, kind, message string) {
	d.warn("RepeatedlyDestroyed", "another program destroys what coild needs (%s): %s. %s", kind, message, d.kinds[kind])
}

package coild

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
)

// part is a feature of coild. It has the daemon, and doesn't know the other features. What a part doesn't need is nil.
type part struct {
	// kinds are those of what it repairs. Of each they say who the likely culprit is when objects are destroyed again
	// and again, and what to do.
	kinds map[string]string
	// compose builds it, and adds to the daemon's watches what it has to know of the API server.
	compose func(context.Context) error
	// run works from then on, also while the API server is away.
	run func(context.Context) error
	// start brings the part in line when the caches are filled, and then lets it work in the group. ADD is served when
	// all parts have started.
	start func(context.Context, *errgroup.Group) error
	// forget ends what there is for an attachment, whatever that is: its DEL has come.
	forget func(context.Context, attachment.ID) error

	// check says why the part can't work for a Node, and how long that takes at least.
	check func(*corev1.Node) (time.Duration, error)
	// withdraw says whether others must not be told of the part's pods any more. It is called before compose, too.
	withdraw func(ctx context.Context, withdrawn bool) error
}

// makeParts makes the features that the options ask for, in the order in which they are composed and start, and collects
// the kinds of all features: what is switched off has repaired nothing.
func (d *daemon) makeParts() {
	g := &guard{daemon: d, ofSources: d.SourceGuard && d.IPAM, ofClients: d.Egress}
	d.kinds = map[string]string{}
	for _, f := range []struct {
		on bool
		part
	}{
		{d.IPAM, (&addresses{daemon: d, guard: g}).part()},
		{true, g.part()},
		{d.Egress, (&egresses{daemon: d, alone: !d.IPAM}).part()},
	} {
		maps.Copy(d.kinds, f.kinds)
		if f.on {
			d.parts = append(d.parts, f.part)
		}
	}
}

// Del implements restore.Detacher.
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

// check says why one of the parts can't work for a Node, and how long that takes at least.
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

// withdraw lets others not be told of the node's pods any more, or again.
func (d *daemon) withdraw(ctx context.Context, withdrawn bool) error {
	var errs []error
	for _, p := range d.parts {
		if p.withdraw != nil {
			errs = append(errs, p.withdraw(ctx, withdrawn))
		}
	}
	return errors.Join(errs...)
}

// drift is how often everything is compared with the kernel though nothing was told.
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

// reportRepairs tells the admin what is destroyed again and again.
func (d *daemon) reportRepairs(_ context.Context, kind, message string) {
	d.warn("RepeatedlyDestroyed", "another program destroys what coild needs (%s): %s. %s", kind, message, d.kinds[kind])
}

// Package upkeep keeps objects of the kernel as they should be. It is the one loop for all kinds of objects.
//
//	inputs have changed       sync, after a moment in which changes are collected
//	the kernel has changed    sync at once, or later if another program destroys the same again and again
//	a sync has failed         sync, after a pause; see package reconcile
//	no notification           sync once in a while, since one may be lost
//
// It owns when a sync is. It must not know what is wanted, nor how that is written.
package upkeep

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/reconcile"
)

// Config says what a Loop does.
type Config struct {
	// Name labels logs and metrics.
	Name string
	// Sync makes the kernel's objects what they should be. It is called by one goroutine.
	Sync func(context.Context) error
	// Settle is for how long changes of inputs are collected.
	Settle time.Duration
	// Every is the longest time between two syncs. Spread is the most that is added to it, by chance, so that not all
	// nodes sync at once.
	Every, Spread time.Duration
	// InLine says that nothing has to be done when the loop begins.
	InLine bool
	// Lost returns the kinds of the objects that changes in the kernel may have destroyed. Watch calls it.
	Lost func(context.Context, []rtnl.Change) []string
}

// Loop syncs whenever there may be something to do. Its methods may be called concurrently, except Skipped.
type Loop struct {
	cfg     Config
	loop    *reconcile.Loop[struct{}]
	repairs *reconcile.Repairs
	skipped []string
}

// held is how often a test is asked whether repairs are held still.
const held = 100 * time.Millisecond

// New returns a Loop that isn't running. Sync counts in repairs the objects that others had destroyed.
func New(cfg Config, repairs *reconcile.Repairs, metrics *reconcile.Metrics) *Loop {
	l := &Loop{cfg: cfg, repairs: repairs}
	l.loop = reconcile.New(cfg.Name, func(ctx context.Context, _ struct{}) error {
		if faultpoint.Held() {
			return reconcile.Later(held)
		}
		if err := cfg.Sync(ctx); err != nil {
			return err
		}
		return reconcile.Later(l.pause())
	}, metrics)
	return l
}

// pause is the time to the next sync without a notification.
func (l *Loop) pause() time.Duration { return l.cfg.Every + rand.N(l.cfg.Spread+1) }

// Run waits for the caches, then syncs until ctx ends.
func (l *Loop) Run(ctx context.Context, synced ...cache.DoneChecker) error {
	if l.cfg.InLine {
		l.loop.AddAfter(struct{}{}, l.pause())
	} else {
		l.loop.Add(struct{}{})
	}
	return l.loop.Run(ctx, 1, synced...)
}

// Changed requests a sync because inputs have changed. It doesn't block.
func (l *Loop) Changed() { l.loop.AddAfter(struct{}{}, l.cfg.Settle) }

// Lost requests a sync because objects of some kinds may be gone or changed. It waits as long as repairs of these kinds
// do, and doesn't block.
func (l *Loop) Lost(kinds ...string) { l.loop.AddAfter(struct{}{}, l.repairs.Wait(kinds...)) }

// Skipped logs the items that a sync left out, unless they are those of the sync before.
func (l *Loop) Skipped(ctx context.Context, message string, items []string) {
	if len(items) > 0 && !slices.Equal(items, l.skipped) {
		klog.FromContext(ctx).Info(message, "skipped", items)
	}
	l.skipped = items
}

// Source tells of changes in the kernel; see package kernel/rtnl.
type Source interface {
	Run(ctx context.Context, settle time.Duration, told func([]rtnl.Change)) error
}

// Watch requests syncs of loops whose objects the kernel reports as gone, until ctx ends. The first change of a burst is
// handled at once, the others once in every settle.
func Watch(ctx context.Context, changes Source, settle time.Duration, loops ...*Loop) error {
	return changes.Run(ctx, settle, func(batch []rtnl.Change) {
		for _, l := range loops {
			if kinds := l.cfg.Lost(ctx, batch); len(kinds) > 0 {
				l.Lost(kinds...)
			}
		}
	})
}

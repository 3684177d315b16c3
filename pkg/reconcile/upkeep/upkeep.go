// Package upkeep keeps objects of the kernel as they should be: the one loop of all who want something there.
//
//	inputs have changed       sync, when no other change comes for a moment
//	the kernel has changed    sync at once, or later if another program destroys the same again and again
//	a sync has failed         sync, after a pause; see package reconcile
//	nothing was told          sync once in a while: a notification may be lost
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
	// Lost returns the kinds of what changes in the kernel may have destroyed; Watch asks it.
	Lost func(context.Context, []rtnl.Change) []string
}

// Loop syncs whenever there may be something to do. Its methods may be called concurrently, except Skipped.
type Loop struct {
	cfg     Config
	loop    *reconcile.Loop[struct{}]
	repairs *reconcile.Repairs
	skipped []string
}

// New returns a Loop that isn't running. Sync counts in repairs what others had destroyed.
func New(cfg Config, repairs *reconcile.Repairs, metrics *reconcile.Metrics) *Loop {
	l := &Loop{cfg: cfg, repairs: repairs}
	l.loop = reconcile.New(cfg.Name, func(ctx context.Context, _ struct{}) error {
		if err := cfg.Sync(ctx); err != nil {
			return err
		}
		return reconcile.Later(l.pause())
	}, reconcile.WithMetrics(metrics))
	return l
}

// pause is the time to the next sync when nothing is told.
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

// Changed says that inputs have changed. It doesn't block.
func (l *Loop) Changed() { l.loop.AddAfter(struct{}{}, l.cfg.Settle) }

// Lost says that objects of some kinds may be gone from the kernel, or others. It doesn't block.
func (l *Loop) Lost(kinds ...string) { l.loop.AddAfter(struct{}{}, l.repairs.Wait(kinds...)) }

// Skipped logs the items that a sync left out, unless they are those of the sync before.
func (l *Loop) Skipped(ctx context.Context, message string, items []string) {
	if len(items) > 0 && !slices.Equal(items, l.skipped) {
		klog.FromContext(ctx).Info(message, "skipped", items)
	}
	l.skipped = items
}

// Source tells what has changed in the kernel; see package kernel/rtnl.
type Source interface {
	Run(ctx context.Context, settle time.Duration, told func([]rtnl.Change)) error
}

// Watch lets loops sync when the kernel tells that something of theirs is gone, until ctx ends. The first of a burst of
// changes is acted upon at once, others once in every settle.
func Watch(ctx context.Context, changes Source, settle time.Duration, loops ...*Loop) error {
	return changes.Run(ctx, settle, func(batch []rtnl.Change) {
		for _, l := range loops {
			if kinds := l.cfg.Lost(ctx, batch); len(kinds) > 0 {
				l.Lost(kinds...)
			}
		}
	})
}

// Package reconcile is the one worker loop of Coil: keys in, calls of a sync
// function out, with back-off, metrics and an orderly end.
//
// It owns the policy for errors. It must not know what is reconciled.
package reconcile

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// Back-off of a key whose sync fails: it doubles from the first to the second,
// and is never given up.
const (
	minBackoff = 50 * time.Millisecond
	maxBackoff = time.Minute
)

// Loop calls sync for each key that was added. A key is never synced by two
// workers at once, and a key added while it is being synced is synced again.
type Loop[K comparable] struct {
	name    string
	sync    func(context.Context, K) error
	queue   workqueue.TypedRateLimitingInterface[K]
	metrics *Metrics
}

// New returns a loop that isn't running. The name labels its logs and its work in metrics, which may be nil.
func New[K comparable](name string, sync func(context.Context, K) error, metrics *Metrics) *Loop[K] {
	if metrics == nil {
		metrics = NewMetrics(nil)
	}
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[K](minBackoff, maxBackoff)
	return &Loop[K]{
		name:    name,
		sync:    sync,
		queue:   workqueue.NewTypedRateLimitingQueue(limiter),
		metrics: metrics,
	}
}

// Add asks for a sync of key. It never blocks.
func (l *Loop[K]) Add(key K) { l.queue.Add(key) }

// AddAfter asks for a sync of key when d has passed.
func (l *Loop[K]) AddAfter(key K, d time.Duration) { l.queue.AddAfter(key, d) }

// Run waits for the caches, then syncs keys until ctx ends, as many at once as there are workers,
// and returns nil when all have ended. A worker exists only
// while it works: thousands that may wait at once cost nothing while there is nothing to do. A Loop
// runs once.
func (l *Loop[K]) Run(ctx context.Context, workers int, synced ...cache.DoneChecker) error {
	defer l.queue.ShutDown()
	logger := klog.FromContext(ctx).WithName(l.name)
	ctx = klog.NewContext(ctx, logger)
	if !cache.WaitFor(ctx, "", synced...) {
		return nil // ctx ended before
	}
	defer context.AfterFunc(ctx, l.queue.ShutDown)()
	var wg sync.WaitGroup
	defer wg.Wait()
	for busy := make(chan struct{}, workers); ; {
		busy <- struct{}{}
		key, shutdown := l.queue.Get()
		if shutdown {
			return nil
		}
		wg.Go(func() {
			defer func() { <-busy }()
			l.work(ctx, key)
		})
	}
}

// work syncs one key.
func (l *Loop[K]) work(ctx context.Context, key K) {
	defer l.queue.Done(key)
	start := time.Now()
	err := l.call(ctx, key)
	l.metrics.observe(l.name, err, time.Since(start))

	logger := klog.FromContext(ctx)
	var later *laterError
	switch {
	case err == nil:
		l.queue.Forget(key)
	case ctx.Err() != nil:
		// The error is most likely the end itself.
	case errors.As(err, &later):
		l.queue.Forget(key)
		l.queue.AddAfter(key, later.after)
	case apierrors.IsConflict(err): // the cache was stale
		logger.V(2).Info("Sync is tried again", "key", key, "reason", err.Error())
		l.queue.AddRateLimited(key)
	default:
		logger.Error(err, "Sync failed, trying again", "key", key, "failures", l.queue.NumRequeues(key)+1)
		l.queue.AddRateLimited(key)
	}
}

// call turns a panic of sync into an error: one object must not end the program.
func (l *Loop[K]) call(ctx context.Context, key K) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("sync panicked: %v", p)
		}
	}()
	return l.sync(ctx, key)
}

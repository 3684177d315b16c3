// Package heal repeats coild's tasks of upkeep, so that what was lost or changed
// behind its back comes back.
//
// It owns when a task is run. It must not know what a task does.
package heal

import (
	"context"
	"math/rand/v2"
	"time"

	"k8s.io/klog/v2"
)

// Task is one piece of upkeep. Run does nothing when there is nothing to mend.
type Task struct {
	Name string
	// Every is the time between two runs; up to a tenth is added, so that the nodes
	// of a cluster don't work in step.
	Every time.Duration
	Run   func(context.Context) error
}

// Run repeats a task until ctx ends. Its errors are logged: the next run is the
// retry.
func Run(ctx context.Context, t Task) error {
	logger := klog.FromContext(ctx).WithName(t.Name)
	ctx = klog.NewContext(ctx, logger)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		timer.Reset(t.Every + rand.N(t.Every/10+1))
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if err := t.Run(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Upkeep failed, trying again later", "every", t.Every)
		}
	}
}

// Package heal repeats coild's tasks of upkeep, so that objects which were lost or changed
// behind its back come back.
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
	// Every is the time between two runs.
	Every time.Duration
	Run   func(context.Context) error
}

// phase is when all tasks would have run together: each runs at multiples of its period from then on.
// So tasks wake a node at rest together if their periods are multiples of each other, and the nodes
// of a cluster don't work in step.
var phase = time.Now().Add(-rand.N(24 * time.Hour))

// pause is how long a task that runs every so often waits: to its next turn, or to the one after
// that if there is less than half of the time left.
func pause(every time.Duration) time.Duration {
	d := every - time.Since(phase)%every
	if d < every/2 {
		d += every
	}
	return d
}

// Run repeats a task until ctx ends, not at once. Its errors are logged: the next run is the
// retry.
func Run(ctx context.Context, t Task) error {
	logger := klog.FromContext(ctx).WithName(t.Name)
	ctx = klog.NewContext(ctx, logger)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause(t.Every)):
		}
		if err := t.Run(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Upkeep failed, trying again later", "every", t.Every)
		}
	}
}

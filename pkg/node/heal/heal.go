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

	"github.com/coil-net/coil/pkg/faultpoint"
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

// turn is how long it is to the next turn of a task that runs every so often.
func turn(every time.Duration) time.Duration {
	return every - (time.Since(phase)%every+every)%every // tests have times before phase
}

// pause is how long such a task waits after a run: to its next turn, or to the one after
// that if there is less than half of the time left.
func pause(every time.Duration) time.Duration {
	d := turn(every)
	if d < every/2 {
		d += every
	}
	return d
}

// Run repeats a task until ctx ends. The first run is at its next turn. Its errors are logged: the next run is the
// retry.
func Run(ctx context.Context, t Task) error {
	logger := klog.FromContext(ctx).WithName(t.Name)
	ctx = klog.NewContext(ctx, logger)
	for wait := turn(t.Every); ; wait = pause(t.Every) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		if faultpoint.Held() {
			continue
		}
		if err := t.Run(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "Upkeep failed, trying again later", "every", t.Every)
		}
	}
}

package assign

import (
	"context"
	"sync"

	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/store"
)

// flight lets one step at a time run for an attachment.
type flight struct {
	mu    *sync.Mutex
	calls map[store.ID]*call
}

type call struct {
	done   chan struct{}
	cancel context.CancelCauseFunc // nil for a DEL
	// stopped is set, under flight.mu, when a DEL has cancelled the ADD.
	stopped bool
}

func newFlight() flight { return flight{mu: new(sync.Mutex), calls: map[store.ID]*call{}} }

// add waits until no step runs for id and enters. The returned context also ends,
// with the cause node.ErrDeleted, when a DEL comes. done must be called.
func (f flight) add(ctx context.Context, id store.ID) (_ context.Context, done func(), _ error) {
	ctx, cancel := context.WithCancelCause(ctx)
	leave, err := f.enter(ctx, id, cancel)
	if err != nil {
		cancel(nil)
		return nil, nil, err
	}
	return ctx, func() { leave(); cancel(nil) }, nil
}

// del stops a running ADD for id, waits until no step runs, and enters.
func (f flight) del(ctx context.Context, id store.ID) (done func(), _ error) {
	return f.enter(ctx, id, nil)
}

func (f flight) enter(ctx context.Context, id store.ID, cancel context.CancelCauseFunc) (func(), error) {
	for {
		f.mu.Lock()
		running := f.calls[id]
		if running == nil {
			c := &call{done: make(chan struct{}), cancel: cancel}
			f.calls[id] = c
			f.mu.Unlock()
			return func() {
				f.mu.Lock()
				delete(f.calls, id)
				f.mu.Unlock()
				close(c.done)
			}, nil
		}
		if cancel == nil && running.cancel != nil {
			running.cancel(node.ErrDeleted)
			running.stopped = true
		}
		f.mu.Unlock()
		select {
		case <-running.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// busy says whether a step runs for id.
func (f flight) busy(id store.ID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[id] != nil
}

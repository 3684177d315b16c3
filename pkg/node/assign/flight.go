package assign

import (
	"context"
	"sync"

	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/store"
)

// flight lets one step at a time run for an attachment. A step that has left the
// removal of a link to the background runs until that is done.
type flight struct {
	mu    *sync.Mutex
	calls map[store.ID]*call
}

type call struct {
	done   chan struct{}
	cancel context.CancelCauseFunc // nil for a DEL
	// The rest is guarded by flight.mu.

	// stopped is set when a DEL has cancelled the ADD.
	stopped bool
	// holders are those without whom the step would be over.
	holders int
	// removing is set when all is done but the removal of the link.
	removing bool
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

// del stops a running ADD for id, waits until no step runs, and enters. If all is
// done already but the removal of the link, it returns nil instead.
func (f flight) del(ctx context.Context, id store.ID) (done func(), _ error) {
	return f.enter(ctx, id, nil)
}

// try enters unless a step runs; then it returns nil.
func (f flight) try(id store.ID) (done func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.calls[id] != nil {
		return nil
	}
	return f.beginLocked(id, nil)
}

// enter is add, or del if cancel is nil.
func (f flight) enter(ctx context.Context, id store.ID, cancel context.CancelCauseFunc) (func(), error) {
	for {
		f.mu.Lock()
		running := f.calls[id]
		if running == nil {
			defer f.mu.Unlock()
			return f.beginLocked(id, cancel), nil
		}
		if cancel == nil && running.removing {
			f.mu.Unlock()
			return nil, nil
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

// beginLocked begins a step; f.mu is held.
func (f flight) beginLocked(id store.ID, cancel context.CancelCauseFunc) (leave func()) {
	c := &call{done: make(chan struct{}), cancel: cancel, holders: 1}
	f.calls[id] = c
	return func() { f.leave(id, c) }
}

// removing says that only the removal of the link is left of the step that runs for
// id, and keeps it running until done is called.
func (f flight) removing(id store.ID) (done func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.calls[id]
	c.holders++
	c.removing = true
	return func() { f.leave(id, c) }
}

func (f flight) leave(id store.ID, c *call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c.holders--; c.holders == 0 {
		delete(f.calls, id)
		close(c.done)
	}
}

// busy says whether a step runs for id.
func (f flight) busy(id store.ID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[id] != nil
}

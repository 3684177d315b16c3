package assign

import (
	"context"
	"sync"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/node"
)

// flight lets one step at a time run for an attachment. A step that has left the
// removal of a link to the background runs until that is done.
type flight struct {
	mu    sync.Mutex
	calls map[attachment.ID]*call
}

type call struct {
	done   chan struct{}
	cancel context.CancelCauseFunc // nil for a DEL
	// settled is closed when all is done but the removal of the link.
	settled chan struct{}
	// holders counts the step itself and the removal that it has left: it is over when both are.
	holders int // guarded by flight.mu
}

// add waits until no step runs for id and enters. The returned context also ends,
// with the cause node.ErrDeleted, when a DEL comes. done must be called.
func (f *flight) add(ctx context.Context, id attachment.ID) (_ context.Context, done func(), _ error) {
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
func (f *flight) del(ctx context.Context, id attachment.ID) (done func(), _ error) {
	return f.enter(ctx, id, nil)
}

// try enters unless a step runs; then it returns nil.
func (f *flight) try(id attachment.ID) (done func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.calls[id] != nil {
		return nil
	}
	return f.beginLocked(id, nil)
}

// enter is add, or del if cancel is nil.
func (f *flight) enter(ctx context.Context, id attachment.ID, cancel context.CancelCauseFunc) (func(), error) {
	for {
		f.mu.Lock()
		running := f.calls[id]
		if running == nil {
			defer f.mu.Unlock()
			return f.beginLocked(id, cancel), nil
		}
		f.mu.Unlock()
		var settled chan struct{} // an ADD waits for the removal, too
		if cancel == nil {
			settled = running.settled
		}
		if cancel == nil && running.cancel != nil {
			running.cancel(node.ErrDeleted)
		}
		select {
		case <-running.done:
		case <-settled:
			return nil, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// beginLocked begins a step; f.mu is held.
func (f *flight) beginLocked(id attachment.ID, cancel context.CancelCauseFunc) (leave func()) {
	c := &call{done: make(chan struct{}), settled: make(chan struct{}), cancel: cancel, holders: 1}
	f.calls[id] = c
	return func() { f.leave(id, c, true) }
}

// removing keeps the step that runs for id running until done is called: the removal of the
// link goes on in the background.
func (f *flight) removing(id attachment.ID) (done func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := f.calls[id]
	c.holders++
	return func() { f.leave(id, c, false) }
}

// leave is the end of the step itself, or of the removal that it left.
func (f *flight) leave(id attachment.ID, c *call, step bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c.holders--
	switch {
	case c.holders == 0:
		delete(f.calls, id)
		close(c.done)
	case step:
		close(c.settled)
	}
}

// busy says whether a step runs for id.
func (f *flight) busy(id attachment.ID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[id] != nil
}

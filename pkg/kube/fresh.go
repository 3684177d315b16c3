package kube

import (
	"context"
	"sync"
)

// Fresh reads objects of one kind from the API server, each after it was asked for. Those who ask for one that is just being read share the next read: it begins when
// that one has ended. It is safe for concurrent use.
type Fresh[T any] struct {
	// Read reads the object of a name.
	Read func(ctx context.Context, name string) (*T, error)

	mu sync.Mutex
	// next are reads that haven't begun, by name; nil for one that is under way and that nobody else waits for.
	next map[string]*freshRead[T]
}

// freshRead is a read for all who wait for it.
type freshRead[T any] struct {
	ctx    context.Context // of the first who asked
	done   chan struct{}
	object *T
	err    error
}

// Get returns the object of a name, which belongs to all who have asked: don't change it.
func (f *Fresh[T]) Get(ctx context.Context, name string) (*T, error) {
	f.mu.Lock()
	if f.next == nil {
		f.next = map[string]*freshRead[T]{}
	}
	r, busy := f.next[name]
	if r == nil {
		r = &freshRead[T]{ctx: ctx, done: make(chan struct{})}
		f.next[name] = r
	}
	f.mu.Unlock()
	if !busy {
		go f.work(name)
	}
	select {
	case <-r.done:
		return r.object, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// work makes the reads of a name until nobody waits for another.
func (f *Fresh[T]) work(name string) {
	for {
		f.mu.Lock()
		r := f.next[name]
		if r == nil {
			delete(f.next, name)
			f.mu.Unlock()
			return
		}
		f.next[name] = nil // it is under way
		f.mu.Unlock()
		r.object, r.err = f.Read(r.ctx, name)
		close(r.done)
	}
}

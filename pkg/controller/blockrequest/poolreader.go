package blockrequest

import (
	"context"
	"sync"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// maxReadAge is for how long a pool that was read is used for requests that had
// come before the read.
const maxReadAge = time.Second

// poolReader reads pools from the API server, not from a cache, and shares each
// read among all requests that were known when it began: a burst of requests
// costs few reads, a single one costs one.
type poolReader struct {
	get func(ctx context.Context, name string) (*v2.AddressPool, error)
	now func() time.Time

	mu    sync.Mutex // guards reads; never held while reading
	reads map[string]*poolRead
}

type poolRead struct {
	began time.Time
	done  chan struct{} // closed when pool and err are set
	pool  *v2.AddressPool
	err   error
}

func newPoolReader(now func() time.Time, get func(context.Context, string) (*v2.AddressPool, error)) *poolReader {
	return &poolReader{get: get, now: now, reads: map[string]*poolRead{}}
}

// read returns the pool as the API server had it at some moment after since.
func (r *poolReader) read(ctx context.Context, name string, since time.Time) (*v2.AddressPool, error) {
	for {
		r.mu.Lock()
		now := r.now()
		e := r.reads[name]
		if e == nil || e.began.Before(since) || now.Sub(e.began) > maxReadAge {
			e = &poolRead{began: now, done: make(chan struct{})}
			r.reads[name] = e
			r.mu.Unlock()
			e.pool, e.err = r.get(ctx, name)
			r.finish(name, e)
			return e.pool, e.err
		}
		r.mu.Unlock()
		select {
		case <-e.done:
			if e.err == nil {
				return e.pool, nil
			}
			// Another request's read failed, maybe with its context.
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// finish publishes a read. One that failed is not shared.
func (r *poolReader) finish(name string, e *poolRead) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e.err != nil && r.reads[name] == e {
		delete(r.reads, name)
	}
	close(e.done)
}

// forget drops the last read of a pool.
func (r *poolReader) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.reads, name)
}

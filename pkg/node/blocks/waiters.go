package blocks

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// waiters counts the callers that wait for a block of each pool, and tells them of news.
//
// News has a generation. A caller passes the generation that it knew before it
// looked for an address, so that news between the look and the wait isn't lost.
type waiters struct {
	mu    sync.Mutex
	pools map[string]*poolNews
	// latest is the last generation of any pool, so that a pool which was forgotten doesn't get
	// one again that somebody knows.
	latest uint64
}

type poolNews struct {
	generation uint64
	changed    chan struct{} // closed at the next generation
	waiting    int
	// refused is the answer of the last generation, if it was a refusal.
	refused error
	// pausedUntil is when the pool may be asked again without need: pause, which doubles with each
	// refusal, and some more, so that not all nodes ask at once.
	pause       time.Duration
	pausedUntil time.Time
}

func newWaiters() *waiters { return &waiters{pools: map[string]*poolNews{}} }

// getLocked returns the news of a pool; w.mu is held.
func (w *waiters) getLocked(pool string) *poolNews {
	n := w.pools[pool]
	if n == nil {
		n = &poolNews{generation: w.latest, changed: make(chan struct{})}
		w.pools[pool] = n
	}
	return n
}

func (w *waiters) generation(pool string) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.getLocked(pool).generation
}

// tell starts a generation: refused is nil when there may be addresses now.
func (w *waiters) tell(pool string, refused error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.getLocked(pool)
	w.latest++
	n.generation = w.latest
	n.refused = refused
	if refused == nil {
		n.pause, n.pausedUntil = 0, time.Time{}
	} else {
		n.rest()
	}
	n.waiting = 0 // they are told
	close(n.changed)
	n.changed = make(chan struct{})
}

// rest begins the next pause.
func (n *poolNews) rest() {
	n.pause = min(max(2*n.pause, askAheadPause), maxAskAheadPause)
	n.pausedUntil = time.Now().Add(n.pause + rand.N(n.pause/4))
}

// hasRefused says whether the last answer of a pool was a refusal.
func (w *waiters) hasRefused(pool string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.pools[pool]
	return n != nil && n.pause > 0
}

// postpone begins the next pause of a pool, which isn't news to the callers that wait, and returns it.
func (w *waiters) postpone(pool string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.getLocked(pool)
	n.rest()
	return time.Until(n.pausedUntil)
}

// forget forgets a pool, unless somebody waits for it.
func (w *waiters) forget(pool string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n := w.pools[pool]; n != nil && n.waiting > 0 {
		return false
	}
	delete(w.pools, pool)
	return true
}

// state returns how many wait, and for how long the pool isn't to be asked unless somebody does.
func (w *waiters) state(pool string) (waiting int, pause time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.pools[pool]
	if n == nil {
		return 0, 0
	}
	return n.waiting, max(time.Until(n.pausedUntil), 0)
}

// wait blocks until there is a generation after since, and returns its refusal
// or nil; or until ctx ends. ask is called once it counts as waiting.
func (w *waiters) wait(ctx context.Context, pool string, since uint64, ask func()) error {
	w.mu.Lock()
	n := w.getLocked(pool)
	if n.generation != since {
		defer w.mu.Unlock()
		return n.refused
	}
	changed := n.changed
	n.waiting++
	w.mu.Unlock()
	ask()
	select {
	case <-changed:
	case <-ctx.Done():
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if n.changed != changed {
		return n.refused
	}
	n.waiting--
	return ctx.Err()
}

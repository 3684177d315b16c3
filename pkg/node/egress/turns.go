package egress

import (
	"context"
	"slices"
	"sync"
)

const (
	// decidedAtOnce is how many pods are decided about at once: their changes of the node's ruleset are made
	// together. workedAtOnce is how many pods the node works in at once.
	decidedAtOnce = 16
	workedAtOnce  = 8
	// mostPods is how many pods with a sandbox may wait for their turn, more than a node has.
	mostPods = 1024
)

// turns lets the work of namespaces go on in turn, so much at once. A namespace has at most half of the places that
// others leave: tenants, and programs in pods, may make work take long.
type turns struct {
	most int

	mu      sync.Mutex
	working int
	// of has the number of running works by namespace. waiting are the works that haven't begun, the next one first. Works of
	// a namespace that has had a turn come after those of all others.
	of      map[string]int
	waiting []waiter
}

// waiter is a work that waits until turn is closed.
type waiter struct {
	namespace string
	turn      chan struct{}
}

func newTurns(most int) *turns { return &turns{most: most, of: map[string]int{}} }

// do does work of a namespace when it is its turn, unless ctx ends before.
func (t *turns) do(ctx context.Context, namespace string, work func() error) error {
	w := waiter{namespace, make(chan struct{})}
	t.mu.Lock()
	t.waiting = append(t.waiting, w)
	t.next()
	t.mu.Unlock()
	defer t.leave(w)
	select {
	case <-w.turn:
		return work()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// leave ends the turn of a work, or its wait for one.
func (t *turns) leave(w waiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.waiting, w); i >= 0 {
		t.waiting = slices.Delete(t.waiting, i, i+1)
		return
	}
	t.working--
	if t.of[w.namespace]--; t.of[w.namespace] == 0 {
		delete(t.of, w.namespace)
	}
	t.next()
}

// next gives turns to the works that may have one. It must be called with mu held.
func (t *turns) next() {
	for {
		i := slices.IndexFunc(t.waiting, func(w waiter) bool { return t.may(w.namespace) })
		if i < 0 {
			return
		}
		first := t.waiting[i]
		var others, own []waiter
		for _, w := range slices.Delete(t.waiting, i, i+1) {
			if w.namespace == first.namespace {
				own = append(own, w)
			} else {
				others = append(others, w)
			}
		}
		t.waiting = append(others, own...)
		t.working++
		t.of[first.namespace]++
		close(first.turn)
	}
}

// may says whether a namespace may have another turn.
func (t *turns) may(namespace string) bool {
	free, own := t.most-t.working, t.of[namespace]
	return free > 0 && 2*own < max(1, free+own)
}

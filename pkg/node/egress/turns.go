package egress

import (
	"context"
	"slices"
	"sync"
)

const (
	// decidedAtOnce is for how many pods is decided at once: what is changed of the node's ruleset then is changed
	// together. workedAtOnce is in how many pods the node works.
	decidedAtOnce = 16
	workedAtOnce  = 8
	// mostPods is how many pods with a sandbox may wait for their turn, more than a node has.
	mostPods = 1024
)

// turns lets the work of namespaces go on in turn, so much at once. A namespace has at most half of what others leave:
// tenants, and programs in pods, may make the work for these last.
type turns struct {
	most int

	mu      sync.Mutex
	working int
	// of is how many works of a namespace go on. waiting are the others, by namespace. order are the namespaces that wait,
	// the next one first.
	of      map[string]int
	waiting map[string][]chan struct{}
	order   []string
}

func newTurns(most int) *turns {
	return &turns{most: most, of: map[string]int{}, waiting: map[string][]chan struct{}{}}
}

// begin waits for a turn of a namespace until ctx ends. The turn lasts until end.
func (t *turns) begin(ctx context.Context, namespace string) error {
	turn := make(chan struct{})
	t.mu.Lock()
	if len(t.waiting[namespace]) == 0 {
		t.order = append(t.order, namespace)
	}
	t.waiting[namespace] = append(t.waiting[namespace], turn)
	t.next()
	t.mu.Unlock()
	select {
	case <-turn:
		return nil
	case <-ctx.Done():
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.waiting[namespace], turn)
	if i < 0 { // it came at the same time
		t.leave(namespace)
		return ctx.Err()
	}
	t.waiting[namespace] = slices.Delete(t.waiting[namespace], i, i+1)
	if len(t.waiting[namespace]) == 0 {
		delete(t.waiting, namespace)
		t.order = slices.DeleteFunc(t.order, func(n string) bool { return n == namespace })
	}
	return ctx.Err()
}

// end ends a turn of a namespace.
func (t *turns) end(namespace string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave(namespace)
}

// leave must be called with mu held.
func (t *turns) leave(namespace string) {
	t.working--
	if t.of[namespace]--; t.of[namespace] == 0 {
		delete(t.of, namespace)
	}
	t.next()
}

// next gives turns to those that may have one. It must be called with mu held.
func (t *turns) next() {
	for {
		i := slices.IndexFunc(t.order, t.may)
		if i < 0 {
			return
		}
		namespace := t.order[i]
		t.order = slices.Delete(t.order, i, i+1)
		first := t.waiting[namespace][0]
		if t.waiting[namespace] = t.waiting[namespace][1:]; len(t.waiting[namespace]) > 0 {
			t.order = append(t.order, namespace)
		} else {
			delete(t.waiting, namespace)
		}
		t.working++
		t.of[namespace]++
		close(first)
	}
}

// may says whether a namespace may have another turn.
func (t *turns) may(namespace string) bool {
	free, own := t.most-t.working, t.of[namespace]
	return free > 0 && 2*own < max(1, free+own)
}

package handover

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/testkit"
)

// fakeEvents are a subscription.
type fakeEvents struct {
	calls  chan func(wanted func(netip.Addr) bool, each func(conntrack.Event), lost func()) error
	closed chan struct{}
	once   sync.Once
}

func (t *table) subscribe() (Events, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.subscribing != nil {
		return nil, t.subscribing
	}
	e := &fakeEvents{calls: make(chan func(func(netip.Addr) bool, func(conntrack.Event), func()) error), closed: make(chan struct{})}
	t.events = append(t.events, e)
	return e, nil
}

func (e *fakeEvents) Run(ctx context.Context, _ time.Duration, wanted func(netip.Addr) bool, each func(conntrack.Event), lost func()) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case call := <-e.calls:
			if err := call(wanted, each, lost); err != nil {
				return err
			}
		}
	}
}

func (e *fakeEvents) Close() error {
	e.once.Do(func() { close(e.closed) })
	return nil
}

// subscription returns the n-th subscription of a table.
func (w *world) subscription(n *fakeNode, i int) *fakeEvents {
	w.t.Helper()
	var e *fakeEvents
	testkit.Eventually(w.t, 10*time.Second, "the flows are followed", func() error {
		n.table.mu.Lock()
		defer n.table.mu.Unlock()
		if len(n.table.events) <= i {
			return fmt.Errorf("%d subscriptions", len(n.table.events))
		}
		e = n.table.events[i]
		return nil
	})
	return e
}

// tell tells of events, and returns when they have been taken.
func (e *fakeEvents) tell(events ...conntrack.Event) {
	done := make(chan bool)
	e.calls <- func(wanted func(netip.Addr) bool, each func(conntrack.Event), _ func()) error {
		for _, event := range events {
			if wanted(event.Translated.Addr()) {
				each(event)
			}
		}
		close(done)
		return nil
	}
	<-done
}

// begins opens flows of an address in the table of a node, and ends closes them; both are told.
func (n *fakeNode) begins(e *fakeEvents, a floating.Address, from, to int) {
	n.open(a, from, to)
	for i := from; i < to; i++ {
		e.tell(conntrack.Event{Flow: flow(a, i)})
	}
}

func (n *fakeNode) ends(e *fakeEvents, a floating.Address, from, to int) {
	n.close(a, from, to)
	for i := from; i < to; i++ {
		e.tell(conntrack.Event{Flow: flow(a, i), Over: true})
	}
}

func (n *fakeNode) close(a floating.Address, from, to int) {
	n.table.mu.Lock()
	defer n.table.mu.Unlock()
	for i := from; i < to; i++ {
		delete(n.table.flows, keyOf(flow(a, i)))
	}
}

// newStandbyWorld is a world whose address has a standby, with shorter times. It can be prepared before anything is copied.
func newStandbyWorld(t *testing.T, prepare ...func(*world)) *world {
	w := newWorld(t)
	for _, n := range []*fakeNode{w.a, w.b} {
		n.standby.limits = standbyLimits{
			settle: time.Millisecond, turn: 20 * time.Millisecond, beat: 100 * time.Millisecond, answer: testkit.Timeout(5 * time.Second), whole: time.Hour, kept: 300 * time.Second,
			retry: 10 * time.Millisecond, mostRetry: 100 * time.Millisecond, waiting: 1000,
		}
		n.standby.PodsChanged()
	}
	for _, do := range prepare {
		do(w)
	}
	w.standby(func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
	return w
}

// standby changes the block, and tells both nodes.
func (w *world) standby(change func(*v2.Floating)) {
	w.mu.Lock()
	before := w.blocks["p-0"]
	w.mu.Unlock()
	w.change("p-0", change)
	w.mu.Lock()
	after := w.blocks["p-0"]
	w.mu.Unlock()
	w.a.standby.Changed(before, after)
	w.b.standby.Changed(before, after)
}

// keeps waits until the router of b has the same flows as that of a.
func (w *world) keeps(what string) {
	w.t.Helper()
	testkit.Eventually(w.t, 10*time.Second, what, func() error {
		want, got := w.a.all(), w.b.all()
		for id, f := range want {
			if have, ok := got[id]; !ok || have.Translated != f.Translated || have.TCP != f.TCP || have.Mark != f.Mark || have.Timeout < 300 {
				return fmt.Errorf("of %d and %d flows, %+v is %+v", len(want), len(got), f, have)
			}
		}
		if len(want) != len(got) {
			return fmt.Errorf("%d flows, want %d", len(got), len(want))
		}
		return nil
	})
}

// inStep waits until a says that b has all flows, or that it hasn't, and why.
func (w *world) inStep(why string) {
	w.t.Helper()
	testkit.Eventually(w.t, 10*time.Second, "the state", func() error {
		state, ok := w.a.standby.State("p-0")
		if !ok || state.Node != "b" || state.Since.IsZero() != (why == "") || !strings.Contains(state.Why, why) {
			return fmt.Errorf("%+v, %t, want %q", state, ok, why)
		}
		return nil
	})
}

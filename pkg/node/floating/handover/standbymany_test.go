package handover

import (
	"fmt"
	"testing"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// Flows of many addresses are copied in a few turns. Either router's table is read once in each.
func TestManyAddressesAreCopied(t *testing.T) {
	const n = 5 * mostStarting
	var names []string
	w := newStandbyWorld(t, func(w *world) {
		w.a.standby.limits.turn = 200 * time.Millisecond
		for i := 1; i <= n; i++ {
			name := fmt.Sprintf("p-%d", i)
			names = append(names, name)
			w.block(name, fmt.Sprintf("198.51.101.%d", i), fmt.Sprintf("2001:db8::1:%x", i))
			w.change(name, func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
			a := w.address(name, "a")
			w.a.open(a, 100*i, 100*i+10)
			w.b.open(a, 100*i+5, 100*i+15) // of before
		}
		for _, name := range names {
			w.a.standby.Changed(nil, w.a.cfg.Block(name))
		}
	})
	w.keeps("all flows")
	for _, name := range names {
		testkit.Eventually(t, 10*time.Second, "all are in step", func() error {
			if state, ok := w.a.standby.State(name); !ok || !state.Since.IsZero() {
				return fmt.Errorf("%s: %+v", name, state)
			}
			return nil
		})
	}
	for _, node := range []*fakeNode{w.a, w.b} {
		node.table.mu.Lock()
		if node.table.reads < n/mostStarting || node.table.reads > n/2 {
			t.Errorf("the table of node %s was read %d times for %d addresses", node.cfg.Node, node.table.reads, n)
		}
		node.table.mu.Unlock()
	}
}

// The next turn comes when all flows of an address are to be sent again.
func TestTurnsComeInTime(t *testing.T) {
	w := newWorld(t)
	w.a.standby.limits.beat, w.a.standby.limits.turn, w.a.standby.limits.whole = time.Hour, time.Minute, 30*time.Minute
	st := &stream{s: w.a.standby, wake: make(chan struct{}, 1), all: map[string]*copied{}}
	for i := range mostStarting + 1 {
		a := w.address("p-0", "a")
		a.Block = fmt.Sprintf("p-%d", i)
		st.add(lead{Address: a, node: "b"}, true)
	}
	for i, want := range []struct {
		starting int
		next     time.Duration
	}{{mostStarting, time.Minute}, {1, 30 * time.Minute}, {0, 30 * time.Minute}} {
		all := st.starting(time.Now())
		next, _ := st.settled(all, answer{})
		if len(all) != want.starting || next > want.next || next < want.next-testkit.Timeout(time.Minute) {
			t.Errorf("turn %d: all flows of %d addresses, and the next turn after %s, want %+v", i, len(all), next, want)
		}
	}
}

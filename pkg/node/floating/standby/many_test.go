package standby

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
		w.a.limits.turn = 200 * time.Millisecond
		for i := 1; i <= n; i++ {
			name := fmt.Sprintf("p-%d", i)
			names = append(names, name)
			w.Block(name, fmt.Sprintf("198.51.101.%d", i), fmt.Sprintf("2001:db8::1:%x", i))
			w.Change(name, func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
			a := w.Address(name, "a")
			w.a.Add(a, 100*i, 100*i+10)
			w.b.Add(a, 100*i+5, 100*i+15) // of before
		}
		for _, name := range names {
			w.a.Changed(nil, w.a.cfg.Block(name))
		}
	})
	w.Kept("all flows")
	for _, name := range names {
		testkit.Eventually(t, 10*time.Second, "all are in step", func() error {
			if state, ok := w.a.State(name); !ok || !state.Since.IsZero() {
				return fmt.Errorf("%s: %+v", name, state)
			}
			return nil
		})
	}
	for _, node := range []*fakeNode{w.a, w.b} {
		if reads := node.Reads(); reads < n/mostStarting || reads > n/2 {
			t.Errorf("the table of node %s was read %d times for %d addresses", node.Name, reads, n)
		}
	}
}

// The next turn comes when all flows of an address are to be sent again.
func TestTurnsComeInTime(t *testing.T) {
	w := newWorld(t)
	w.a.limits.beat, w.a.limits.turn, w.a.limits.whole = time.Hour, time.Minute, 30*time.Minute
	st := &stream{s: w.a.Standby, wake: make(chan struct{}, 1), all: map[string]*copied{}}
	for i := range mostStarting + 1 {
		a := w.Address("p-0", "a")
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

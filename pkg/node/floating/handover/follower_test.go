package handover

import (
	"context"
	"fmt"
	"maps"
	"net"
	"strings"
	"testing"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/testkit"
)

// newStandbyWorld is a world whose address has a standby.
func newStandbyWorld(t *testing.T) *world {
	w := newWorld(t)
	w.a.standby.PodsChanged()
	w.b.standby.PodsChanged()
	w.change(func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
	return w
}

// change changes the block, and tells both nodes.
func (w *world) change(change func(*v2.Floating)) {
	before, after := w.Change("p-0", change)
	w.a.standby.Changed(before, after)
	w.b.standby.Changed(before, after)
}

// inStep waits until b has all flows.
func (w *world) inStep() {
	w.T.Helper()
	testkit.Eventually(w.T, 10*time.Second, "the state", func() error {
		if state, ok := w.a.standby.State("p-0"); !ok || !state.Since.IsZero() {
			return fmt.Errorf("%+v, %t", state, ok)
		}
		return nil
	})
}

// A hand-over to the node that follows breaks: what was copied before stays. One that doesn't break leaves the flows of the holder, and no others.
func TestHandoverToFollower(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 100)
	w.Kept("all flows")
	w.inStep()
	w.change(func(f *v2.Floating) { f.MovingTo = "b" })

	offers := func() net.Conn {
		conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
		s := &sending{h: w.a.Handover, address: a, conn: conn}
		testkit.Check(t, s.write(frames.Offer, []byte(`{"block":"p-0","id":"uid of p-0"}`)), s.answer())
		return conn
	}
	conn := offers()
	testkit.Check(t, frames.Write(conn, frames.Opened, frames.AppendFlow(nil, floatingtest.Flow(a, 100))), conn.Close())
	w.b.counted(t, received, failed, 1)
	if n := len(w.b.All()); n != 101 {
		t.Errorf("%d flows are left after a hand-over that broke, want 101", n)
	}

	// Meanwhile a connection has ended, and another one has got its port and another translation.
	w.a.Remove(a, 0, 10)
	other := floatingtest.Flow(a, 50)
	other.Translated = floatingtest.Flow(a, 1050).Translated
	w.a.Set(other)
	w.a.Move(t.Context(), a, "b")
	if want, got := w.a.All(), w.b.All(); !maps.Equal(want, got) {
		t.Errorf("the next holder has %d flows, which aren't the %d of the holder", len(got), len(want))
	}
}

// A node that has handed an address over to the one that followed it follows that one. It keeps the connections, and none of the last moment is lost.
func TestStandbyTurns(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.Address("p-0", "a")
	w.a.limits.late = testkit.Timeout(5 * time.Second)
	w.b.cfg.Dial = func(ctx context.Context, _ string) (net.Conn, error) { return w.A.Dial(ctx) }
	w.a.Add(a, 0, 100)
	w.a.Subscription(t, 0)
	w.Kept("all flows")
	w.change(func(f *v2.Floating) { f.MovingTo = "b" })
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	w.a.Add(a, 100, 110)
	w.change(func(f *v2.Floating) {
		f.Holding.Holder, f.Holding.PodUID, f.MovingTo = "b", "pod of b", ""
	})
	testkit.Eventually(t, 10*time.Second, "the node of before doesn't follow yet", func() error {
		state, ok := w.b.standby.State("p-0")
		if !ok || !strings.Contains(state.Why, "still hands the address over") {
			return fmt.Errorf("%+v, %t", state, ok)
		}
		return nil
	})
	move()
	testkit.Eventually(t, 10*time.Second, "the node of before follows", func() error {
		state, ok := w.b.standby.State("p-0")
		if !ok || !state.Since.IsZero() || w.a.Moves(a.ID) {
			return fmt.Errorf("%+v, %t", state, ok)
		}
		return nil
	})
	w.a.Finish() // it would have forgotten them by now
	for _, n := range []*fakeNode{w.a, w.b} {
		if got := len(n.All()); got != 110 {
			t.Errorf("node %s has %d flows, want 110", n.Name, got)
		}
	}
}

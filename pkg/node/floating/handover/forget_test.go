package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/testkit"
)

// forgets waits until the router of a node has no flows.
func (n *fakeNode) forgets(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "the router of node "+n.Name+" has no flows", func() error {
		if n := len(n.All()); n > 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// An address moves though its connections couldn't be copied: the router of before forgets them.
func TestForgetsWhatWasNotCopied(t *testing.T) {
	w := newWorld(t)
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 10)
	w.a.limits.straggle = 50 * time.Millisecond
	w.a.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("no way") }
	w.a.Move(t.Context(), a, "b")
	w.Change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID, f.MovingTo = "b", "pod of b", "" })
	w.a.forgets(t)
}

// An address comes back, and moves again: the router of before has its connections for as long as after one move.
func TestForgetsAfterTheLastMove(t *testing.T) {
	w := newWorld(t)
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 10)
	const straggle = 300 * time.Millisecond
	w.a.limits.straggle = straggle
	w.a.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("no way") }
	w.a.Move(t.Context(), a, "b")
	<-time.After(straggle * 2 / 3) // meanwhile it was at b
	began := time.Now()
	w.a.Move(t.Context(), a, "b")
	w.Change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID, f.MovingTo = "b", "pod of b", "" })
	w.a.forgets(t)
	if took := time.Since(began); took < straggle {
		t.Errorf("it has forgotten them after %s, want %s at least", took, straggle)
	}
}

// What came by a hand-over that broke, or that was whole, is forgotten when the address doesn't move after all.
func TestForgetsWhatDoesNotCome(t *testing.T) {
	for name, breaks := range map[string]bool{"a broken one": true, "a whole one": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.Address("p-0", "a")
			w.a.Add(a, 0, 10)
			w.b.limits.unclaimed = 50 * time.Millisecond
			moved, move := context.WithCancel(t.Context())
			if breaks {
				conn := testkit.Must(w.B.Dial(t.Context()))(t)
				s := &sending{h: w.a.Handover, address: a, conn: conn}
				testkit.Check(t, s.write(frames.Offer, []byte(`{"block":"p-0","id":"uid of p-0"}`)), s.answer(),
					frames.Write(conn, frames.Opened, frames.AppendFlow(nil, floatingtest.Flow(a, 0))), conn.Close())
			} else {
				w.a.Move(moved, a, "b")
			}
			w.Change("p-0", func(f *v2.Floating) { f.MovingTo = "" })
			move()
			w.b.counted(t, received, map[bool]string{true: failed, false: done}[breaks], 1)
			w.b.forgets(t)
			if n := len(w.a.All()); n != 10 {
				t.Errorf("the holder's router has %d flows, want 10", n)
			}
		})
	}
}

// A program that starts has routers forget what another node has by now, and nothing else.
func TestForgetsAtStart(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v2.Floating)
		stays  bool
	}{
		"another's": {func(f *v2.Floating) { f.MovingTo = "" }, false},
		"another's, with standby": {func(f *v2.Floating) {
			f.MovingTo, f.Standby, f.Successors = "", true, append([]v2.FloatingNode{{Node: "c", PodUID: "pod of c"}}, f.Successors...)
		}, false},
		"copied here": {func(f *v2.Floating) { f.MovingTo, f.Standby = "", true }, true},
		"coming":      {func(*v2.Floating) {}, true},
		"its own":     {func(f *v2.Floating) { f.Holding.Holder = "b" }, true},
		"nobody's":    {func(f *v2.Floating) { f.MovingTo, f.Holding.Holder = "", "" }, true},
		"released":    {func(f *v2.Floating) { f.MovingTo, f.ReleasedAt = "", &metav1.Time{} }, true}, // it isn't known which pod had it
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.b.Add(w.Address("p-0", "b"), 0, 10)
			_, b := w.Change("p-0", c.change)
			w.b.Start([]*v2.AddressBlock{b})
			if !c.stays {
				w.b.forgets(t)
			}
			w.b.Finish()
			if n := len(w.b.All()); c.stays && n != 10 {
				t.Errorf("%d flows are left, want 10", n)
			}
		})
	}
}

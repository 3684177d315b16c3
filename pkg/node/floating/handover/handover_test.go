package handover

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// All flows are copied, those that changed meanwhile, and those that were opened until the address had moved. What the next router had of the
// address before is forgotten, and the one of before forgets its flows.
func TestHandover(t *testing.T) {
	w := newWorld(t)
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 3000)
	w.b.Add(a, 5000, 5010)
	stale := floatingtest.Flow(a, 7)
	stale.Translated, stale.TCP.State = floatingtest.Flow(a, 9).Translated, 7
	w.b.Set(stale)
	other := floatingtest.Flow(a, 8)
	other.Src, other.Dst, other.Translated = other.Dst, other.Src, stale.Src
	w.b.Set(other) // of no interest

	w.a.Fail(func(f *floatingtest.Faults) {
		f.Reading = func(n int) {
			if n != 1 {
				return
			}
			w.a.Add(a, 3000, 3100) // after the first look
			changed := floatingtest.Flow(a, 11)
			changed.TCP.State = 5
			w.a.Set(changed)
		}
	})
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	want := w.a.All()
	want[tables.KeyOf(other)] = other
	if got := w.b.All(); !maps.Equal(got, want) {
		t.Fatalf("the next router has %d flows, want %d", len(got), len(want))
	}
	w.a.Add(a, 3100, 3150)
	w.Change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID, f.MovingTo = "b", "pod of b", "" })
	move()
	testkit.Eventually(t, 10*time.Second, "the last flows", func() error {
		if got := len(w.b.All()); got != len(want)+50 {
			return fmt.Errorf("%d, want %d", got, len(want)+50)
		}
		return nil
	})
	w.a.counted(t, sent, done, 1)
	w.b.counted(t, received, done, 1)
	for _, n := range []struct {
		*fakeNode
		side string
	}{{w.a, sent}, {w.b, received}} {
		if got := testutil.ToFloat64(n.metrics.flows.WithLabelValues(n.side)); got != 3150 {
			t.Errorf("%v flows are %s, want 3150", got, n.side)
		}
	}
	if got := w.a.straggles(); !slices.Equal(got, a.Addrs()) {
		t.Errorf("the router of before may send from %v", got)
	}
	testkit.Eventually(t, 10*time.Second, "the router of before has no flows", func() error {
		if n := len(w.a.All()); n > 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// A program that ends hands an address over that is to move nowhere, to the node that takes it. The watch knows a moment later that it has.
func TestHolderLeaves(t *testing.T) {
	w := newWorld(t)
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 10)
	w.Change("p-0", func(f *v2.Floating) { f.MovingTo = "" })
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	w.a.Add(a, 10, 20)
	move()
	w.Change("p-0", func(f *v2.Floating) { f.Holding.Holder = "" })
	w.Change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID = "b", "pod of b" })
	testkit.Eventually(t, 10*time.Second, "the next router has all flows", func() error {
		if n := len(w.b.All()); n != 20 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	w.b.counted(t, received, done, 1)
}

// The router of the next holder isn't ready for a moment when it has the address: the node is no successor any more, but has it, and takes the last flows.
func TestNextHolderIsNoSuccessorAnyMore(t *testing.T) {
	w := newWorld(t)
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 10)
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	w.a.Add(a, 10, 20)
	w.Change("p-0", func(f *v2.Floating) {
		f.Holding.Holder, f.Holding.PodUID, f.MovingTo, f.Successors = "b", "pod of b", "", f.Successors[1:]
	})
	move()
	w.a.counted(t, sent, done, 1)
	w.b.counted(t, received, done, 1)
	if n := len(w.b.All()); n != 20 {
		t.Errorf("the next router has %d flows, want 20", n)
	}
}

// An address that doesn't move after all stays as it is.
func TestMoveIsUndone(t *testing.T) {
	w := newWorld(t)
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 10)
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	w.Change("p-0", func(f *v2.Floating) { f.MovingTo = "" })
	move()
	w.a.counted(t, sent, done, 1)
	w.b.counted(t, received, done, 1)
	w.a.Finish()
	if n := len(w.a.All()); n != 10 {
		t.Errorf("the router has %d flows, want 10", n)
	}
	if got := w.a.straggles(); len(got) > 0 {
		t.Errorf("the router may send from %v", got)
	}
}

func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*world)
		want   string
	}{
		"not the holder":     {func(w *world) { w.Change("p-0", func(f *v2.Floating) { f.Holding.Holder = "c" }) }, `its holder is "c"`},
		"moving elsewhere":   {func(w *world) { w.Change("p-0", func(f *v2.Floating) { f.MovingTo = "c" }) }, `it moves to "c"`},
		"the receiver's own": {func(w *world) { w.Change("p-0", func(f *v2.Floating) { f.Holding.Holder = "b" }) }, `its holder is "b"`},
		"no pod":             {func(w *world) { w.Change("p-0", func(f *v2.Floating) { f.Successors[0].PodUID = "" }) }, "no pod of node b"},
		"no successor":       {func(w *world) { w.Change("p-0", func(f *v2.Floating) { f.Successors = f.Successors[1:] }) }, "no pod of node b"},
		"released": {func(w *world) {
			w.Change("p-0", func(f *v2.Floating) { f.ReleasedAt = new(w.Find("p-0").CreationTimestamp) })
		}, `it moves to ""`},
		"another UID":           {func(w *world) { w.Find("p-0").UID = "another" }, "no AddressBlock"},
		"unknown to the API":    {func(w *world) { w.Replace("p-0", nil) }, "no AddressBlock"},
		"of a pod that is gone": {func(w *world) { w.Change("p-0", func(f *v2.Floating) { f.Successors[0].PodUID = "gone" }) }, "no pod gone"},
		"more than fits":        {func(w *world) { w.b.limits.bytes = 1000 }, "there is room for 1000 bytes"},
		"the table is full":     {func(w *world) { w.b.Fail(func(f *floatingtest.Faults) { f.Insert = errFull }) }, errFull.Error()},
		"flows of another address": {func(w *world) {
			w.Block("p-1", "198.51.100.8", "2001:db8::8")
			w.a.cfg.Dial = w.offering("p-1")
		}, "isn't of the address"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.Address("p-0", "a")
			w.a.Add(a, 0, 2000)
			c.change(w)
			s := &sending{h: w.a.Handover, address: a, node: "b", known: map[tables.Key]byte{}}
			err := s.prepare(t.Context())
			s.close()
			testkit.Eventually(t, 10*time.Second, "the receiver has ended", func() error {
				if testutil.ToFloat64(w.b.metrics.results.WithLabelValues(received, refused))+testutil.ToFloat64(w.b.metrics.results.WithLabelValues(received, failed)) != 1 {
					return io.ErrNoProgress
				}
				return nil
			})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, want %q", err, c.want)
			}
			if n := len(w.b.All()); !strings.Contains(c.want, "full") && w.b.limits.bytes > 1000 && n > 0 {
				t.Errorf("%d flows are taken", n)
			}
			w.a.Move(t.Context(), a, "b") // which says so, and returns
			w.a.counted(t, sent, refused, 1)
		})
	}
}

// offering returns a Dial that offers another address than its caller.
func (w *world) offering(name string) func(context.Context, string) (net.Conn, error) {
	dial := w.a.cfg.Dial
	return func(ctx context.Context, node string) (net.Conn, error) {
		conn, err := dial(ctx, node)
		if err != nil {
			return nil, err
		}
		return &swapping{Conn: conn, offer: fmt.Appendf(nil, `{"block":"%s","id":"uid of %s"}`, name, name)}, nil
	}
}

// swapping writes something else in place of the first frame.
type swapping struct {
	net.Conn
	offer []byte
}

func (s *swapping) Write(b []byte) (int, error) {
	if s.offer == nil {
		return s.Conn.Write(b)
	}
	err := frames.Write(s.Conn, frames.Offer, s.offer)
	s.offer = nil
	return len(b), err
}

// Nothing that the other end does, or doesn't, takes longer than it may.
func TestOtherEndHangs(t *testing.T) {
	for name, accept := range map[string]func(context.Context, string, net.Conn){
		"silent": func(ctx context.Context, _ string, _ net.Conn) { <-ctx.Done() },
		"gone":   func(_ context.Context, _ string, c net.Conn) { _ = c.Close() },
		"silent after the offer": func(ctx context.Context, _ string, c net.Conn) {
			_ = frames.Write(c, frames.Ready, []byte("{}"))
			<-ctx.Done()
		},
		"nonsense": func(ctx context.Context, _ string, c net.Conn) {
			_, _ = c.Write(bytes.Repeat([]byte{0xff}, 100))
			<-ctx.Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.b.AcceptBy(func(floatingtest.Accept) floatingtest.Accept { return accept })
			a := w.Address("p-0", "a")
			w.a.Add(a, 0, 60000)
			w.a.limits.total = 300 * time.Millisecond
			done := make(chan bool)
			go func() {
				w.a.Move(t.Context(), a, "b")
				close(done)
			}()
			select {
			case <-done:
			case <-time.After(testkit.Timeout(10 * time.Second)):
				t.Fatal("the address waits")
			}
			w.a.counted(t, sent, failed, 1)
			if n := len(w.a.slots); n > 0 {
				t.Errorf("%d hand-overs go on", n)
			}
		})
	}
	t.Run("a sender", func(t *testing.T) {
		w := newWorld(t)
		w.b.limits.total, w.b.limits.late = 100*time.Millisecond, 0
		conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
		defer conn.Close()
		w.b.counted(t, received, failed, 1)
	})
}

// Many addresses of a router are handed over at once: the table isn't read for each.
func TestManyAddresses(t *testing.T) {
	const n = 300
	w := newWorld(t)
	w.a.Fail(func(f *floatingtest.Faults) { f.Reading = func(int) { time.Sleep(20 * time.Millisecond) } }) // it takes long
	w.a.limits.late = 50 * time.Millisecond                                                                // until one gives its place to the next
	moved, move := context.WithCancel(t.Context())
	var moves sync.WaitGroup
	for i := range n {
		name := fmt.Sprint("p-", i)
		w.Block(name, fmt.Sprintf("198.51.%d.%d", i/256, i%256), fmt.Sprintf("2001:db8::%x", i))
		a := w.Address(name, "a")
		w.a.Set(floatingtest.Flow(a, 2*i))
		moves.Go(func() { w.a.Move(moved, a, "b") })
	}
	moves.Wait()
	move()
	if got := w.b.All(); len(got) != n {
		t.Errorf("%d flows are copied, want %d", len(got), n)
	}
	if reads := w.a.Reads(); reads > n/4 {
		t.Errorf("the table was read %d times for %d addresses", reads, n)
	}
}

package handover

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/testkit"
)

// All flows are copied, those that changed meanwhile, and those that were opened until the address had moved. What the next router had of the
// address before is forgotten, and the one of before forgets its flows.
func TestHandover(t *testing.T) {
	w := newWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 3000)
	w.b.open(a, 5000, 5010)
	stale := flow(a, 7)
	stale.Translated, stale.TCP.State = flow(a, 9).Translated, 7
	w.b.flows[key{stale.Protocol, stale.Src, stale.Dst}] = stale
	other := flow(a, 8)
	other.Translated = stale.Src
	w.b.flows[key{other.Protocol, other.Dst, other.Src}] = other // of no interest

	w.a.reading = func(n int) {
		if n != 1 {
			return
		}
		w.a.open(a, 3000, 3100) // after the first look
		w.a.table.mu.Lock()
		defer w.a.table.mu.Unlock()
		f := flow(a, 11)
		f.TCP.State = 5
		w.a.flows[key{f.Protocol, f.Src, f.Dst}] = f
	}
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	want := w.a.all()
	want[key{other.Protocol, other.Dst, other.Src}] = other
	if got := w.b.all(); !maps.Equal(got, want) {
		t.Fatalf("the next router has %d flows, want %d", len(got), len(want))
	}
	w.a.open(a, 3100, 3150)
	w.change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID, f.MovingTo = "b", "pod of b", "" })
	move()
	testkit.Eventually(t, 10*time.Second, "the last flows", func() error {
		if got := len(w.b.all()); got != len(want)+50 {
			return fmt.Errorf("%d, want %d", got, len(want)+50)
		}
		return nil
	})
	w.a.counted(t, sent, "done", 1)
	w.b.counted(t, received, "done", 1)
	for _, n := range []struct {
		*fakeNode
		side string
	}{{w.a, sent}, {w.b, received}} {
		if got := testutil.ToFloat64(n.metrics.flows.WithLabelValues(n.side)); got != 3150 {
			t.Errorf("%v flows are %s, want 3150", got, n.side)
		}
	}
	w.a.table.mu.Lock()
	if !slices.Equal(w.a.straggling, a.Addrs()) {
		t.Errorf("the router of before may send from %v", w.a.straggling)
	}
	w.a.table.mu.Unlock()
	testkit.Eventually(t, 10*time.Second, "the router of before has no flows", func() error {
		if n := len(w.a.all()); n > 0 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
}

// A program that ends hands an address over that is to move nowhere, to the node that takes it. The watch knows a moment later that it has.
func TestHolderLeaves(t *testing.T) {
	w := newWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 10)
	w.change("p-0", func(f *v2.Floating) { f.MovingTo = "" })
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	w.a.open(a, 10, 20)
	move()
	w.change("p-0", func(f *v2.Floating) { f.Holding.Holder = "" })
	w.change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID = "b", "pod of b" })
	testkit.Eventually(t, 10*time.Second, "the next router has all flows", func() error {
		if n := len(w.b.all()); n != 20 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	w.b.counted(t, received, "done", 1)
}

// An address that doesn't move after all stays as it is.
func TestMoveIsUndone(t *testing.T) {
	w := newWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 10)
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	w.change("p-0", func(f *v2.Floating) { f.MovingTo = "" })
	move()
	w.a.counted(t, sent, "done", 1)
	w.b.counted(t, received, "done", 1)
	w.a.Finish()
	if n := len(w.a.all()); n != 10 {
		t.Errorf("the router has %d flows, want 10", n)
	}
	if len(w.a.straggling) > 0 {
		t.Errorf("the router may send from %v", w.a.straggling)
	}
}

func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*world)
		want   string
	}{
		"not the holder":     {func(w *world) { w.change("p-0", func(f *v2.Floating) { f.Holding.Holder = "c" }) }, `its holder is "c"`},
		"moving elsewhere":   {func(w *world) { w.change("p-0", func(f *v2.Floating) { f.MovingTo = "c" }) }, `it moves to "c"`},
		"the receiver's own": {func(w *world) { w.change("p-0", func(f *v2.Floating) { f.Holding.Holder = "b" }) }, `its holder is "b"`},
		"no pod":             {func(w *world) { w.change("p-0", func(f *v2.Floating) { f.Successors[0].PodUID = "" }) }, "no pod of node b"},
		"no successor":       {func(w *world) { w.change("p-0", func(f *v2.Floating) { f.Successors = f.Successors[1:] }) }, "no pod of node b"},
		"released": {func(w *world) {
			w.change("p-0", func(f *v2.Floating) { f.ReleasedAt = new(w.blocks["p-0"].CreationTimestamp) })
		}, `it moves to ""`},
		"another UID":           {func(w *world) { w.blocks["p-0"].UID = "another" }, "no AddressBlock"},
		"unknown to the API":    {func(w *world) { delete(w.blocks, "p-0") }, "no AddressBlock"},
		"of a pod that is gone": {func(w *world) { w.change("p-0", func(f *v2.Floating) { f.Successors[0].PodUID = "gone" }) }, "no pod gone"},
		"more than fits":        {func(w *world) { w.b.limits.bytes = 1000 }, "there is room for 1000 bytes"},
		"the table is full":     {func(w *world) { w.b.fails = errFull }, errFull.Error()},
		"flows of another address": {func(w *world) {
			w.block("p-1", "198.51.100.8", "2001:db8::8")
			w.a.cfg.Dial = w.offering("p-1")
		}, "isn't of the address"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.address("p-0", "a")
			w.a.open(a, 0, 2000)
			w.b.set(func() { c.change(w) })
			s := &sending{h: w.a.Handover, address: a, node: "b", known: map[key]byte{}}
			err := s.prepare(t.Context())
			s.close()
			testkit.Eventually(t, 10*time.Second, "the receiver has ended", func() error {
				if testutil.ToFloat64(w.b.metrics.results.WithLabelValues(received, "refused"))+testutil.ToFloat64(w.b.metrics.results.WithLabelValues(received, "failed")) != 1 {
					return io.ErrNoProgress
				}
				return nil
			})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, want %q", err, c.want)
			}
			if n := len(w.b.all()); w.b.fails == nil && w.b.limits.bytes > 1000 && n > 0 {
				t.Errorf("%d flows are taken", n)
			}
			w.a.Move(t.Context(), a, "b") // which says so, and returns
			w.a.counted(t, sent, "refused", 1)
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
	err := writeFrame(s.Conn, offer, s.offer)
	s.offer = nil
	return len(b), err
}

// Nothing that the other end does, or doesn't, takes longer than it may.
func TestOtherEndHangs(t *testing.T) {
	for name, accept := range map[string]func(context.Context, string, net.Conn){
		"silent": func(ctx context.Context, _ string, _ net.Conn) { <-ctx.Done() },
		"gone":   func(_ context.Context, _ string, c net.Conn) { _ = c.Close() },
		"silent after the offer": func(ctx context.Context, _ string, c net.Conn) {
			_ = writeFrame(c, ready, []byte("{}"))
			<-ctx.Done()
		},
		"nonsense": func(ctx context.Context, _ string, c net.Conn) {
			_, _ = c.Write(bytes.Repeat([]byte{0xff}, 100))
			<-ctx.Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.b.set(func() { w.b.accept = accept })
			a := w.address("p-0", "a")
			w.a.open(a, 0, 60000)
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
			w.a.counted(t, sent, "failed", 1)
			if n := len(w.a.slots); n > 0 {
				t.Errorf("%d hand-overs go on", n)
			}
		})
	}
	t.Run("a sender", func(t *testing.T) {
		w := newWorld(t)
		w.b.set(func() { w.b.limits.total, w.b.limits.late = 100*time.Millisecond, 0 })
		conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
		defer conn.Close()
		w.b.counted(t, received, "failed", 1)
	})
}

// Many addresses of a router are handed over at once: the table isn't read for each.
func TestManyAddresses(t *testing.T) {
	const n = 300
	w := newWorld(t)
	w.a.reading = func(int) { time.Sleep(20 * time.Millisecond) } // it takes long
	w.a.limits.late = 50 * time.Millisecond                       // until one gives its place to the next
	moved, move := context.WithCancel(t.Context())
	var moves sync.WaitGroup
	for i := range n {
		name := fmt.Sprint("p-", i)
		w.block(name, fmt.Sprintf("198.51.%d.%d", i/256, i%256), fmt.Sprintf("2001:db8::%x", i))
		a := w.address(name, "a")
		testkit.Must(w.a.put([]conntrack.Flow{flow(a, 2*i)}, false))(t)
		moves.Go(func() { w.a.Move(moved, a, "b") })
	}
	moves.Wait()
	move()
	if got := w.b.all(); len(got) != n {
		t.Errorf("%d flows are copied, want %d", len(got), n)
	}
	w.a.table.mu.Lock()
	defer w.a.table.mu.Unlock()
	if w.a.reads > n/4 {
		t.Errorf("the table was read %d times for %d addresses", w.a.reads, n)
	}
}

// The table keeps an order of addresses within a frame, and refuses all else.
func TestFrames(t *testing.T) {
	w := newWorld(t)
	a := w.address("p-0", "a")
	var want []conntrack.Flow
	var b []byte
	for i := range flowsPerFrame {
		want = append(want, flow(a, i))
		b = appendFlow(b, want[i])
	}
	if len(b) > mostPayload {
		t.Fatalf("a frame has %d bytes", len(b))
	}
	if got, err := parseFlows(b); err != nil || !slices.Equal(got, want) {
		t.Fatalf("%d flows, %v, want %d", len(got), err, len(want))
	}
	for name, bad := range map[string][]byte{
		"too many": appendFlow(slices.Clone(b), want[0]), "cut off": b[:len(b)-1], "one byte": {6}, "another version": append([]byte{6, 5}, b...),
	} {
		if _, err := parseFlows(bad); err == nil {
			t.Errorf("%s is taken", name)
		}
	}
	var buffer []byte
	for name, bad := range map[string][]byte{"empty": {0, 0, 0, 0, 1}, "too long": {0, 1, 0, 2, 1}, "cut off": {0, 0, 0, 5, 1, 1}} {
		if _, _, err := readFrame(bytes.NewReader(bad), &buffer); err == nil {
			t.Errorf("a frame that is %s is taken", name)
		}
	}
}

// Whatever comes, frames are read without a panic and in bounded memory, and flows that are understood are those that were written.
func FuzzFrames(f *testing.F) {
	a := floating.Address{Address: ipam.Address{IPv4: netip.MustParseAddr("198.51.100.7"), IPv6: netip.MustParseAddr("2001:db8::7")}}
	var b bytes.Buffer
	_ = writeFrame(&b, opened, appendFlow(appendFlow(nil, flow(a, 1)), flow(a, 2)))
	f.Add(b.Bytes())
	f.Add([]byte{0, 0, 0, 1, 4})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		var buffer []byte
		for {
			_, payload, err := readFrame(r, &buffer)
			if cap(buffer) > mostPayload {
				t.Fatalf("the buffer has %d bytes", cap(buffer))
			}
			if err != nil {
				return
			}
			flows, err := parseFlows(payload)
			if err != nil {
				continue
			}
			var again []byte
			for _, f := range flows {
				again = appendFlow(again, f)
			}
			if back, err := parseFlows(again); err != nil || !slices.Equal(back, flows) {
				t.Fatalf("%v is %v after it was written, %v", flows, back, err)
			}
		}
	})
}

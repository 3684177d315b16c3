package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
)

// The flows that are there are copied, and those that begin; those that end vanish. What the follower had of the address vanishes, too.
func TestStandby(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 2000)
	w.b.open(a, 1990, 2010)
	e := w.subscription(w.a, 0)
	w.keeps("all flows")
	w.inStep("")
	w.a.begins(e, a, 2000, 2100)
	w.a.ends(e, a, 0, 100)
	w.keeps("what began and ended")
	again := flow(a, 150) // its ports are another connection's at once
	w.a.ends(e, a, 150, 151)
	again.Mark = 77
	w.a.table.mu.Lock()
	w.a.table.flows[keyOf(again)] = again
	w.a.table.mu.Unlock()
	e.tell(conntrack.Event{Flow: again})
	w.keeps("what ended and began")

	w.block("p-1", "198.51.100.8", "2001:db8::8")
	e.tell(conntrack.Event{Flow: flow(w.address("p-1", "a"), 3000)})
	w.a.begins(e, a, 3000, 3001)
	w.keeps("no flow of another address")
	if got := testutil.ToFloat64(w.b.standby.metrics.flows.WithLabelValues(sideReceived, "opened")); got != 2000-10+100+1+1 {
		t.Errorf("%v flows were received", got)
	}
	if n := testutil.ToFloat64(w.a.standby.metrics.restarts.WithLabelValues("connection")); n > 0 {
		t.Errorf("%v connections ended", n)
	}
}

// A flow that is shorter than a turn is never sent.
func TestShortFlows(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	e := w.subscription(w.a, 0)
	w.inStep("")
	for i := range 100 {
		e.tell(conntrack.Event{Flow: flow(a, i)}, conntrack.Event{Flow: flow(a, i), Over: true})
	}
	w.a.begins(e, a, 100, 101)
	w.keeps("the one that lasts")
	if got := testutil.ToFloat64(w.a.standby.metrics.flows.WithLabelValues(sideSent, "opened")); got != 1 {
		t.Errorf("%v flows were sent, want 1", got)
	}
	if got := testutil.ToFloat64(w.a.standby.metrics.flows.WithLabelValues(sideSent, "ended")); got != 0 {
		t.Errorf("the end of %v flows was sent", got)
	}
}

// When the follower becomes the holder, what it has of the address stays, whatever the holder of before still sends.
func TestFollowerTakes(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 100)
	e := w.subscription(w.a, 0)
	w.keeps("all flows")
	w.mu.Lock()
	before := w.blocks["p-0"]
	w.mu.Unlock()
	take := func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID = "b", "pod of b" }
	w.change("p-0", take)
	w.mu.Lock()
	after := w.blocks["p-0"]
	w.mu.Unlock()
	w.b.standby.Changed(before, after) // the holder of before doesn't see it
	w.a.ends(e, a, 0, 50)
	w.inStep(`its holder is "b"`)
	if n := len(w.b.all()); n != 100 {
		t.Errorf("the next holder has %d flows, want 100", n)
	}
	w.a.standby.Changed(before, after)
	if _, ok := w.a.standby.State("p-0"); ok {
		t.Error("the holder of before goes on")
	}
	select {
	case <-e.closed:
	case <-time.After(testkit.Timeout(10 * time.Second)):
		t.Error("the flows of a router that has no address are followed")
	}
}

// Flows that are kept for another node are forgotten when they are copied elsewhere, and stay while no node has the address.
func TestFollowerChanges(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v2.Floating)
		stays  bool
	}{
		"another follower": {func(f *v2.Floating) {
			f.Successors = append([]v2.FloatingNode{{Node: "c", PodUID: "pod of c"}}, f.Successors...)
		}, false},
		"another holder": {func(f *v2.Floating) { f.Holding.Holder = "c" }, true}, // that copies them here
		"another of both": {func(f *v2.Floating) {
			f.Holding.Holder, f.Successors = "c", []v2.FloatingNode{{Node: "c"}, {Node: "a", PodUID: "pod of a"}, {Node: "b", PodUID: "pod of b"}}
		}, false},
		"no holder":      {func(f *v2.Floating) { f.Holding.Holder = "" }, true},
		"a move to it":   {func(f *v2.Floating) { f.MovingTo = "b" }, true},
		"a move past it": {func(f *v2.Floating) { f.MovingTo = "c" }, false},
		"no standby":     {func(f *v2.Floating) { f.Standby = false }, false},
		"it is released": {func(f *v2.Floating) { f.ReleasedAt = &metav1.Time{} }, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newStandbyWorld(t)
			w.a.open(w.address("p-0", "a"), 0, 100)
			w.keeps("all flows")
			w.standby(c.change)
			if !c.stays {
				testkit.Eventually(t, 10*time.Second, "the flows are forgotten", func() error {
					if n := len(w.b.all()); n > 0 {
						return fmt.Errorf("%d are left", n)
					}
					return nil
				})
			}
			w.b.Finish()
			if n := len(w.b.all()); c.stays && n != 100 {
				t.Errorf("%d flows are left, want 100", n)
			}
		})
	}
	t.Run("of an earlier life", func(t *testing.T) {
		w := newWorld(t)
		w.b.open(w.address("p-0", "a"), 0, 100)
		w.standby(func(f *v2.Floating) {
			f.Standby, f.MovingTo = true, ""
			f.Successors = append([]v2.FloatingNode{{Node: "c", PodUID: "pod of c"}}, f.Successors...)
		})
		w.b.standby.PodsChanged()
		w.b.Finish()
		if n := len(w.b.all()); n > 0 {
			t.Errorf("%d flows are left", n)
		}
	})
}

// The connection breaks in the middle: what changed meanwhile is made up for.
func TestStandbyIsCutOff(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 1000)
	e := w.subscription(w.a, 0)
	w.keeps("all flows")
	for cut := range 3 {
		w.cut(true)
		w.inStep("there is no connection")
		w.a.begins(e, a, 1000+10*cut, 1010+10*cut)
		w.a.ends(e, a, 10*cut, 10*cut+10)
		w.cut(false)
		w.keeps("all flows after a cut")
		w.inStep("")
	}
	if n := testutil.ToFloat64(w.a.standby.metrics.restarts.WithLabelValues("connection")); n < 3 {
		t.Errorf("%v connections ended, want 3 or more", n)
	}
}

// cut ends all connections to b, and lets none be opened, or undoes that.
func (w *world) cut(off bool) {
	w.wire.Lock()
	defer w.wire.Unlock()
	w.off = off
	for _, c := range w.conns {
		_ = c.Close()
	}
	w.conns = nil
}

// When the kernel has lost events, or can't be heard, all flows are sent anew: none is missing, and none is left.
func TestLostEvents(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 100)
	e := w.subscription(w.a, 0)
	w.keeps("all flows")
	w.a.open(a, 100, 200)
	w.a.close(a, 0, 50)
	e.calls <- func(_ func(netip.Addr) bool, _ func(conntrack.Event), lost func()) error {
		lost()
		return nil
	}
	w.keeps("all flows after events were lost")
	w.a.close(a, 50, 60)
	w.a.table.mu.Lock()
	w.a.table.subscribing = errors.New("no sockets")
	w.a.table.mu.Unlock()
	e.calls <- func(func(netip.Addr) bool, func(conntrack.Event), func()) error {
		return errors.New("the socket is broken")
	}
	w.inStep("changes of connections were lost")
	w.a.table.mu.Lock()
	w.a.table.subscribing = nil
	w.a.table.mu.Unlock()
	w.keeps("all flows after the subscription ended")
	w.inStep("")
}

// All flows are sent anew from time to time: the follower has them for as long as they live, and no others.
func TestStandbyRepeats(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.a.open(a, 0, 100)
	w.keeps("all flows")
	w.a.close(a, 0, 10) // as if the kernel told nothing
	w.b.close(a, 10, 20)
	st := w.a.stream("b")
	st.mu.Lock()
	st.all["p-0"].whole = time.Now().Add(-2 * time.Hour)
	st.mu.Unlock()
	w.keeps("all flows later")
	w.inStep("")
}

// Connections that come with the address, in the last moment of a move, are copied on.
func TestStandbyAfterMove(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.keeps("no flows")
	w.inStep("")
	w.a.open(a, 0, 10)
	w.a.standby.again("p-0")
	w.a.standby.again("another")
	w.keeps("what came")
	w.inStep("")
}

// A node that has handed an address over to the one that followed it follows that one. It keeps the connections, and none of the last moment is lost.
func TestStandbyTurns(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.address("p-0", "a")
	w.a.set(func() { w.a.limits.late = testkit.Timeout(5 * time.Second) })
	w.b.cfg.Dial = func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", w.a.listener.Addr().String())
	}
	w.a.open(a, 0, 100)
	w.subscription(w.a, 0)
	w.keeps("all flows")
	w.standby(func(f *v2.Floating) { f.MovingTo = "b" })
	moved, move := context.WithCancel(t.Context())
	w.a.Move(moved, a, "b")
	w.a.open(a, 100, 110)
	w.standby(func(f *v2.Floating) {
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
		if !ok || !state.Since.IsZero() || w.a.moves(a.ID) {
			return fmt.Errorf("%+v, %t", state, ok)
		}
		return nil
	})
	w.a.Finish() // it would have forgotten them by now
	for _, n := range []*fakeNode{w.a, w.b} {
		if got := len(n.all()); got != 110 {
			t.Errorf("node %s has %d flows, want 110", n.cfg.Node, got)
		}
	}
}

// A subscription keeps a router's network namespace: it ends when the router is about to go.
func TestRouterGoes(t *testing.T) {
	w := newStandbyWorld(t)
	e := w.subscription(w.a, 0)
	w.inStep("")
	w.a.cfg.Here = func(types.UID) bool { return false }
	w.a.standby.PodsChanged()
	select {
	case <-e.closed:
	case <-time.After(testkit.Timeout(10 * time.Second)):
		t.Error("the router is followed still")
	}
	if st := w.a.stream("b"); st != nil {
		t.Error("there is still a stream")
	}
}

// stream is the stream to a node.
func (n *fakeNode) stream(node string) *stream {
	n.standby.mu.Lock()
	defer n.standby.mu.Unlock()
	return n.standby.streams[node]
}

// A follower that takes nothing stops nobody, and takes no memory without a bound. When it works again it has all flows.
func TestSlowFollower(t *testing.T) {
	w := newWorld(t)
	stuck := make(chan struct{})
	w.b.set(func() {
		accept := w.b.accept
		w.b.accept = func(ctx context.Context, from string, conn net.Conn) {
			select {
			case <-stuck:
			case <-ctx.Done():
			}
			accept(ctx, from, conn)
		}
	})
	w.a.standby.limits.waiting, w.a.standby.limits.turn = 1000, 10*time.Millisecond
	w.a.standby.limits.retry = 10 * time.Millisecond
	w.standby(func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
	a := w.address("p-0", "a")
	e := w.subscription(w.a, 0)
	for i := range 20 {
		w.a.begins(e, a, 1000*i, 1000*i+1000) // whoever is stuck
		st := w.a.stream("b")
		st.mu.Lock()
		waiting := len(st.young) + len(st.due) + len(st.over)
		st.mu.Unlock()
		if waiting > 1001 {
			t.Fatalf("%d flows wait", waiting)
		}
	}
	close(stuck)
	w.keeps("all flows at last")
	w.inStep("")
	if n := testutil.ToFloat64(w.a.standby.metrics.restarts.WithLabelValues("overflow")); n == 0 {
		t.Error("no overflow is counted")
	}
}

// A router has room for its own connections, however many are copied to it.
func TestFollowerIsFull(t *testing.T) {
	w := newStandbyWorld(t)
	w.b.table.mu.Lock()
	w.b.table.limit = 400
	w.b.table.mu.Unlock()
	a := w.address("p-0", "a")
	e := w.subscription(w.a, 0)
	w.a.begins(e, a, 0, 1000)
	w.inStep("the router tracks")
	if n := len(w.b.all()); n > 300 {
		t.Errorf("the follower has %d flows, want 300 at most", n)
	}
	if n := testutil.ToFloat64(w.b.standby.metrics.full); n == 0 {
		t.Error("nothing is counted")
	}
	w.a.ends(e, a, 200, 1000)
	w.keeps("all flows when there is room")
	w.inStep("")
}

// What isn't as it should be is refused.
func TestFollowRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*v2.Floating)
		want   string
	}{
		"not the holder":  {func(f *v2.Floating) { f.Holding.Holder = "c" }, `its holder is "c"`},
		"not first":       {func(f *v2.Floating) { f.Successors[0].Node = "c" }, `are copied to "c"`},
		"no standby":      {func(f *v2.Floating) { f.Standby = false }, `are copied to ""`},
		"no pod":          {func(f *v2.Floating) { f.Successors[0].PodUID = "" }, "no pod of node b"},
		"a pod elsewhere": {func(f *v2.Floating) { f.Successors[0].PodUID = "gone" }, "no pod gone"},
		"moving":          {func(f *v2.Floating) { f.MovingTo = "b" }, `are copied to ""`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.change("p-0", func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
			w.change("p-0", c.change)
			a := w.address("p-0", "a")
			conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
			defer conn.Close()
			x := &exchange{st: &stream{s: w.a.standby}, ctx: t.Context(), conn: conn}
			testkit.Check(t, x.write(follow, nil))
			testkit.Must(x.whole(lead{Address: a}, found{a.IPv4: {flow(a, 2)}, a.IPv6: {flow(a, 3)}}))(t)
			got := testkit.Must(x.answer())(t)
			if !strings.Contains(got.Refused["p-0"], c.want) || got.Taken > 0 || len(w.b.all()) > 0 {
				t.Errorf("the answer is %+v, want %q; %d flows were taken", got, c.want, len(w.b.all()))
			}
		})
	}
	t.Run("nonsense", func(t *testing.T) {
		for _, k := range []kind{ready, opened, begin, 99} {
			w := newWorld(t)
			conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
			x := &exchange{st: &stream{s: w.a.standby}, ctx: t.Context(), conn: conn}
			testkit.Check(t, x.write(follow, nil), x.write(k, []byte{1, 2, 3}))
			if _, err := x.answer(); err == nil {
				t.Errorf("kind %d is taken", k)
			}
			_ = conn.Close()
		}
	})
}

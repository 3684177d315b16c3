package standby

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
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// The flows that are there are copied, and those that begin; those that end vanish. What the follower had of the address vanishes, too.
func TestStandby(t *testing.T) {
	w := newStandbyWorld(t, flows(2000), func(w *world) { w.b.Add(w.Address("p-0", "a"), 1990, 2010) })
	a := w.Address("p-0", "a")
	e := w.a.Subscription(t, 0)
	w.Kept("all flows")
	w.inStep("")
	e.Begin(a, 2000, 2100)
	e.End(a, 0, 100)
	w.Kept("what began and ended")
	again := floatingtest.Flow(a, 150) // its ports are another connection's at once
	e.End(a, 150, 151)
	again.Mark = 77
	w.a.Set(again)
	e.Tell(conntrack.Event{Flow: again})
	w.Kept("what ended and began")

	w.Block("p-1", "198.51.100.8", "2001:db8::8")
	e.Tell(conntrack.Event{Flow: floatingtest.Flow(w.Address("p-1", "a"), 3000)})
	e.Begin(a, 3000, 3001)
	w.Kept("no flow of another address")
	if got := testutil.ToFloat64(w.b.metrics.flows.WithLabelValues(sideReceived, "opened")); got != 2000-10+100+1+1 {
		t.Errorf("%v flows were received", got)
	}
	if n := testutil.ToFloat64(w.a.metrics.restarts.WithLabelValues("connection")); n > 0 {
		t.Errorf("%v connections ended", n)
	}
}

// A flow that is shorter than a turn is never sent.
func TestShortFlows(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.Address("p-0", "a")
	e := w.a.Subscription(t, 0)
	w.inStep("")
	for i := range 100 {
		e.Tell(conntrack.Event{Flow: floatingtest.Flow(a, i)}, conntrack.Event{Flow: floatingtest.Flow(a, i), Over: true})
	}
	e.Begin(a, 100, 101)
	w.Kept("the one that lasts")
	if got := testutil.ToFloat64(w.a.metrics.flows.WithLabelValues(sideSent, "opened")); got != 1 {
		t.Errorf("%v flows were sent, want 1", got)
	}
	if got := testutil.ToFloat64(w.a.metrics.flows.WithLabelValues(sideSent, "ended")); got != 0 {
		t.Errorf("the end of %v flows was sent", got)
	}
}

// When the follower becomes the holder, what it has of the address stays, whatever the holder of before still sends.
func TestFollowerTakes(t *testing.T) {
	w := newStandbyWorld(t, flows(100))
	a := w.Address("p-0", "a")
	e := w.a.Subscription(t, 0)
	w.Kept("all flows")
	take := func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID = "b", "pod of b" }
	before, after := w.Change("p-0", take)
	w.b.Changed(before, after) // the holder of before doesn't see it
	e.End(a, 0, 50)
	w.inStep(`its holder is "b"`)
	if n := len(w.b.All()); n != 100 {
		t.Errorf("the next holder has %d flows, want 100", n)
	}
	w.a.Changed(before, after)
	if _, ok := w.a.State("p-0"); ok {
		t.Error("the holder of before goes on")
	}
	select {
	case <-e.Closed:
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
			w := newStandbyWorld(t, flows(100))
			w.Kept("all flows")
			w.change(c.change)
			if !c.stays {
				testkit.Eventually(t, 10*time.Second, "the flows are forgotten", func() error {
					if n := len(w.b.All()); n > 0 {
						return fmt.Errorf("%d are left", n)
					}
					return nil
				})
			}
			w.b.Finish()
			if n := len(w.b.All()); c.stays && n != 100 {
				t.Errorf("%d flows are left, want 100", n)
			}
		})
	}
}

// The connection breaks in the middle: what changed meanwhile is made up for.
func TestStandbyIsCutOff(t *testing.T) {
	w := newStandbyWorld(t, flows(1000))
	a := w.Address("p-0", "a")
	e := w.a.Subscription(t, 0)
	w.Kept("all flows")
	for cut := range 3 {
		w.B.Cut(true)
		w.inStep("there is no connection")
		e.Begin(a, 1000+10*cut, 1010+10*cut)
		e.End(a, 10*cut, 10*cut+10)
		w.B.Cut(false)
		w.Kept("all flows after a cut")
		w.inStep("")
	}
	if n := testutil.ToFloat64(w.a.metrics.restarts.WithLabelValues("connection")); n < 3 {
		t.Errorf("%v connections ended, want 3 or more", n)
	}
}

// When the kernel has lost events, or can't be heard, all flows are sent anew: none is missing, and none is left.
func TestLostEvents(t *testing.T) {
	w := newStandbyWorld(t, flows(100))
	a := w.Address("p-0", "a")
	e := w.a.Subscription(t, 0)
	w.Kept("all flows")
	w.a.Add(a, 100, 200)
	w.a.Remove(a, 0, 50)
	e.Calls <- func(_ func(netip.Addr) bool, _ func(conntrack.Event), lost func()) error {
		lost()
		return nil
	}
	w.Kept("all flows after events were lost")
	w.a.Remove(a, 50, 60)
	w.a.Fail(func(f *floatingtest.Faults) { f.Subscribe = errors.New("no sockets") })
	e.Calls <- func(func(netip.Addr) bool, func(conntrack.Event), func()) error {
		return errors.New("the socket is broken")
	}
	w.inStep("changes of connections were lost")
	w.a.Fail(func(f *floatingtest.Faults) { f.Subscribe = nil })
	w.Kept("all flows after the subscription ended")
	w.inStep("")
}

// All flows are sent anew from time to time: the follower has them for as long as they live, and no others.
func TestStandbyRepeats(t *testing.T) {
	w := newStandbyWorld(t, flows(100))
	a := w.Address("p-0", "a")
	w.Kept("all flows")
	w.a.Remove(a, 0, 10) // as if the kernel told nothing
	w.b.Remove(a, 10, 20)
	st := w.a.stream("b")
	st.mu.Lock()
	st.all["p-0"].whole = time.Now().Add(-2 * time.Hour)
	st.mu.Unlock()
	w.Kept("all flows later")
	w.inStep("")
}

// Connections that come with the address, in the last moment of a move, are copied on.
func TestStandbyAfterMove(t *testing.T) {
	w := newStandbyWorld(t)
	a := w.Address("p-0", "a")
	w.Kept("no flows")
	w.inStep("")
	w.a.Add(a, 0, 10)
	w.a.Again("p-0")
	w.a.Again("another")
	w.Kept("what came")
	w.inStep("")
}

// A subscription keeps a router's network namespace: it ends when the router is about to go.
func TestRouterGoes(t *testing.T) {
	w := newStandbyWorld(t)
	e := w.a.Subscription(t, 0)
	w.inStep("")
	w.a.cfg.Here = func(types.UID) bool { return false }
	w.a.PodsChanged()
	select {
	case <-e.Closed:
	case <-time.After(testkit.Timeout(10 * time.Second)):
		t.Error("the router is followed still")
	}
	if st := w.a.stream("b"); st != nil {
		t.Error("there is still a stream")
	}
}

// A follower that takes nothing stops nobody, and takes no memory without a bound. When it works again it has all flows.
func TestSlowFollower(t *testing.T) {
	w := newWorld(t)
	stuck := make(chan struct{})
	w.b.AcceptBy(func(accept floatingtest.Accept) floatingtest.Accept {
		return func(ctx context.Context, from string, conn net.Conn) {
			select {
			case <-stuck:
			case <-ctx.Done():
			}
			accept(ctx, from, conn)
		}
	})
	w.a.limits.waiting, w.a.limits.turn = 1000, 10*time.Millisecond
	w.a.limits.retry = 10 * time.Millisecond
	w.change(func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
	a := w.Address("p-0", "a")
	e := w.a.Subscription(t, 0)
	for i := range 20 {
		e.Begin(a, 1000*i, 1000*i+1000) // whoever is stuck
		st := w.a.stream("b")
		st.mu.Lock()
		waiting := len(st.young) + len(st.due) + len(st.over)
		st.mu.Unlock()
		if waiting > 1001 {
			t.Fatalf("%d flows wait", waiting)
		}
	}
	close(stuck)
	w.Kept("all flows at last")
	w.inStep("")
	if n := testutil.ToFloat64(w.a.metrics.restarts.WithLabelValues("overflow")); n == 0 {
		t.Error("no overflow is counted")
	}
}

// A router has room for its own connections, however many are copied to it.
func TestFollowerIsFull(t *testing.T) {
	w := newStandbyWorld(t)
	w.b.Fail(func(f *floatingtest.Faults) { f.Limit = 400 })
	a := w.Address("p-0", "a")
	e := w.a.Subscription(t, 0)
	e.Begin(a, 0, 1000)
	w.inStep("the router tracks")
	if n := len(w.b.All()); n > 300 {
		t.Errorf("the follower has %d flows, want 300 at most", n)
	}
	if n := testutil.ToFloat64(w.b.metrics.full); n == 0 {
		t.Error("nothing is counted")
	}
	e.End(a, 200, 1000)
	w.Kept("all flows when there is room")
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
			w.Change("p-0", func(f *v2.Floating) { f.Standby, f.MovingTo = true, "" })
			w.Change("p-0", c.change)
			a := w.Address("p-0", "a")
			conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
			defer conn.Close()
			x := &exchange{st: &stream{s: w.a.Standby}, ctx: t.Context(), conn: conn}
			testkit.Check(t, x.write(frames.Follow, nil))
			testkit.Must(x.whole(lead{Address: a}, tables.Found{a.IPv4: {floatingtest.Flow(a, 2)}, a.IPv6: {floatingtest.Flow(a, 3)}}))(t)
			got := testkit.Must(x.answer())(t)
			if !strings.Contains(got.Refused["p-0"], c.want) || got.Taken > 0 || len(w.b.All()) > 0 {
				t.Errorf("the answer is %+v, want %q; %d flows were taken", got, c.want, len(w.b.All()))
			}
		})
	}
	t.Run("nonsense", func(t *testing.T) {
		for _, k := range []frames.Kind{frames.Ready, frames.Opened, frames.Begin, 99} {
			w := newWorld(t)
			conn := testkit.Must(w.a.cfg.Dial(t.Context(), "b"))(t)
			x := &exchange{st: &stream{s: w.a.Standby}, ctx: t.Context(), conn: conn}
			testkit.Check(t, x.write(frames.Follow, nil), x.write(k, []byte{1, 2, 3}))
			if _, err := x.answer(); err == nil {
				t.Errorf("kind %d is taken", k)
			}
			_ = conn.Close()
		}
	})
}

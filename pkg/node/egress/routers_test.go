package egress

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// direct makes Egress net/a one with routers, as "10.1.1.1 live, ...".
func (w *world) direct(routers string) {
	w.egress("a", "10.96.0.1", "192.0.2.0/24").Spec.Peering = v2.EgressPeeringDirect
	w.routers["net/a"] = nil
	for text := range strings.SplitSeq(routers, ", ") {
		if addr, state, ok := strings.Cut(text, " "); ok {
			w.routers["net/a"] = append(w.routers["net/a"], client.Router{
				Addr: netip.MustParseAddr(addr), State: map[string]client.RouterState{"live": client.RouterLive, "draining": client.RouterDraining}[state],
			})
		}
	}
}

func (w *world) silence(silent bool, routers ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range routers {
		w.silent[netip.MustParseAddr(r)] = silent
	}
}

// asking is running, and asks routers, too.
func asking(t *testing.T, m *Manager) (stop func()) {
	stopAsking := testkit.Background(t.Context(), t, func(ctx context.Context) error { return m.health().Run(ctx, m) })
	stopLoop := running(t, m)
	return func() {
		stopAsking()
		stopLoop()
	}
}

// clients adds pods that use Egress net/a.
func (w *world) clients(t *testing.T, m *Manager, pods ...string) {
	t.Helper()
	for _, p := range pods {
		w.mu.Lock()
		w.pod(p, "a")
		w.mu.Unlock()
		if err := w.add(t, m, p); err != nil {
			t.Fatal(err)
		}
	}
}

// after lets time pass, and compares what pod p has.
func (w *world) after(t *testing.T, d time.Duration, what, want string) {
	t.Helper()
	time.Sleep(d)
	synctest.Wait()
	if got := w.has("p"); got != want {
		t.Errorf("%s: p has %q, want %q", what, got, want)
	}
}

const (
	both   = "192.0.2.0/24 [10.1.1.1 10.1.1.2]"
	second = "192.0.2.0/24 [10.1.1.2]"
	none   = "192.0.2.0/24 nowhere"
)

func TestRoutersDieAndComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "p", "q")
		defer asking(t, m)()
		w.after(t, 10*time.Second, "at first", both)
		if n := w.asked[netip.MustParseAddr("10.1.1.1")]; n < 8 || n > 11 {
			t.Errorf("a router was asked %d times in 10 s by two pods", n)
		}
		w.silence(true, "10.1.1.1")
		w.after(t, 1900*time.Millisecond, "two misses", both)
		w.after(t, 1500*time.Millisecond, "three misses", second)
		if got := w.has("q"); got != second {
			t.Errorf("q has %q", got)
		}
		if err := testutil.GatherAndCompare(m.metrics(), strings.NewReader(`
# HELP coil_egress_node_routers Routers that pods of the node send to directly, by Egress, address family and state: live, draining, dead.
# TYPE coil_egress_node_routers gauge
coil_egress_node_routers{egress="a",family="IPv4",namespace="net",state="dead"} 1
coil_egress_node_routers{egress="a",family="IPv4",namespace="net",state="draining"} 0
coil_egress_node_routers{egress="a",family="IPv4",namespace="net",state="live"} 1
# HELP coil_egress_node_failover_duration_seconds Time from the last answer of a router that died until a pod sends new flows to others.
# TYPE coil_egress_node_failover_duration_seconds histogram
coil_egress_node_failover_duration_seconds_bucket{le="1"} 0
coil_egress_node_failover_duration_seconds_bucket{le="2"} 0
`+buckets(2, 3, 4, 5, 7, 10, 20, 60)+`coil_egress_node_failover_duration_seconds_sum 6
coil_egress_node_failover_duration_seconds_count 2
`), "coil_egress_node_routers", "coil_egress_node_failover_duration_seconds"); err != nil {
			t.Error(err)
		}
		w.silence(true, "10.1.1.2")
		w.after(t, 4*time.Second, "no router answers", none)
		w.silence(false, "10.1.1.1", "10.1.1.2")
		w.after(t, 1900*time.Millisecond, "two answers", none)
		w.after(t, 1500*time.Millisecond, "three answers", both)
		want := []string{
			"a: RouterDead: router 10.1.1.1 doesn't answer: pods of the node send no new flow to it", "a: RouterDead: router 10.1.1.2 doesn't answer: pods of the node send no new flow to it",
		}
		if d := cmp.Diff(want, w.events[:2]); d != "" || len(w.events) != 4 {
			t.Errorf("%d events (-want +got):\n%s", len(w.events), d)
		}
	})
}

// When all become silent, it hardly happens to all in the same moment: none is given the flows of those
// that were first, whether they come back or not.
func TestAllBecomeSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "p")
		defer asking(t, m)()
		w.after(t, 10500*time.Millisecond, "at first", both)
		for range 2 {
			w.silence(true, "10.1.1.1")
			w.after(t, time.Second, "one is silent", both)
			w.silence(true, "10.1.1.2")
			w.after(t, 1900*time.Millisecond, "it has missed three questions, the other one two", both)
			w.silence(false, "10.1.1.1", "10.1.1.2")
			w.after(t, 10*time.Second, "they answer again", both)
		}
		w.silence(true, "10.1.1.1")
		w.after(t, time.Second, "one is silent", both)
		w.silence(true, "10.1.1.2")
		w.after(t, 1600*time.Millisecond, "the other one, too", both)
		w.after(t, 2*time.Second, "both are dead", none)
		// Nor are they given to those that are first to answer again.
		w.silence(false, "10.1.1.1")
		w.after(t, time.Second, "one answers", none)
		w.silence(false, "10.1.1.2")
		w.after(t, 2*time.Second, "it has given three answers, the other one two", "192.0.2.0/24 [10.1.1.1]")
		w.mu.Lock()
		got := w.netns["/p"].Egresses[0].Routers
		w.mu.Unlock()
		if len(got) != 2 || got[1].State != client.RouterDraining {
			t.Errorf("routers %v; want that the second keeps its flows", got)
		}
		w.after(t, time.Second, "both have given three answers", both)
		if len(w.events) != 4 {
			t.Errorf("events: %q", w.events)
		}
	})
}

// A node whose pods send to no router asks nobody, and does so again when one comes.
func TestNobodyToAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		defer asking(t, m)()
		asked := func() int {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.asked[netip.MustParseAddr("10.1.1.1")]
		}
		for round := range 3 {
			before := asked()
			time.Sleep(time.Hour)
			if n := asked() - before; n != 0 {
				t.Errorf("round %d: a router was asked %d times without a client", round, n)
			}
			w.clients(t, m, "p")
			before = asked()
			w.after(t, 10*time.Second, "it came", both)
			if n := asked() - before; n < 8 || n > 11 {
				t.Errorf("round %d: a router was asked %d times in 10 s", round, n)
			}
			w.silence(true, "10.1.1.1")
			w.after(t, 5*time.Second, "a router is silent", second)
			w.silence(false, "10.1.1.1")
			w.after(t, 20*time.Second, "it answers", both)
			if err := m.Forget(t.Context(), sandboxOf("p").ID); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Second)
		}
	})
}

// A network that keeps questions from all routers makes none dead, and a new router that doesn't answer is dead.
func TestRoutersThatNeverAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "p")
		w.silence(true, "10.1.1.1", "10.1.1.2")
		defer asking(t, m)()
		w.after(t, time.Minute, "nobody answers", both)
		w.silence(false, "10.1.1.2")
		w.after(t, 5*time.Second, "one does", second)
	})
}

// Routers drop what a pod sends until they know it: after its address is in the API, seconds after its
// ADD. That they don't answer it is no proof, however many such pods there are.
func TestNewPodsAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "p")
		defer asking(t, m)()
		w.after(t, 10*time.Second, "at first", both)
		unlisted := func(is bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, p := range []string{"/a", "/b", "/c", "/d", "/q", "/r"} {
				w.unlisted[p] = is
			}
		}
		unlisted(true)
		w.clients(t, m, "a", "b", "c", "d", "q", "r")
		w.after(t, time.Minute, "most pods aren't known to routers", both)
		w.silence(true, "10.1.1.1")
		w.after(t, 4*time.Second, "a router is silent", second)
		w.silence(false, "10.1.1.1")
		w.after(t, 4*time.Second, "it answers", both)

		// A death that one pod has proved holds for the others.
		unlisted(false)
		time.Sleep(20 * time.Second)
		if err := m.Forget(t.Context(), sandboxOf("p").ID); err != nil {
			t.Fatal(err)
		}
		w.silence(true, "10.1.1.1")
		time.Sleep(4 * time.Second)
		synctest.Wait()
		if got := w.has("q"); got != second {
			t.Errorf("q has %q", got)
		}
	})
}

// A router that isn't up yet isn't dead, and takes flows as soon as it is ready.
func TestRouterStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 draining")
		w.silence(true, "10.1.1.2")
		m := w.manager(false)
		w.clients(t, m, "p")
		defer asking(t, m)()
		w.after(t, 10*time.Second, "the other one isn't up", "192.0.2.0/24 [10.1.1.1]")
		w.silence(false, "10.1.1.2")
		w.mu.Lock()
		w.direct("10.1.1.1 draining, 10.1.1.2 live")
		w.mu.Unlock()
		m.EgressChanged(types.NamespacedName{Namespace: "net", Name: "a"})
		w.after(t, 500*time.Millisecond, "it is ready", second)
		w.silence(true, "10.1.1.2")
		w.after(t, 10*time.Second, "it has never answered, and the other one does", none)
		if n := len(w.events); n != 1 {
			t.Errorf("%d events: %q, want one of the router that is dead now", n, w.events)
		}
	})
}

// A pod that can't ask, or gets no answer, is no proof.
func TestAnotherPodAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "a", "p")
		defer asking(t, m)()
		w.after(t, 10*time.Second, "at first", both)
		w.mu.Lock()
		w.gone["/a"] = true // its DEL didn't come yet
		before := w.asked[netip.MustParseAddr("10.1.1.1")]
		w.mu.Unlock()
		w.after(t, 5*time.Second, "a pod is gone", both)
		if n := w.asked[netip.MustParseAddr("10.1.1.1")] - before; n < 3 {
			t.Errorf("the other asked %d times in 5 s", n)
		}
		if err := m.Forget(t.Context(), sandboxOf("p").ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Second)
		synctest.Wait()
		m.mu.Lock()
		defer m.mu.Unlock()
		if routers := m.answered("10.1.1.1", "10.1.1.2"); len(m.known) > 0 || len(routers) > 0 {
			t.Errorf("left: %v, %v", m.known, routers)
		}
	})
}

// A living Egress changes its peering, its routers and whom it is for.
func TestPeeringChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		m := w.manager(false)
		w.clients(t, m, "p")
		defer asking(t, m)()
		w.after(t, time.Second, "Service", "192.0.2.0/24 10.96.0.1")
		w.change(m, func() { w.direct("") })
		w.after(t, time.Second, "no router", none)
		w.change(m, func() { w.direct("10.1.1.1 live, 10.1.1.2 live") })
		w.after(t, time.Second, "Direct", both)
		w.change(m, func() { w.direct("10.1.1.1 draining, 10.1.1.2 live") })
		w.after(t, time.Second, "one drains", second)
		if routers := m.answered("10.1.1.1", "10.1.1.2"); len(routers) != 2 {
			t.Errorf("of two routers %v have answered", routers)
		}
		w.change(m, func() {
			w.egresses["net/a"].Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
		})
		w.after(t, time.Second, "not allowed", none)
		w.change(m, func() { w.egress("a", "10.96.0.1", "192.0.2.0/24") })
		w.after(t, time.Second, "Service again", "192.0.2.0/24 10.96.0.1")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if routers := m.answered("10.1.1.1", "10.1.1.2"); len(routers) > 0 {
			t.Errorf("routers are still asked: %v", routers)
		}
	})
}

// The former peering of an Egress is known until no flow goes that way, also if coild
// starts again meanwhile. Nobody asks a Service whether it lives.
func TestPeeringSwitches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		m := w.manager(false)
		w.clients(t, m, "p")
		stop := asking(t, m)
		switched := func(what string, want bool, peers string) {
			t.Helper()
			time.Sleep(12 * time.Second)
			synctest.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			c := w.netns["/p"]
			var tunnels []string
			for _, t := range client.StateOf(c).Tunnels {
				tunnels = append(tunnels, t.Remote.String())
			}
			record := w.records[sandboxOf("p").ID].Egresses
			if got := strings.Join(tunnels, " "); got != peers || c.Egresses[0].Switched != want || len(record) != 1 || record[0].Switched != want {
				t.Errorf("%s: tunnels to %s, switched %t, recorded %+v; want %s, %t", what, got, c.Egresses[0].Switched, record, peers, want)
			}
		}
		switched("at first", false, "10.96.0.1")
		w.flow = netip.MustParseAddr("10.96.0.1")
		w.change(m, func() { w.direct("10.1.1.1 live, 10.1.1.2 live") })
		switched("direct, with a flow by the Service", true, "10.1.1.1 10.1.1.2 10.96.0.1")
		stop()
		m = w.manager(false)
		if err := m.Restore(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		stop = asking(t, m)
		switched("after a restart", true, "10.1.1.1 10.1.1.2 10.96.0.1")
		w.mu.Lock()
		w.flow = netip.Addr{}
		w.mu.Unlock()
		switched("without the flow", false, "10.1.1.1 10.1.1.2")
		w.mu.Lock()
		w.flow = netip.MustParseAddr("10.1.1.2")
		w.mu.Unlock()
		w.change(m, func() {
			w.egresses["net/a"] = w.egresses["net/a"].DeepCopy()
			w.egresses["net/a"].Spec.Peering = v2.EgressPeeringService
		})
		switched("Service, with a flow by a router", true, "10.1.1.1 10.1.1.2 10.96.0.1")
		w.after(t, 0, "Service", "192.0.2.0/24 [10.96.0.1]")
		w.change(m, func() { w.routers["net/a"] = w.routers["net/a"][:1] })
		switched("the router is gone", false, "10.96.0.1")
		w.after(t, 0, "Service", "192.0.2.0/24 10.96.0.1")
		if w.asked[netip.MustParseAddr("10.96.0.1")] > 0 {
			t.Error("the Service was asked")
		}
		stop()
	})
}

// A router that was dead when coild ended gets no new flow from the next one before it has answered it.
func TestDeadAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.direct("10.1.1.1 live, 10.1.1.2 live")
		m := w.manager(false)
		w.clients(t, m, "p", "q")
		stop := asking(t, m)
		w.silence(true, "10.1.1.1")
		w.after(t, 5*time.Second, "it died", second)
		stop()
		m = w.manager(false)
		if err := m.Restore(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		stop = asking(t, m)
		defer func() { stop() }()
		for range 100 {
			w.after(t, 50*time.Millisecond, "after a restart", second)
		}
		w.clients(t, m, "new")
		if got := w.has("new"); got != second {
			t.Errorf("a new pod has %q", got)
		}
		w.silence(false, "10.1.1.1")
		w.after(t, 1900*time.Millisecond, "two answers", second)
		w.after(t, 1500*time.Millisecond, "three answers", both)
		w.silence(true, "10.1.1.1")
		w.after(t, 5*time.Second, "it died again", second)
	})
}

package egress

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestAdd(t *testing.T) {
	refuse := func(e *v2.Egress) {
		e.Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
	}
	for _, c := range []struct {
		name   string
		world  func(w *world)
		pod    string
		says   string // the error; empty is success
		again  bool   // the error is one that passes
		has    string
		events []string
		keeps  int // records
	}{
		{name: "no annotation", pod: "plain", has: "untouched"},
		{name: "one Egress", pod: "a", has: "192.0.2.0/24 10.96.0.1", keeps: 1},
		{name: "an Egress without Service", pod: "b", has: "198.51.100.0/24 nowhere", keeps: 1},
		{name: "two, one without Service", pod: "ab", has: "192.0.2.0/24 10.96.0.1, 198.51.100.0/24 nowhere", keeps: 1},
		{name: "one that isn't there", pod: "lost", says: "Egress net/lost doesn't exist", has: "untouched",
			events: []string{"lost: EgressMissing: Egress net/lost doesn't exist"}},
		{name: "one that isn't there, and the API server is away", pod: "lost", says: "away", again: true, has: "untouched",
			world: func(w *world) { w.down = errors.New("the API server is away") }},
		{name: "a pod that can't be read", pod: "new", says: "away", again: true, has: "untouched",
			world: func(w *world) { w.down = errors.New("the API server is away") }},
		{name: "not allowed", pod: "a", says: "net/a isn't for pods of namespace ns", has: "untouched",
			world:  func(w *world) { refuse(w.egresses["net/a"]) },
			events: []string{"a: EgressNotAllowed: Egress net/a isn't for pods of namespace ns: spec.allowedNamespaces doesn't select its labels"}},
		{name: "allowed", pod: "a", has: "192.0.2.0/24 10.96.0.1", keeps: 1, world: func(w *world) {
			refuse(w.egresses["net/a"])
			w.namespaces["ns"] = &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"team": "red"}}}
		}},
		{name: "the kernel refuses", pod: "a", says: "no such device", has: "untouched",
			world: func(w *world) { w.broken["/a"] = errors.New("no such device") }},
		{name: "the disk is full", pod: "a", says: "written", has: "", // undone
			world: func(w *world) { w.recordErr = store.ErrReadOnly }},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			w.egress("a", "10.96.0.1", "192.0.2.0/24")
			w.egress("b", "", "198.51.100.0/24")
			for pod, annotation := range map[string]string{"plain": "", "a": "a", "b": "b", "ab": "a, b", "lost": "lost,a"} {
				w.pod(pod, annotation)
			}
			if c.world != nil {
				c.world(w)
			}
			m := w.manager(false)
			err := w.add(t, m, c.pod)
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %q", err, c.says)
			}
			if again := errors.Is(err, node.ErrUnavailable); again != c.again {
				t.Errorf("error %v passes: %t", err, again)
			}
			if has := w.has(c.pod); has != c.has {
				t.Errorf("it has %q, want %q", has, c.has)
			}
			if d := cmp.Diff(c.events, w.events); d != "" {
				t.Errorf("events (-want +got):\n%s", d)
			}
			if len(w.records) != c.keeps {
				t.Errorf("records %v, want %d", w.records, c.keeps)
			}
			if known := len(m.known) == 1; known != (err == nil) {
				t.Errorf("the sandbox is known: %t", known)
			}
		})
	}
}

// running runs the loop of a manager in a bubble of synctest.
func running(t *testing.T, m *Manager) (stop func()) {
	return testkit.Background(t.Context(), t, func(ctx context.Context) error { return m.Run(ctx) })
}

func TestLiveChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		w.pod("p", "a")
		w.pod("plain", "")
		m := w.manager(false)
		for _, p := range []string{"p", "plain"} {
			if err := w.add(t, m, p); err != nil {
				t.Fatal(err)
			}
		}
		stop := running(t, m)
		defer func() { stop() }()
		check := func(what, pod, want string) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			if got := w.has(pod); got != want {
				t.Errorf("%s: %s has %q, want %q", what, pod, got, want)
			}
		}
		check("at first", "p", "192.0.2.0/24 10.96.0.1")
		w.change(m, func() { w.egress("a", "10.96.0.1", "192.0.2.0/24", "198.51.100.0/24") })
		check("another destination", "p", "192.0.2.0/24 10.96.0.1, 198.51.100.0/24 10.96.0.1")
		w.change(m, func() { w.egress("a", "10.96.0.9", "192.0.2.0/24") })
		check("another address of the Service", "p", "192.0.2.0/24 10.96.0.9")
		w.change(m, func() { w.egress("a", "", "192.0.2.0/24") })
		check("no Service", "p", "192.0.2.0/24 nowhere")
		w.change(m, func() { delete(w.egresses, "net/a") })
		check("deleted", "p", "192.0.2.0/24 nowhere")

		// The destinations are remembered by the record, too.
		stop()
		m = w.manager(false)
		w.netns = map[string]client.Client{}
		if err := m.Restore(t.Context(), []node.Sandbox{sandboxOf("p"), sandboxOf("plain")}); err != nil {
			t.Fatal(err)
		}
		stop = running(t, m)
		check("deleted, after a restart", "p", "192.0.2.0/24 nowhere")
		check("a pod without annotation", "plain", "untouched")
		w.change(m, func() { w.egress("a", "10.96.0.2", "192.0.2.0/25") })
		check("made again", "p", "192.0.2.0/25 10.96.0.2")

		// Without a status nothing is known of the cluster; with one, that no range concerns the Egress.
		inCluster := func(e *v2.Egress, ranges ...string) {
			e.Generation, e.Status.ObservedGeneration, e.Status.InClusterCIDRs = 1, 1, ranges
		}
		ranges := func(what string, want int) {
			t.Helper()
			check(what, "p", "192.0.2.0/25 10.96.0.2")
			if got := w.netns["/p"].Egresses[0].InCluster; len(got) != want {
				t.Errorf("%s: the ranges %v are spared, want %d", what, got, want)
			}
		}
		w.change(m, func() { inCluster(w.egress("a", "10.96.0.2", "192.0.2.0/25"), "203.0.113.0/24") })
		ranges("a range of the cluster", 1)
		w.change(m, func() { w.egress("a", "10.96.0.2", "192.0.2.0/25") })
		ranges("made again, without status", 1)
		w.change(m, func() { inCluster(w.egress("a", "10.96.0.2", "192.0.2.0/25")) })
		ranges("the range isn't the cluster's any more", 0)

		w.change(m, func() { w.pod("plain", "a,b") })
		check("annotation added", "plain", "192.0.2.0/25 10.96.0.2")
		w.change(m, func() { w.egress("b", "10.96.0.3", "203.0.113.0/24", "192.0.2.0/25") })
		check("the Egress that was missing", "plain", "192.0.2.0/25 10.96.0.2, 203.0.113.0/24 10.96.0.3")
		w.change(m, func() { w.pod("plain", "b") })
		check("annotation changed", "plain", "192.0.2.0/25 10.96.0.3, 203.0.113.0/24 10.96.0.3")
		if n := len(w.records); n != 2 {
			t.Errorf("%d records", n)
		}
		w.change(m, func() {
			w.egresses["net/b"].Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
		})
		check("not allowed any more", "plain", "192.0.2.0/25 nowhere, 203.0.113.0/24 nowhere")
		w.change(m, func() { w.pod("plain", "") })
		check("annotation removed", "plain", "")
		if _, kept := w.records[sandboxOf("plain").ID]; kept {
			t.Error("a pod that uses no Egress is recorded")
		}
		want := []string{
			"p: EgressMissing: Egress net/a doesn't exist", "p: EgressMissing: Egress net/a doesn't exist", // by each process
			"plain: EgressMissing: Egress net/b doesn't exist",
			"plain: EgressConflict: Egress net/a and Egress net/b both have the destination 192.0.2.0/25: the first is used",
			"plain: EgressNotAllowed: Egress net/b isn't for pods of namespace ns: spec.allowedNamespaces doesn't select its labels",
		}
		if d := cmp.Diff(want, w.events); d != "" {
			t.Errorf("events (-want +got):\n%s", d)
		}
		if w.live != 3 { // for each Egress that a cache doesn't have, by each process
			t.Errorf("%d requests of running pods beside the caches", w.live)
		}
	})
}

// One pod's trouble is its own, and is tried again.
func TestOnePodFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		m := w.manager(false)
		for _, p := range []string{"bad", "good", "gone"} {
			w.pod(p, "a")
			if err := w.add(t, m, p); err != nil {
				t.Fatal(err)
			}
		}
		defer running(t, m)()
		w.change(m, func() {
			w.broken["/bad"] = errors.New("no such device")
			w.unguarded["/bad"] = clientnet.ErrUnguarded
			w.gone["/gone"] = true
			w.egress("a", "10.96.0.2", "192.0.2.0/24")
		})
		time.Sleep(time.Minute)
		synctest.Wait()
		if got := w.has("good"); got != "192.0.2.0/24 10.96.0.2" {
			t.Errorf("the good one has %q", got)
		}
		if _, kept := w.records[sandboxOf("gone").ID]; kept || len(m.known) != 2 {
			t.Errorf("what is gone is known: %v", m.known)
		}
		if n := len(slices.DeleteFunc(slices.Clone(w.events), func(e string) bool { return !strings.HasPrefix(e, "bad: EgressUnguarded: ") })); n != 1 {
			t.Errorf("%d Events tell of a pod without a guard: %q", n, w.events)
		}
		w.mu.Lock()
		delete(w.broken, "/bad")
		delete(w.unguarded, "/bad")
		w.mu.Unlock()
		time.Sleep(2 * time.Minute) // nobody tells
		synctest.Wait()
		if got := w.has("bad"); got != "192.0.2.0/24 10.96.0.2" {
			t.Errorf("the bad one has %q", got)
		}
	})
}

func TestHealing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		w.pod("p", "a")
		w.pod("router", "")
		w.pods["ns/router"].Labels = plan.RouterLabels("a")
		w.egresses["ns/a"] = &v2.Egress{}
		m := w.manager(true)
		for _, p := range []string{"p", "router"} {
			if err := w.add(t, m, p); err != nil {
				t.Fatal(err)
			}
		}
		defer running(t, m)()
		time.Sleep(time.Second)
		synctest.Wait()
		w.mu.Lock()
		w.drift["/p"] = 3
		w.mu.Unlock()
		time.Sleep(12 * time.Second)
		synctest.Wait()
		if w.fixed != 1 || w.drift["/p"] != 0 {
			t.Errorf("%d repairs", w.fixed)
		}
		if n := w.routed["/router"]; n < 2 || n > 4 || w.has("router") != "untouched" {
			t.Errorf("the router was looked at %d times and has %q", n, w.has("router"))
		}
		if len(w.records) != 2 {
			t.Errorf("%d records, want one of each sandbox", len(w.records))
		}
		w.mu.Lock()
		if w.floats {
			t.Error("the router has the parameters of one with floating addresses")
		}
		w.egresses["ns/a"] = &v2.Egress{Spec: v2.EgressSpec{Addresses: &v2.EgressAddresses{}}}
		w.mu.Unlock()
		time.Sleep(12 * time.Second)
		synctest.Wait()
		if !w.floats {
			t.Error("the router of an Egress with floating addresses hasn't their parameters")
		}
		if err := testutil.GatherAndCompare(m.metrics(), strings.NewReader(`
# HELP coil_egress_node_client_pods Pods of the node that use an Egress, or would if it existed, by Egress.
# TYPE coil_egress_node_client_pods gauge
coil_egress_node_client_pods{egress="a",namespace="net"} 1
# HELP coil_egress_node_tunnels Tunnels that pods of the node should have to the Services and routers of Egresses.
# TYPE coil_egress_node_tunnels gauge
coil_egress_node_tunnels 1
# HELP coil_egress_node_pinned_flows Flows of pods of the node that stay with their router whatever becomes of its group.
# TYPE coil_egress_node_pinned_flows gauge
coil_egress_node_pinned_flows 0
# HELP coil_egress_node_bucket_moves_total Shares of new flows that went from one router to another, in all pods of the node.
# TYPE coil_egress_node_bucket_moves_total counter
coil_egress_node_bucket_moves_total 0
# HELP coil_egress_node_unpinned_flows_total Flows that could not be kept with their router when routers changed: a pod had too many.
# TYPE coil_egress_node_unpinned_flows_total counter
coil_egress_node_unpinned_flows_total 0
# HELP coil_egress_node_failover_duration_seconds Time from the last answer of a router that died until a pod sends new flows to others.
# TYPE coil_egress_node_failover_duration_seconds histogram
`+buckets(0, 1, 2, 3, 4, 5, 7, 10, 20, 60)+`coil_egress_node_failover_duration_seconds_sum 0
coil_egress_node_failover_duration_seconds_count 0
`)); err != nil {
			t.Error(err)
		}
		// Their DEL, and one that never came.
		if err := m.Forget(t.Context(), sandboxOf("p").ID); err != nil {
			t.Error(err)
		}
		w.mu.Lock()
		w.gone["/router"] = true
		w.mu.Unlock()
		if err := m.Sweep(t.Context()); err != nil || len(w.records) != 0 || len(m.known) != 0 {
			t.Errorf("left are %v, %v, %v", w.records, m.known, err)
		}
	})
}

// Labels alone make no router: there must be an Egress, and a client stays one.
func TestLabelsMakeNoRouter(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	for pod, annotation := range map[string]string{"labelled": "", "client": "a", "router": ""} {
		w.pod(pod, annotation)
	}
	label := func(pod, egress string) { w.pods["ns/"+pod].Labels = plan.RouterLabels(egress) }
	label("labelled", "none")
	label("router", "mine")
	w.egresses["ns/mine"] = &v2.Egress{}
	m := w.manager(false)
	sync := func(pod string) {
		t.Helper()
		if err := m.sync(t.Context(), pod); err != nil {
			t.Errorf("%s: %v", pod, err)
		}
	}
	for _, pod := range []string{"labelled", "client", "router"} {
		if err := w.add(t, m, pod); err != nil {
			t.Fatal(err)
		}
		sync(pod)
	}
	label("client", "mine")
	w.egress("a", "10.96.0.2", "192.0.2.0/24")
	sync("client")
	if got := w.has("client"); got != "192.0.2.0/24 10.96.0.2" {
		t.Errorf("a client that is given labels has %q", got)
	}
	if w.routed["/labelled"] > 0 || w.routed["/client"] > 0 || w.routed["/router"] == 0 {
		t.Errorf("parameters of routers were set %v", w.routed)
	}
	w.egresses["ns/none"] = &v2.Egress{}
	sync("labelled")
	if w.routed["/labelled"] != 1 {
		t.Error("a router whose Egress came later has no parameters")
	}
}

// The annotation that a running router gets has no effect, of which its owner is told, once.
func TestRouterWithAnnotationIsTold(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("router", "")
	labelled := func() { w.pods["ns/router"].Labels = plan.RouterLabels("mine") }
	labelled()
	w.egresses["ns/mine"] = &v2.Egress{}
	m := w.manager(false)
	if err := w.add(t, m, "router"); err != nil {
		t.Fatal(err)
	}
	const event = "router: EgressIgnored: the pod is a router of an Egress, whose packets take no Egress: to name net/a has no effect"
	for _, step := range []struct {
		annotation string
		want       []string
	}{
		{"", nil}, {"a", []string{event}}, {"a", []string{event}}, {"", []string{event}}, {"a", []string{event, event}},
	} {
		w.pod("router", step.annotation)
		labelled()
		if err := m.sync(t.Context(), "router"); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(step.want, w.events); d != "" {
			t.Errorf("with the annotation %q (-want +got):\n%s", step.annotation, d)
		}
	}
	if got := w.has("router"); got != "untouched" {
		t.Errorf("the router is a client: %s", got)
	}
}

// buckets prints those of a histogram with a number of observations in each.
func buckets(n int, bounds ...int) string {
	var b strings.Builder
	for _, bound := range bounds {
		fmt.Fprintf(&b, "coil_egress_node_failover_duration_seconds_bucket{le=\"%d\"} %d\n", bound, n)
	}
	fmt.Fprintf(&b, "coil_egress_node_failover_duration_seconds_bucket{le=\"+Inf\"} %d\n", n)
	return b.String()
}

// Only those that an object concerns are worked on.
func TestWakes(t *testing.T) {
	w := newWorld()
	w.egress("a", "", "192.0.2.0/24")
	w.egress("b", "", "198.51.100.0/24")
	m := w.manager(false)
	for pod, annotation := range map[string]string{"a": "a", "ab": "a,b", "plain": ""} {
		w.pod(pod, annotation)
		if err := w.add(t, m, pod); err != nil {
			t.Fatal(err)
		}
	}
	var woken []string
	which := func(told func()) string {
		woken = nil
		told()
		slices.Sort(woken)
		return strings.Join(woken, " ")
	}
	concerned := func(f func(*sandbox) bool) func() {
		return func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			for _, s := range m.known {
				if f(s) {
					woken = append(woken, s.Name)
				}
			}
		}
	}
	for name, c := range map[string]struct{ got, want string }{
		"Egress a":  {which(concerned(usesEgress("net/a"))), "a ab"},
		"Egress b":  {which(concerned(usesEgress("net/b"))), "ab"},
		"Namespace": {which(concerned(isClientOf("ns"))), "a ab"},
		"another":   {which(concerned(isClientOf("other"))), ""},
	} {
		if c.got != c.want {
			t.Errorf("%s woke %q, want %q", name, c.got, c.want)
		}
	}
}

// The first sync of a process, and each after one that failed, doesn't know what sockets know.
func TestStale(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("p", "a")
	m := w.manager(false)
	if err := w.add(t, m, "p"); err != nil {
		t.Fatal(err)
	}
	sync := func(what string, want bool, broken error) {
		t.Helper()
		w.broken["/p"] = broken
		w.stale = nil
		if err := m.sync(t.Context(), "p"); !errors.Is(err, broken) {
			t.Errorf("%s: %v", what, err)
		}
		if len(w.stale) != 1 || w.stale[0] != want {
			t.Errorf("%s: stale %v, want %t", what, w.stale, want)
		}
	}
	sync("after ADD", false, nil)
	sync("one that fails", false, errors.New("no such device"))
	sync("after one that failed", true, nil)
	sync("after one that succeeded", false, nil)
	restarted := w.manager(false)
	if err := restarted.Restore(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	m = restarted
	sync("after a restart, failing", true, errors.New("no such device"))
	sync("after a restart", true, nil)
	sync("then", false, nil)
}

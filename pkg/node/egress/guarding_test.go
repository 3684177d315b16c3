package egress

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/testkit"
)

// keeps prints the destinations that the node keeps of what a pod sends.
func (w *world) keeps(pod string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, r := range w.guards["/"+pod].Destinations {
		all = append(all, r.From().String())
	}
	return strings.Join(all, " ")
}

// guarding is a Manager that runs, and pods in which work takes long.
type guarding struct {
	*world
	t    *testing.T
	m    *Manager
	pods []string
	stop func()
}

func newGuarding(t *testing.T, pods ...string) *guarding {
	g := &guarding{world: newWorld(), t: t, pods: pods}
	g.egress("a", "10.96.0.1", "192.0.2.0/24")
	g.m = g.manager(false)
	for _, p := range pods {
		g.pod(p, "a")
		testkit.Check(t, g.add(t, g.m, p))
	}
	g.stop = running(t, g.m)
	g.want(time.Second, "at first", "192.0.2.0")
	g.mu.Lock()
	defer g.mu.Unlock()
	g.slow = map[string]time.Duration{}
	for _, p := range pods {
		g.slow["/"+p] = time.Hour
	}
	return g
}

// want wants that the node keeps destinations of each pod some time later.
func (g *guarding) want(later time.Duration, when, want string) {
	g.t.Helper()
	time.Sleep(later)
	synctest.Wait()
	for _, p := range g.pods {
		if got := g.keeps(p); got != want {
			g.t.Errorf("%s: of %s is kept what is for %q, want %q", when, p, got, want)
		}
	}
}

// The node's guards follow Egresses in time, however long it takes to change pods, and in however many.
func TestGuardsAreNarrowedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pods []string
		for i := range 30 {
			pods = append(pods, fmt.Sprint("p", i))
		}
		g := newGuarding(t, pods...)
		defer func() { g.stop() }()
		change := func(destinations ...string) { g.change(g.m, func() { g.egress("a", "10.96.0.1", destinations...) }) }
		change("192.0.2.0/24", "198.51.100.0/24")
		g.want(time.Second, "a destination is added: before the pods change", "192.0.2.0")
		g.want(widest, "a destination is added", "192.0.2.0 198.51.100.0")
		change("198.51.100.0/24")
		g.want(time.Second, "a destination is removed", "198.51.100.0")
		// Other changes, whoever makes them, keep nothing open.
		change("198.51.100.0/24", "203.0.113.0/24")
		for i := range 3 {
			time.Sleep(widest / 3)
			change("198.51.100.0/24", "203.0.113.0/24", fmt.Sprintf("192.0.2.%d/32", i))
		}
		time.Sleep(time.Second)
		if got := g.keeps("p0"); !strings.Contains(got, "203.0.113.0") {
			t.Errorf("a destination that was added is kept by nothing: only what is for %q", got)
		}
		for _, p := range pods {
			if got := g.has(p); got != "192.0.2.0/24 10.96.0.1" {
				t.Errorf("control: %s has %q", p, got)
			}
		}
	})
}

// A guard doesn't stay wide when coild ends while clients change.
func TestGuardsAreNarrowedAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarding(t, "p", "q", "r", "s", "t", "u")
		g.change(g.m, func() { g.egress("a", "10.96.0.1", "192.0.2.0/24", "198.51.100.0/24") })
		g.want(time.Second, "before the pods change", "192.0.2.0")
		g.stop()
		g.want(0, "at the end", "192.0.2.0 198.51.100.0")
	})
}

// The guard is given again when the node has refused it.
func TestGuardIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarding(t, "p")
		defer g.stop()
		g.mu.Lock()
		g.slow = nil
		g.unguarded["/p"] = errors.New("the node is out of memory")
		g.mu.Unlock()
		g.change(g.m, func() { g.egress("a", "10.96.0.1", "198.51.100.0/24") })
		g.want(2*widest, "refused", "192.0.2.0")
		g.mu.Lock()
		delete(g.unguarded, "/p")
		g.mu.Unlock()
		g.want(time.Minute, "afterwards", "198.51.100.0")
	})
}

// A client keeps the guard that it has, beside the one that it is to have, as long as it isn't known what a former process
// made.
func TestGuardOfTheLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarding(t, "p")
		g.stop()
		g.mu.Lock()
		clear(g.records)
		delete(g.egresses, "net/a")
		g.mu.Unlock()
		g.egress("b", "10.96.0.2", "198.51.100.0/24")
		g.pod("p", "a,b")
		g.m = g.manager(false)
		testkit.Check(t, g.m.Restore(t.Context(), []node.Sandbox{sandboxOf("p")}))
		g.stop = running(t, g.m)
		defer func() { g.stop() }()
		g.want(3*widest, "the pod doesn't tell", "192.0.2.0 198.51.100.0")
		g.mu.Lock()
		g.slow = nil
		g.mu.Unlock()
		g.want(2*time.Minute, "it tells", "192.0.2.0 198.51.100.0")
		if got := g.has("p"); got != "192.0.2.0/24 nowhere, 198.51.100.0/24 10.96.0.2" {
			t.Errorf("it has %q", got)
		}
		// The node's guard counts, too: a program in the pod may have removed the pod's own rules.
		g.stop()
		g.mu.Lock()
		clear(g.records)
		clear(g.netns)
		g.mu.Unlock()
		g.m = g.manager(false)
		testkit.Check(t, g.m.Restore(t.Context(), []node.Sandbox{sandboxOf("p")}))
		g.stop = running(t, g.m)
		g.want(time.Minute, "its routes are gone", "192.0.2.0 198.51.100.0")
		g.change(g.m, func() { g.egress("a", "10.96.0.1", "203.0.113.0/24") })
		g.want(time.Minute, "it is known where all goes", "198.51.100.0 203.0.113.0")
	})
}

// Records follow guards late when pods are slow: the next process opens nothing that the node kept.
func TestGuardsAheadOfRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pods []string
		for i := range 30 {
			pods = append(pods, fmt.Sprint("p", i))
		}
		g := newGuarding(t, pods...)
		g.change(g.m, func() {
			g.egress("b", "10.96.0.2", "198.51.100.0/24")
			for _, p := range pods {
				g.pod(p, "a,b")
			}
		})
		g.want(2*widest, "another Egress", "192.0.2.0 198.51.100.0")
		recorded := 0
		for _, r := range g.records {
			recorded += len(r.Egresses) - 1
		}
		if recorded > len(pods)/2 {
			t.Fatalf("control: of %d pods the other Egress is recorded", recorded)
		}
		g.stop()
		delete(g.egresses, "net/b")
		g.m = g.manager(false)
		testkit.Check(t, g.m.Restore(t.Context(), nil))
		g.stop = running(t, g.m)
		defer func() { g.stop() }()
		g.want(2*widest, "started again, and the Egress is gone", "192.0.2.0 198.51.100.0")
		g.mu.Lock()
		g.slow = nil
		g.mu.Unlock()
		g.want(5*time.Minute, "the pods are quick again", "192.0.2.0 198.51.100.0")
	})
}

// A state that is decided while a pod is worked on is made next, though the pod uses no Egress then.
func TestDecidedWhileWorking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarding(t, "p")
		defer g.stop()
		g.mu.Lock()
		g.slow["/p"] = 8 * time.Second
		g.mu.Unlock()
		g.change(g.m, func() { g.egress("a", "10.96.0.2", "192.0.2.0/24") })
		time.Sleep(time.Second)
		g.change(g.m, func() { g.pod("p", "") })
		time.Sleep(time.Second)
		g.mu.Lock()
		g.slow = nil
		g.mu.Unlock()
		time.Sleep(7 * time.Second)
		synctest.Wait()
		if got := g.has("p"); got != "" || len(g.records) > 0 {
			t.Errorf("a pod without an Egress has %q, recorded is %v", got, g.records)
		}
	})
}

// Objects that a former process has left in a pod that uses no Egress are removed. A state that is decided meanwhile stays.
func TestClearingIsOvertaken(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("p", "")
	m := w.manager(false)
	testkit.Check(t, m.Restore(t.Context(), []node.Sandbox{sandboxOf("p")}))
	s := m.known[sandboxOf("p").ID]
	decide := func() *wanted {
		_ = testkit.Must(m.decideFor(t.Context(), s))(t)
		return m.wantedOf(s)
	}
	none := decide()
	w.pod("p", "a")
	decide()
	testkit.Check(t, m.workTo(t.Context(), s, none), m.work(t.Context(), s))
	if got := w.has("p"); got != "192.0.2.0/24 10.96.0.1" || w.keeps("p") != "192.0.2.0" {
		t.Errorf("the pod has %q, and the node keeps what is for %q", got, w.keeps("p"))
	}
}

// A guard that can't be opened at once is opened later, by the next process if need be.
func TestGuardIsOpenedLater(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		t.Run(fmt.Sprint("restarted ", restarted), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newGuarding(t, "p")
				defer func() { g.stop() }()
				g.mu.Lock()
				g.slow = nil
				g.unguarded["/p"] = errors.New("the node is out of memory")
				g.mu.Unlock()
				g.change(g.m, func() { g.pod("p", "") })
				g.want(2*time.Second, "it can't be opened", "192.0.2.0")
				if restarted {
					g.stop()
					clear(g.records)
					clear(g.netns)
					g.m = g.manager(false)
					testkit.Check(t, g.m.Restore(t.Context(), []node.Sandbox{sandboxOf("p")}))
					g.stop = running(t, g.m)
				}
				g.mu.Lock()
				delete(g.unguarded, "/p")
				g.mu.Unlock()
				g.want(2*time.Minute, "afterwards", "")
			})
		})
	}
}

// DEL waits for no work, and leaves nothing behind.
func TestForgetEndsWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGuarding(t, "p")
		defer g.stop()
		g.change(g.m, func() { g.egress("a", "10.96.0.2", "192.0.2.0/24") })
		time.Sleep(time.Second)
		synctest.Wait()
		start := time.Now()
		testkit.Check(t, g.m.Forget(t.Context(), sandboxOf("p").ID))
		if took := time.Since(start); took > 0 || len(g.m.known) > 0 || len(g.records) > 0 {
			t.Errorf("DEL took %v; known are %v, recorded %v", took, g.m.known, g.records)
		}
	})
}

// An ADD that waits for the DEL of the same sandbox makes a client that is known.
func TestAddAfterForgetIsKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24")
		m := w.manager(false)
		defer running(t, m)()
		w.pod("p", "a")
		testkit.Check(t, w.add(t, m, "p"))
		id := sandboxOf("p").ID
		s := m.known[id]
		testkit.Check(t, s.lock(t.Context()))
		forgotten, added := make(chan error, 1), make(chan error, 1)
		go func() { forgotten <- m.Forget(t.Context(), id) }()
		synctest.Wait()
		go func() { added <- w.add(t, m, "p") }()
		synctest.Wait()
		s.work.Release(1)
		testkit.Check(t, errors.Join(<-forgotten, <-added))
		if m.known[id] == nil || len(w.records) != 1 {
			t.Errorf("known are %v, recorded %v", m.known, w.records)
		}
	})
}

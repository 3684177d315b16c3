package routes

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/testkit"
)

// watcher notes who announces what, all the time.
type watcher struct {
	mu      sync.Mutex
	now     map[netip.Prefix][]string // origins, sorted
	changes []change
	wrongs  []string
	looks   int
	// floating are prefixes that a former holder may still announce.
	floating map[netip.Prefix]bool
}

// change is the first or last time that an origin is seen with a prefix.
type change struct {
	announcement
	withdrawn bool
}

func (c change) String() string {
	verb := "announces"
	if c.withdrawn {
		verb = "withdraws"
	}
	return fmt.Sprintf("%s %s %s", c.origin, verb, c.prefix)
}

// watch looks every few milliseconds, until the test ends. Then it reports every
// prefix that two had announced at once.
func watch(t testing.TB, look func() ([]announcement, error)) *watcher {
	w := &watcher{floating: map[netip.Prefix]bool{}}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(testkit.Timeout(3 * time.Millisecond))
		defer tick.Stop()
		for {
			if all, err := look(); err != nil {
				w.fail(err)
			} else {
				w.observe(all)
			}
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	})
	t.Cleanup(func() {
		close(stop)
		wg.Wait()
		w.report(t)
	})
	return w
}

// mayMove says that prefixes are floating addresses.
func (w *watcher) mayMove(prefixes []netip.Prefix) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range prefixes {
		w.floating[p] = true
	}
}

// fail notes that nobody knows what is announced.
func (w *watcher) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	w.wrongs = append(w.wrongs, err.Error())
}

// observe notes what is announced at one time.
func (w *watcher) observe(all []announcement) {
	next := map[netip.Prefix][]string{}
	for _, a := range all {
		if !slices.Contains(next[a.prefix], a.origin) {
			next[a.prefix] = append(next[a.prefix], a.origin)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	for p, origins := range next {
		slices.Sort(origins)
		before := w.now[p]
		if len(origins) > 1 && !slices.Equal(origins, before) && !w.floating[p] {
			w.wrongs = append(w.wrongs, fmt.Sprintf("%s is announced by %v at once", p, origins))
		}
		for _, o := range origins {
			if !slices.Contains(before, o) {
				w.changes = append(w.changes, change{announcement{p, o}, false})
			}
		}
	}
	for p, origins := range w.now {
		for _, o := range origins {
			if !slices.Contains(next[p], o) {
				w.changes = append(w.changes, change{announcement{p, o}, true})
			}
		}
	}
	w.now = next
}

// of returns who announces a prefix.
func (w *watcher) of(p netip.Prefix) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string{}, w.now[p]...)
}

// by returns what an origin announces.
func (w *watcher) by(origin string) []netip.Prefix {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []netip.Prefix
	for p, origins := range w.now {
		if slices.Contains(origins, origin) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return all
}

// mark is a point in time for since. It waits for a whole look of the watcher, so that earlier changes aren't counted.
func (w *watcher) mark() int {
	w.awaitLooks(2) // the first may have begun earlier
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.changes)
}

// since returns what has changed since a mark, in words; only is what may be asked for.
func (w *watcher) since(mark int, only func(change) bool) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, c := range w.changes[mark:] {
		if only(c) {
			all = append(all, c.String())
		}
	}
	return all
}

// awaitLooks waits until the watcher has looked n times more.
func (w *watcher) awaitLooks(n int) {
	count := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.looks
	}
	for end := count() + n; count() < end; {
		time.Sleep(time.Millisecond)
	}
}

// report is the end: what was wrong fails the test, and so does a watcher that has
// seen nothing.
func (w *watcher) report(t testing.TB) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.wrongs {
		t.Error(s)
	}
	if len(w.changes) == 0 {
		t.Errorf("the watcher saw nothing in %d looks", w.looks)
	}
	t.Logf("the watcher looked %d times and saw %d changes", w.looks, len(w.changes))
}

// found keeps what a test would have reported.
type found struct {
	testing.TB
	errors int
}

func (f *found) Helper()                      {}
func (f *found) Error(...any)                 { f.errors++ }
func (f *found) Errorf(string, ...any)        { f.errors++ }
func (f *found) Logf(format string, a ...any) {}

// The watcher's reports, look by look.
func TestWatcher(t *testing.T) {
	p, q := netip.MustParsePrefix("10.1.0.0/27"), netip.MustParsePrefix("fd00:1::/123")
	for _, tt := range []struct {
		name    string
		looks   [][]announcement
		changes []string
		errors  int
	}{
		{name: "nothing at all", looks: [][]announcement{nil, nil}, errors: 1},
		{
			name:    "a block that moves",
			looks:   [][]announcement{{{p, "node1"}}, {{p, "node1"}}, nil, {{p, "node2"}}},
			changes: []string{"node1 announces 10.1.0.0/27", "node1 withdraws 10.1.0.0/27", "node2 announces 10.1.0.0/27"},
		},
		{
			name:    "a block that moves between two looks",
			looks:   [][]announcement{{{p, "node1"}}, {{p, "node2"}}},
			changes: []string{"node1 announces 10.1.0.0/27", "node2 announces 10.1.0.0/27", "node1 withdraws 10.1.0.0/27"},
		},
		{
			name:    "two nodes at once, in one look",
			looks:   [][]announcement{{{p, "node1"}}, {{p, "node1"}, {p, "node2"}}, {{p, "node2"}}},
			changes: []string{"node1 announces 10.1.0.0/27", "node2 announces 10.1.0.0/27", "node1 withdraws 10.1.0.0/27"},
			errors:  1,
		},
		{
			name:    "two nodes at once, for long",
			looks:   [][]announcement{{{q, "node1"}, {q, "node2"}}, {{q, "node1"}, {q, "node2"}}},
			changes: []string{"node1 announces fd00:1::/123", "node2 announces fd00:1::/123"},
			errors:  1,
		},
		{
			name:    "the same node by two sessions",
			looks:   [][]announcement{{{p, "node1"}, {p, "node1"}}},
			changes: []string{"node1 announces 10.1.0.0/27"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := &watcher{floating: map[netip.Prefix]bool{}}
			for _, look := range tt.looks {
				w.observe(look)
			}
			if d := cmp.Diff(tt.changes, w.since(0, func(change) bool { return true })); d != "" {
				t.Errorf("changes (-want +got):\n%s", d)
			}
			f := &found{TB: t}
			w.report(f)
			if f.errors != tt.errors {
				t.Errorf("it reports %d errors, want %d: %q", f.errors, tt.errors, w.wrongs)
			}
		})
	}
}

// A route that was announced before a mark isn't counted as a change since the mark, however slow the watcher is.
func TestWatcherMarks(t *testing.T) {
	var announced atomic.Bool
	began := make(chan struct{}, 1)
	w := watch(t, func() ([]announcement, error) {
		p := announcement{netip.MustParsePrefix("10.1.0.0/27"), "node1"}
		q := announcement{netip.MustParsePrefix("10.2.0.0/27"), "node1"}
		all := []announcement{p}
		if announced.Load() {
			all = append(all, q)
		}
		select {
		case began <- struct{}{}:
		default:
		}
		time.Sleep(20 * time.Millisecond)
		return all, nil
	})
	<-began // a look without q is under way
	announced.Store(true)
	mark := w.mark()
	w.awaitLooks(3)
	if got := w.since(mark, func(change) bool { return true }); len(got) > 0 {
		t.Errorf("changes since the mark are %q, want none", got)
	}
}

// A router that doesn't answer isn't one that has no routes.
func TestWatcherFails(t *testing.T) {
	w := &watcher{floating: map[netip.Prefix]bool{}}
	w.observe([]announcement{{netip.MustParsePrefix("10.1.0.0/27"), "node1"}})
	w.fail(fmt.Errorf("no answer"))
	f := &found{TB: t}
	w.report(f)
	if f.errors != 1 {
		t.Errorf("it reports %d errors, want 1", f.errors)
	}
}

// Output of BIRD 2.0.12: two routes of a prefix, of which the second is not the best.
func TestParseRoutes(t *testing.T) {
	const text = `Table master4:
10.1.0.0/27          unicast [node1_4 18:26:04.028] * (100) [AS65001?]
	via 10.254.1.2 on port1
	Type: BGP univ
	BGP.origin: Incomplete
	BGP.as_path: 65001
                     unicast [node2_4 18:26:04.030] (100) [AS65002?]
	via 10.254.2.2 on port2
	Type: BGP univ
	BGP.community: (65000,1) (65000,2)
10.9.0.7/32          unreachable [static1 18:26:04.030] * (200)

Table master6:
fd00:1::/123         unicast [node1_6 18:26:04.031 from fd00:254:1::2] * (100/?) [i]
	dev lo
`
	got, err := parseRoutes(text)
	if err != nil {
		t.Fatal(err)
	}
	want := []announcement{
		{netip.MustParsePrefix("10.1.0.0/27"), "node1_4"}, {netip.MustParsePrefix("10.1.0.0/27"), "node2_4"},
		{netip.MustParsePrefix("10.9.0.7/32"), "static1"}, {netip.MustParsePrefix("fd00:1::/123"), "node1_6"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("routes are %v, want %v", got, want)
	}
	if _, err := parseRoutes("                     unicast [node2_4 18:26:04.030] (100)\n"); err == nil {
		t.Error("a route without a prefix is no error")
	}
}

package egress

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// closing is a pod that has used the Egress a, in a bubble.
type closing struct {
	*testing.T
	*world
	m    *Manager
	stop func()
}

func newClosing(t *testing.T) *closing {
	w := newWorld()
	w.egress("a", "10.96.0.1", "0.0.0.0/0", "198.51.100.0/24")
	w.pod("p", "a")
	c := &closing{t, w, w.manager(false), nil}
	if err := w.add(t, c.m, "p"); err != nil {
		t.Fatal(err)
	}
	c.stop = running(t, c.m)
	return c
}

// restart lets another process begin, after something has happened.
func (c *closing) restart(between func()) {
	c.stop()
	between()
	c.m = c.manager(false)
	if err := c.m.Restore(c.Context(), []node.Sandbox{sandboxOf("p")}); err != nil {
		c.Fatal(err)
	}
	c.stop = running(c.T, c.m)
}

func (c *closing) want(what, want string) {
	c.Helper()
	time.Sleep(time.Second)
	synctest.Wait()
	if got := c.has("p"); got != want {
		c.Errorf("%s: it has %q, want %q", what, got, want)
	}
}

// Egresses that an annotation named before stay closed until it is known where the packets of the others go.
func TestFormerStaysClosed(t *testing.T) {
	const closed = "0.0.0.0/0 nowhere, 198.51.100.0/24 nowhere"
	synctest.Test(t, func(t *testing.T) {
		c := newClosing(t)
		defer func() { c.stop() }()
		c.change(c.m, func() { c.pod("p", "b") })
		c.want("an Egress that isn't there", closed)
		c.restart(func() {})
		c.want("after a restart", closed)
		c.change(c.m, func() { c.egress("b", "", "198.51.100.0/24", "192.0.2.0/24") })
		c.want("it has no Service", "0.0.0.0/0 nowhere, 192.0.2.0/24 nowhere, 198.51.100.0/24 nowhere")
		c.change(c.m, func() { c.pod("p", "b,c"); c.egress("b", "10.96.0.2", "198.51.100.0/24", "192.0.2.0/24") })
		c.want("another one isn't there", "0.0.0.0/0 nowhere, 192.0.2.0/24 10.96.0.2, 198.51.100.0/24 10.96.0.2")
		c.change(c.m, func() { c.pod("p", "b") })
		c.want("all are known", "192.0.2.0/24 10.96.0.2, 198.51.100.0/24 10.96.0.2")
		c.change(c.m, func() { c.pod("p", "c") })
		c.want("again", "192.0.2.0/24 nowhere, 198.51.100.0/24 nowhere")
		c.change(c.m, func() { c.pod("p", "a") })
		c.want("back to the first", "0.0.0.0/0 10.96.0.1, 198.51.100.0/24 10.96.0.1")
		c.change(c.m, func() { c.pod("p", "c") })
		c.want("and again", closed)
		c.change(c.m, func() {
			c.egress("c", "", "203.0.113.0/24").Spec.Peering = "Direct"
		})
		c.want("no router", "0.0.0.0/0 nowhere, 198.51.100.0/24 nowhere, 203.0.113.0/24 nowhere")
		c.change(c.m, func() {
			c.routers["net/c"] = []client.Router{{Addr: netip.MustParseAddr("10.1.0.1"), State: client.RouterLive}}
		})
		c.want("routers", "203.0.113.0/24 [10.1.0.1]")
		c.change(c.m, func() { c.pod("p", "") })
		c.want("no annotation", "")
	})
}

// However often an annotation changes, a pod has a bounded record, and opens nothing.
func TestFormerAreBounded(t *testing.T) {
	var last []store.KnownEgress
	var closed []netip.Prefix
	for i := range 2000 {
		// Far apart, and of two kinds.
		a := netip.AddrFrom4([4]byte{byte(20 + i%50), byte(i), byte(i >> 3), byte(2 * i)})
		b := netip.AddrFrom4([4]byte{10, byte(i), byte(i >> 3), byte(2 * i)})
		destinations := []netip.Prefix{netip.PrefixFrom(a, 32), netip.PrefixFrom(b, 32)}
		closed = append(closed, destinations...)
		w := wanted{unknown: map[string]bool{"": true}, known: []store.KnownEgress{{Name: fmt.Sprint("net/", i), Destinations: destinations, OriginatingOnly: i%3 == 0}}}
		w.keep(last)
		last = w.known
		if len(last) > mostFormer+1 {
			t.Fatalf("%d Egresses are known of the pod", len(last))
		}
	}
	n := 0
	var egresses []client.Egress
	for _, k := range last {
		n += len(k.Destinations)
		egresses = append(egresses, clientEgress(k))
	}
	if n > 4*128+2*mostFormer {
		t.Errorf("%d destinations are known of the pod", n)
	}
	s := client.StateOf(client.Client{Address: sandboxOf("p").Address, Egresses: egresses})
	for _, d := range closed {
		if !slices.ContainsFunc(s.Filter.Destinations, func(r netipx.IPRange) bool { return !d.Addr().Less(r.From()) && !r.To().Less(d.Addr()) }) {
			t.Errorf("%s isn't closed any more", d)
		}
	}
}

// Destinations of a former Egress stay known though an Egress that is named has them by now: it may lose them.
func TestFormerKeepWhatOthersHave(t *testing.T) {
	shared := netip.MustParsePrefix("203.0.113.0/24")
	known := func(name string, d netip.Prefix) store.KnownEgress {
		return store.KnownEgress{Name: name, Destinations: []netip.Prefix{d}}
	}
	last := []store.KnownEgress{known("net/shared", shared)}
	for i := range 3 * mostFormer {
		w := wanted{unknown: map[string]bool{"": true}, known: []store.KnownEgress{known(fmt.Sprint("net/", i), netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 32))}}
		w.known = append(w.known, known("net/named", shared))
		for _, k := range w.known {
			w.egresses = append(w.egresses, clientEgress(k))
		}
		w.keep(last)
		last = w.known
	}
	w := wanted{unknown: map[string]bool{"": true}, known: []store.KnownEgress{known("net/named", netip.MustParsePrefix("192.0.2.0/24"))}}
	w.keep(last)
	if !slices.ContainsFunc(w.egresses, func(e client.Egress) bool { return slices.Contains(e.Destinations, shared) }) {
		t.Errorf("%s isn't closed any more", shared)
	}
}

// A program in the pod may have made any number of routes.
func TestCraftedRoutesAreBounded(t *testing.T) {
	var routes []dataplane.Route
	for i := range 50000 {
		a := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
		routes = append(routes, dataplane.Route{Type: dataplane.Throw, Dst: a}, dataplane.Route{Type: dataplane.Unreachable, Dst: a, Metric: dataplane.MetricUnreachable})
	}
	start := time.Now()
	all := closedBy(routes)
	w := wanted{}
	w.keep(all)
	newWorld().manager(false).fit(&w)
	if took := time.Since(start); took > testkit.Timeout(5*time.Second) {
		t.Errorf("it took %v", took)
	}
	if len(all) != 1 || len(all[0].Destinations) != mostBelieved || len(all[0].InCluster) != mostBelieved {
		t.Errorf("%d Egresses are believed, of %d destinations and %d ranges", len(all), len(all[0].Destinations), len(all[0].InCluster))
	}
}

// Without a record it is the kernel that knows what was closed.
func TestRecordLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newClosing(t)
		defer func() { c.stop() }()
		lost := func() { c.records = map[attachment.ID]store.Client{}; delete(c.egresses, "net/a") }
		c.restart(lost)
		c.want("the record is lost, and the Egress deleted", "0.0.0.0/0 nowhere, 198.51.100.0/24 nowhere")
		c.restart(func() {})
		c.want("after another restart", "0.0.0.0/0 nowhere, 198.51.100.0/24 nowhere")
		if k := c.records[sandboxOf("p").ID].Egresses; len(k) != 2 || k[0].Name != "net/a" || !k[1].Former {
			t.Errorf("recorded %+v", k)
		}
		c.change(c.m, func() { c.egress("a", "10.96.0.1", "192.0.2.0/24") })
		c.want("made again", "192.0.2.0/24 10.96.0.1")
		c.restart(func() { lost(); c.pod("p", "") })
		c.want("the annotation went, too", "")
	})
}

// The cache may be behind the pod.
func TestCacheBehind(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "0.0.0.0/0")
	w.pod("p", "a")
	m := w.manager(false)
	if err := w.add(t, m, "p"); err != nil {
		t.Fatal(err)
	}
	sync := func(what, want string, live int, failing bool) {
		t.Helper()
		w.live = 0
		if err := m.sync(t.Context(), "p"); (err != nil) != failing {
			t.Errorf("%s: %v", what, err)
		}
		if got := w.has("p"); got != want || w.live != live {
			t.Errorf("%s: it has %q after %d requests, want %q after %d", what, got, w.live, want, live)
		}
	}
	w.pod("p", "b")
	w.behind = map[string]bool{"net/b": true}
	w.egress("b", "10.96.0.2", "192.0.2.0/24")
	sync("it is at the API server", "192.0.2.0/24 10.96.0.2", 1, false)
	w.behind = nil
	sync("it is in the cache", "192.0.2.0/24 10.96.0.2", 0, false)
	w.pod("p", "b,c")
	w.down = errors.New("the API server is away")
	sync("nobody can tell", "192.0.2.0/24 10.96.0.2", 1, true)
	w.down = nil
	sync("it is nowhere", "192.0.2.0/24 10.96.0.2", 1, false)
	sync("that is known", "192.0.2.0/24 10.96.0.2", 0, false)
	w.pod("p", "b,d,e,f,g,h,i,j,k,l,m")
	sync("many are nowhere", "192.0.2.0/24 10.96.0.2", mostAsked, false)
}

// Closed destinations are read back, whatever their Egress.
func TestClosed(t *testing.T) {
	p := clientnettest.NewPod(t)
	n := clientnet.New(dataplane.ProtocolNode, p.Links, nil)
	if got, err := n.Closed(t.Context(), p.At()); err != nil || len(closedBy(got)) > 0 {
		t.Errorf("before: %+v, %v", got, err)
	}
	a := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "::/0", "172.20.0.0/16")
	a.InCluster = []netip.Prefix{netip.MustParsePrefix("2001:db8:1::/48")}
	c := clientnettest.Gateway("net/c", 0, "198.51.100.0/24", "2001:db8:2::/48")
	c.OriginatingOnly = true
	p.Client.Egresses = []client.Egress{a, clientnettest.Gateway("net/b", 0, "0.0.0.0/0"), c}
	testkit.Must(n.Client(t.Context(), p.At(), p.Client))(t)
	routes, err := n.Closed(t.Context(), p.At())
	if err != nil {
		t.Fatal(err)
	}
	inCluster := []netip.Prefix{netip.MustParsePrefix("10.96.0.1/32"), netip.MustParsePrefix("2001:db8:1::/48"), netip.MustParsePrefix("fd96::1/128")}
	got, want := closedBy(routes), []store.KnownEgress{{
		Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("172.20.0.0/16"), netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("::/0")},
		InCluster:    inCluster,
	}, {
		Destinations: c.Destinations, InCluster: inCluster, OriginatingOnly: true,
	}}
	sorted := cmpopts.SortSlices(func(a, b netip.Prefix) bool { return a.String() < b.String() })
	if d := cmp.Diff(want, got, sorted, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Errorf("closed (-want +got):\n%s", d)
	}
}

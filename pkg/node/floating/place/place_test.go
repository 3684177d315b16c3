package place

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// lab is a node with a pod that has floating addresses, and a host that sends to them by the node.
type lab struct {
	*floatingtest.Path
	pods    map[types.UID]Pod
	told    told
	tracked bool
}

// told is an Announcer.
type told struct {
	mu    sync.Mutex
	calls []string
	// withdrawing is called before an address is withdrawn, if it isn't nil.
	withdrawing func(floating.Address)
}

func (a *told) Announce(_ context.Context, addr floating.Address) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, "announce "+addr.Block)
	return nil
}

func (a *told) Withdraw(_ context.Context, addr floating.Address) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls = append(a.calls, "withdraw "+addr.Block)
	if a.withdrawing != nil {
		a.withdrawing(addr)
	}
	return nil
}

func newLab(t *testing.T) *lab {
	l := &lab{Path: floatingtest.NewPath(t)}
	l.pods = map[types.UID]Pod{"router": {
		Link: l.Link, Address: ipam.Address{IPv4: netip.MustParseAddr("10.0.1.2"), IPv6: netip.MustParseAddr("fd00:1::2")},
		Netns: store.Netns{Path: l.Pod.Lab().Path(), Inode: l.Pod.Inode()},
	}}
	return l
}

// start begins a life of the program.
func (l *lab) start() *Place {
	l.T.Helper()
	tables := testkit.Must(OpenTables(l.Node.NS))(l.T)
	l.T.Cleanup(tables.Close)
	p := testkit.Must(New(l.T.Context(), Config{
		Handle: l.Handle, Tables: tables, PodTable: 116, ExportTable: 119, Loopback: 1, Announcer: &l.told, Tracked: l.tracked,
		Pod: func(uid types.UID) (Pod, bool) { pod, ok := l.pods[uid]; return pod, ok },
	}))(l.T)
	l.T.Cleanup(p.Wait)
	return p
}

func TestAnswersAndStops(t *testing.T) {
	l := newLab(t)
	p := l.start()
	o := floatingtest.Order(7, time.Hour)
	o.Announce = true
	testkit.Check(t, p.Answer(t.Context(), o))
	l.Await(o, true)
	wantPods := "192.0.2.7 via 10.0.1.2 dev pod proto 32 onlink; 2001:db8::7 via fd00:1::2 dev pod proto 32 metric 1024 onlink pref medium"
	if got := l.Routes("116"); got != wantPods {
		t.Errorf("table 116: %s", got)
	}
	wantExport := "192.0.2.7 dev lo proto 32 scope link metric 999999997; 2001:db8::7 dev lo proto 32 metric 999999997 pref medium"
	if got := strings.Replace(l.Routes("119"), "192.0.2.7 dev lo proto 32 metric", "192.0.2.7 dev lo proto 32 scope link metric", 1); got != wantExport {
		t.Errorf("table 119: %s", got)
	}
	// Whoever syncs the routes of pods and blocks leaves these alone.
	for _, table := range []int{116, 119} {
		testkit.Must(route.New(l.Handle, dataplane.ProtocolNode, table).Sync(t.Context(), nil))(t)
	}
	l.Await(o, true)
	// A newer epoch is a lower metric, also that which IPv6 has without one.
	o.Epoch = oldest - 1024
	testkit.Check(t, p.Answer(t.Context(), o))
	if got := l.Routes("119"); strings.Count(got, "metric 1024") != 2 || strings.Count(got, "metric") != 2 {
		t.Errorf("table 119: %s", got)
	}
	if got := metric(math.MaxInt64); got != 1 {
		t.Errorf("the metric of the newest epoch is %d", got)
	}
	testkit.Check(t, p.Stop(t.Context(), o.Address), p.Stop(t.Context(), o.Address))
	l.Await(o, false)
	if got := l.Routes("116") + l.Routes("119") + testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t); got != "" {
		t.Errorf("there is still %s", got)
	}
	if got := strings.Join(l.told.calls, ", "); got != "announce p-7, announce p-7, withdraw p-7, withdraw p-7" {
		t.Errorf("the hosts of the link were told %s", got)
	}
}

// The node has stopped as soon as its tables drop all packets of the address: the next one doesn't wait until the routes are gone. Without a table
// it does.
func TestStopsBeforeRoutesGo(t *testing.T) {
	for name, tt := range map[string]struct {
		before string
		routes bool
	}{
		"as usual":               {"true", true},
		"others took the tables": {"nft flush ruleset", false},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			p, o := l.start(), floatingtest.Order(7, time.Hour)
			testkit.Check(t, p.Answer(t.Context(), o))
			l.Await(o, true)
			testkit.Must(l.Node.Run("sh", "-c", tt.before))(t)
			asked := false
			l.told.withdrawing = func(floating.Address) {
				asked = true
				if got := l.Routes("116"); strings.Contains(got, "192.0.2.7") != tt.routes {
					t.Errorf("table 116 when the node has stopped: %q", got)
				}
				for _, a := range o.Addrs() {
					testkit.Check(t, l.Passes(a, false))
				}
			}
			testkit.Check(t, p.Stop(t.Context(), o.Address))
			p.Wait()
			if got := l.Routes("116") + l.Routes("119") + testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t); got != "" || !asked {
				t.Errorf("withdrawn: %t; there is still %s", asked, got)
			}
		})
	}
}

// An earlier life has died: the kernel stops by itself. The next life removes what is left when that is sure, and not before: it may go on.
func TestEarlierLife(t *testing.T) {
	l := newLab(t)
	first := l.start()
	testkit.Check(t, first.Answer(t.Context(), floatingtest.Order(7, time.Hour)))
	l.Await(floatingtest.Order(7, 0), true) // links of IPv6 take their time
	o, other := floatingtest.Order(7, holding.Lease), floatingtest.Order(8, holding.Lease)
	testkit.Check(t, first.Answer(t.Context(), o))
	testkit.Check(t, l.start().Answer(t.Context(), other)) // it begins with what the former life had
	for _, a := range o.Addrs() {
		testkit.Check(t, l.Passes(a, true))
	}
	p := l.start()
	testkit.Check(t, p.Sync(t.Context()))
	if got := l.Routes("116"); strings.Count(got, "via") != 4 {
		t.Errorf("too soon there are %s", got)
	}
	l.Await(o, false)
	testkit.Eventually(t, 5*time.Second, "the routes are gone", func() error {
		if err := p.Sync(t.Context()); err != nil {
			return err
		}
		if got := l.Routes("116") + l.Routes("119"); got != "" {
			return errors.New(got)
		}
		return nil
	})
}

// asks asks for an address on the link of the host, and says whether the node answers.
func (l *lab) asks(a netip.Addr) (answers bool) {
	l.T.Helper()
	_, _ = l.Host.Run("ip", "neigh", "del", a.String(), "dev", "eth0") // if it is known
	testkit.Check(l.T, l.Host.Do(func() error {
		c, err := net.Dial("udp", netip.AddrPortFrom(a, 9).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte("x"))
		return err
	}))
	testkit.Eventually(l.T, 10*time.Second, "the host has asked", func() error {
		out := testkit.Must(l.Host.Run("ip", "neigh", "show", a.String(), "dev", "eth0"))(l.T)
		answers = strings.Contains(out, "lladdr")
		if !answers && !strings.Contains(out, "FAILED") {
			return errors.New(out)
		}
		return nil
	})
	return answers
}

// asksAgain waits until the host, which knows where an address is, has asked there whether it still is.
func (l *lab) asksAgain(kind string, a netip.Addr) {
	l.T.Helper()
	testkit.Must(l.Host.Run("ip", "neigh", "change", a.String(), "dev", "eth0", "nud", "delay"))(l.T)
	testkit.Eventually(l.T, 5*time.Second, fmt.Sprintf("%s, %s, still is there for a host that asks again", a, kind), func() error {
		if out := testkit.Must(l.Host.Run("ip", "neigh", "show", a.String(), "dev", "eth0"))(l.T); !strings.Contains(out, "REACHABLE") {
			return errors.New(out)
		}
		return nil
	})
}

// Hosts that ask for the address get an answer no longer than packets pass, though the proxy entries stay when the program has ended.
func TestHostsThatAsk(t *testing.T) {
	l := newLab(t)
	ctx := t.Context()
	testkit.Check(t,
		l.Node.Lab().Sysctl("ipv6/conf/all/proxy_ndp=1", "ipv4/neigh/uplink/proxy_delay=0", "ipv6/neigh/uplink/proxy_delay=0"),
		l.Node.Lab().IP(ctx, "neigh add proxy 192.0.2.7 dev uplink", "neigh add proxy 2001:db8::7 dev uplink"),
		l.Host.Lab().Sysctl("ipv4/neigh/eth0/retrans_time_ms=50", "ipv6/neigh/eth0/retrans_time_ms=50",
			"ipv4/neigh/eth0/delay_first_probe_time=0", "ipv6/neigh/eth0/delay_first_probe_time=0"), // asks again at once
		l.Host.Lab().IP(ctx, "route add 192.0.2.7 dev eth0", "route add 2001:db8::7 dev eth0"))
	testkit.Eventually(t, 10*time.Second, "link-local addresses are used", func() error {
		if out := testkit.Must(l.Node.Run("ip", "-6", "addr", "show", "tentative"))(t) + testkit.Must(l.Host.Run("ip", "-6", "addr", "show", "tentative"))(t); out != "" {
			return errors.New(out)
		}
		return nil
	})
	p := l.start()
	for kind, o := range map[string]floating.Order{"of a pod": floatingtest.Order(7, time.Hour), "of Services": ofServices(time.Hour, 80)} {
		for _, lasts := range []time.Duration{time.Hour, 0} {
			o.Until = time.Now().Add(lasts)
			testkit.Check(t, p.Answer(ctx, o))
			for _, a := range o.Addrs() {
				if got, want := l.asks(a), lasts > 0; got != want {
					t.Errorf("%s: who asks for %s gets an answer: %t, want %t", kind, a, got, want)
				}
				if lasts > 0 {
					l.asksAgain(kind, a)
				}
			}
		}
		testkit.Check(t, p.Stop(ctx, o.Address))
		p.Wait()
	}
	if out := testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t); out != "" {
		t.Errorf("the tables stay: %s", out)
	}
}

// What is wrong with one address is no harm to others.
func TestOthersGoOn(t *testing.T) {
	l := newLab(t)
	l.pods["gone"] = Pod{Link: 4711, Address: l.pods["router"].Address}
	p := l.start()
	good, bad, unknown := floatingtest.Order(7, time.Hour), floatingtest.Order(8, time.Hour), floatingtest.Order(9, time.Hour)
	bad.Pod, unknown.Pod = "gone", "unknown"
	if err := p.Answer(t.Context(), bad); err == nil {
		t.Error("an address without a link is answered for")
	}
	if err := p.Answer(t.Context(), unknown); err == nil || !strings.Contains(err.Error(), "isn't on this node") {
		t.Errorf("a pod that isn't there: %v", err)
	}
	_ = p.Answer(t.Context(), good)
	l.Await(good, true)
	if got := l.Routes("119"); !strings.Contains(got, "192.0.2.7") || strings.Contains(got, "192.0.2.8") {
		t.Errorf("told to routing daemons: %s", got)
	}
	testkit.Check(t, p.Stop(t.Context(), good.Address))
	l.Await(good, false)
	if out := testkit.Must(l.Node.Run("nft", "list", "set", "ip", dataplane.NftTableFloating, "answering_ipv4"))(t); strings.Contains(out, "192.0.2.7") {
		t.Errorf("it may still pass: %s", out)
	}
	l.pods["gone"] = l.pods["router"]
	testkit.Check(t, p.Answer(t.Context(), bad))
	if got := l.Routes("119"); !strings.Contains(got, "192.0.2.8") {
		t.Errorf("told to routing daemons: %s", got)
	}
}

// counted are repairs by kind.
type counted map[string]int

func (c counted) add(_ context.Context, kind string, n int) { c[kind] += n }

// Routes and rules that others have removed or changed come back, and are counted. What is Coil's own doing isn't.
func TestSyncMends(t *testing.T) {
	l := newLab(t)
	p := l.start()
	got := counted{}
	p.cfg.Repaired = got.add
	o := floatingtest.Order(7, time.Hour)
	testkit.Check(t, p.Answer(t.Context(), o), p.Sync(t.Context()), p.Answer(t.Context(), floatingtest.Order(8, time.Hour)), p.Sync(t.Context()))
	timeout := regexp.MustCompile(`(timeout|expires) \S+`)
	state := func() string {
		rules := testkit.Must(l.Node.Run("sh", "-c", "nft -s list table ip coil_floating; nft -s list table ip6 coil_floating; nft -s list table arp coil_floating"))(t)
		lines := strings.Split(timeout.ReplaceAllString(strings.Join(strings.Fields(rules), " "), ""), "}")
		slices.Sort(lines) // chains that were made anew are the last ones
		return l.Routes("116") + l.Routes("119") + strings.Join(lines, "}\n")
	}
	want := state()
	for _, tt := range []struct {
		script        string
		routes, rules bool
	}{
		{"true", false, false},
		{"ip route flush table 116", true, false},
		{"ip -6 route flush table 119", true, false},
		{"ip route replace 192.0.2.7 dev lo table 116 proto 32", true, false},
		{"nft delete chain ip coil_floating prerouting", false, true},
		{"nft flush table ip6 coil_floating", false, true},
		{"nft add rule ip coil_floating prerouting accept", false, true},
		{"nft flush table arp coil_floating", false, true},
		{"ip -6 route flush table 116; nft flush ruleset", true, true},
	} {
		clear(got)
		testkit.Must(l.Node.Run("sh", "-c", tt.script))(t)
		testkit.Check(t, p.Sync(t.Context()))
		if (got[Route] > 0) != tt.routes || (got[Rules] > 0) != tt.rules {
			t.Errorf("%s: counted %v", tt.script, got)
		}
		testkit.Check(t, p.Answer(t.Context(), o), p.Answer(t.Context(), floatingtest.Order(8, time.Hour))) // as before each end of a lease
		if now := state(); now != want {
			t.Errorf("%s: there is\n%s\nwant\n%s", tt.script, now, want)
		}
		l.Await(o, true)
	}
	// Without the table there is nothing that would let packets pass: it is made when the lease is to be prolonged.
	clear(got)
	testkit.Must(l.Node.Run("nft", "flush", "ruleset"))(t)
	if err := p.Answer(t.Context(), o); err == nil {
		t.Error("an element lasts longer in no table")
	}
	testkit.Check(t, p.Answer(t.Context(), o), p.Answer(t.Context(), floatingtest.Order(8, time.Hour)))
	if now := state(); now != want || got[Rules] == 0 {
		t.Errorf("counted %v, and there is\n%s\nwant\n%s", got, now, want)
	}
}

// Many addresses share transactions.
func TestManyAtOnce(t *testing.T) {
	l := newLab(t)
	p := l.start()
	var all sync.WaitGroup
	began := time.Now()
	for n := range byte(200) {
		all.Go(func() {
			if err := p.Answer(t.Context(), floatingtest.Order(n+1, time.Hour)); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	t.Logf("200 addresses took %s", time.Since(began))
	if took := time.Since(began); took > testkit.Limit(time.Second) {
		t.Errorf("it took %s", took)
	}
	if n := strings.Count(l.Routes("119"), "dev lo"); n != 400 {
		t.Errorf("there are %d routes", n)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Answer(ended, floatingtest.Order(201, time.Hour)); !errors.Is(err, context.Canceled) || strings.Contains(l.Routes("119"), "192.0.2.201") {
		t.Errorf("an order that was taken back: %v", err)
	}
}

package clientnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// No flow moves while routers come, drain, die and go, whatever their buckets do.
func TestDirectFlowsStay(t *testing.T) {
	p := newDirectPod(t, 4)
	const where = "192.0.2.0/24"
	use := func(routers string) Outcome {
		t.Helper()
		p.idle()
		e := directly(routers, where, "2001:db8::/32")
		out := p.mustUse(e)
		if again := p.mustUse(e); again.Changed() || again.Pins.Changed() {
			t.Errorf("%s, the second time: %+v", routers, again)
		}
		return out
	}
	if out := use("1 live, 2 live"); out.Nexthops.Added != 6 || out.Pins.Changed() || out.Moved != 0 || len(out.Links) != 4 {
		t.Errorf("made %+v", out)
	}
	flows := p.connect(1, 30)
	if n := share(flows); n[1] == 0 || n[2] == 0 || n[1]+n[2] != len(flows) {
		t.Fatalf("flows by router %v", n)
	}
	if p.pinned() != 0 {
		t.Error("there are pins without need")
	}

	out := use("1 live, 2 live, 3 live")
	if out.Pins.Added != len(flows) || out.AllPinned() != len(flows) || out.Unpinned != 0 || out.Moved == 0 {
		t.Errorf("a router came: %+v", out)
	}
	p.must("a router came", flows)
	more := p.connect(31, 60)
	if n := share(more); n[3] == 0 {
		t.Errorf("flows by router %v", n)
	}

	flows = append(flows, more...)
	use("1 draining, 2 live, 3 live")
	p.must("a router drains", flows)
	more = p.connect(61, 90)
	if n := share(more); n[1] > 0 || n[2] == 0 || n[3] == 0 {
		t.Errorf("flows by router %v", n)
	}
	flows = append(flows, more...)

	// One dies, and comes back: the routers that stay keep their flows.
	use("1 draining, 2 dead, 3 live")
	stay := slices.DeleteFunc(slices.Clone(flows), func(f flow) bool { return f.router == 2 })
	p.must("a router died", stay)
	for _, f := range flows {
		if f.router == 2 && p.routerOf(f) != 3 {
			t.Errorf("a flow of the dead router goes by %d", p.routerOf(f))
			break
		}
	}
	use("1 draining, 2 live, 3 live")
	p.must("a router came back", stay)

	// All drain: routers keep their flows, and there is no new one.
	use("1 draining, 2 draining, 3 draining")
	p.must("all routers drain", stay)
	p.WantWays(map[string]string{"192.0.2.9": "nowhere", "2001:db8::9": "nowhere"})
	use("1 draining, 2 draining, 3 draining, 4 live")
	p.must("a new router came", stay)
	if n := share(p.connect(91, 93)); n[4] != 6 {
		t.Errorf("flows by router %v", n)
	}

	// Pins end with flows.
	for _, f := range flows {
		f.Close()
	}
	testkit.Eventually(t, 10*time.Second, "pins end", func() error {
		use("2 draining, 3 live, 4 live")
		if n := p.pinned(); n != 6 {
			return fmt.Errorf("there are %d of six flows", n)
		}
		return nil
	})
	p.mustUse()
	if out := p.NS.IP(t, "nexthop") + p.NS.IP(t, "-o", "link", "show", "type", "veth"); strings.Contains(out, "nhid") || strings.Contains(out, "fou") || p.pinned() > 0 {
		t.Errorf("left: %s", out)
	}
}

// No flow moves when all routers are silent for a while: none of them would gain by it. There is no
// new one then.
func TestDirectFlowsStayWhileAllAreSilent(t *testing.T) {
	p := newDirectPod(t, 2)
	p.mustUse(directly("1 live, 2 live", beyond...))
	flows := p.connect(1, 30)
	if n := share(flows); n[1] == 0 || n[2] == 0 {
		t.Fatalf("flows by router %v", n)
	}
	p.mustUse(directly("1 dead, 2 dead", beyond...))
	p.must("all routers are silent", flows)
	p.WantWays(map[string]string{"192.0.2.99": "nowhere", "2001:db8::99": "nowhere"})
	p.mustUse(directly("1 live, 2 live", beyond...))
	p.must("all routers are back", flows)
	p.mustUse(directly("1 dead, 2 live", beyond...))
	for _, f := range flows {
		if by := p.routerOf(f); by != 2 {
			t.Errorf("a flow of router %d goes by %d though that is dead", f.router, by)
		}
	}
}

// A flow that begins while routers drain keeps the router of its first packet.
func TestDirectNewFlowsStay(t *testing.T) {
	for range testkit.EgressForm.Times(1, 2) {
		for _, then := range []string{"1 draining, 2 live, 3 live", "1 draining, 2 live, 3 draining", "1 draining, 2 draining, 3 draining, 4 live"} {
			t.Run(then, func(t *testing.T) { connectWhile(t, then) })
		}
	}
}

func connectWhile(t *testing.T, then string) {
	p := newDirectPod(t, 4)
	p.Client.Idle = 2 * time.Minute
	p.mustUse(directly("1 live, 2 live, 3 live", beyond...))
	done := make(chan struct{})
	var connecting sync.WaitGroup
	var connected atomic.Int32
	defer connecting.Wait()
	defer close(done)
	for i := range 8 {
		f := []dataplane.Family{dataplane.IPv4, dataplane.IPv6}[i%2]
		connecting.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				if err := p.useOnce(beyondAddr(f, 1+n%200)); err != nil {
					t.Errorf("a new flow of %s: %v", f, err)
				}
				connected.Add(1)
			}
		})
	}
	more := func() {
		t.Helper()
		enough := connected.Load() + 20
		testkit.Eventually(t, 10*time.Second, "there are more flows", func() error {
			if n := connected.Load(); n < enough {
				return fmt.Errorf("%d of %d", n, enough)
			}
			return nil
		})
	}
	more()
	if out, err := p.use(t.Context(), directly(then, beyond...)); err != nil || out.Unpinned > 0 {
		t.Errorf("%+v, %v", out, err)
	}
	more()
}

// A coild that is killed while it holds a router leaves new flows of it without a way: the next one
// gives them one, whatever the router is then, and keeps those that there are.
func TestDirectHeldWhenKilled(t *testing.T) {
	for _, then := range []string{"1 live, 2 live", "1 draining, 2 live", "1 dead, 2 live", "2 live"} {
		t.Run(then, func(t *testing.T) {
			p := newDirectPod(t, 2)
			out := p.mustUse(directly("1 live, 2 live", beyond...))
			flows := p.connect(1, 30)
			if n := share(flows); n[1] == 0 || n[2] == 0 {
				t.Fatalf("flows by router %v", n)
			}
			testkit.Check(t, p.network.inside(t.Context(), p.At(), func(in namespace) error {
				k := &transition{
					namespace: in, state: out.State, links: out.Links, complete: true, moves: true, seen: map[client.Flow]bool{}, out: &Outcome{},
				}
				return k.pin(t.Context(), true)
			}))
			late := p.connect(61, 90) // after it has looked
			for _, a := range routerAddrs(1) {
				link := out.Links[a]
				sink := testkit.Must(p.Links.Sink(t.Context(), p.Handle, dataplane.FamilyOf(a)))(t)
				testkit.Check(t, p.Handle.Do(t.Context(), rtnl.SetNexthop(dataplane.Nexthop{
					ID: dataplane.NexthopOf(link), Family: dataplane.FamilyOf(a), Link: sink, Protocol: dataplane.ProtocolNode,
				})))
			}
			p.mustUse(directly(then, beyond...))
			if strings.HasPrefix(then, "1 live") || strings.HasPrefix(then, "1 draining") {
				p.must("held and let go", append(flows, late...))
			}
			for f, n := range share(p.connect(31, 60)) {
				if f == 1 && then != "1 live, 2 live" {
					t.Errorf("%d new flows go by router 1", n)
				}
			}
		})
	}
}

// A coild that is told to end finishes what it has begun: no router stays held.
func TestDirectChangeIsFinished(t *testing.T) {
	p := newDirectPod(t, 2)
	p.mustUse(directly("1 live, 2 live", beyond...))
	ctx, cancel := context.WithCancel(t.Context())
	p.Links.Sinking = cancel
	if _, err := p.use(ctx, directly("1 draining, 2 live", beyond...)); !errors.Is(err, context.Canceled) {
		t.Fatalf("error is %v", err)
	}
	for by, n := range share(p.connect(1, 30)) {
		if by != 2 {
			t.Errorf("%d new flows go by router %d", n, by)
		}
	}
}

// Buckets that the kernel moves later, because a group was out of balance, take no flow along either that was
// opened in between.
func TestDirectFlowsStayWhileBucketsMove(t *testing.T) {
	p := newDirectPod(t, 3)
	p.Client.Idle = 2 * time.Second
	p.mustUse(directly("1 live, 2 live", beyond...))
	flows := p.connect(1, 200) // in most of the buckets
	p.mustUse(directly("1 live, 2 live, 3 live", beyond...))
	group := dataplane.NexthopGroupOf("net/a", dataplane.IPv4, 0)
	largest := func() int {
		n := map[uint32]int{}
		for _, b := range testkit.Must(p.Handle.Buckets(t.Context(), group))(t) {
			n[b.Nexthop]++
		}
		return slices.Max(slices.Collect(maps.Values(n)))
	}
	if n := largest(); n <= 43 {
		t.Fatalf("the group is in balance: %d", n)
	}
	flows = append(flows, p.connect(1, 200)...)
	p.mustUse(directly("1 live, 2 live, 3 live", beyond...)) // as from time to time
	testkit.Eventually(t, 30*time.Second, "the kernel has moved buckets", func() error {
		if n := largest(); n > 43 {
			return fmt.Errorf("the largest share is %d", n)
		}
		return nil
	})
	p.mustUse(directly("1 live, 2 draining, 3 live", beyond...))
	p.must("buckets moved, and a router drains", flows)
}

// A pin ends when its destination is none of the Egress any more, and its socket's end is noticed.
func TestDirectPinsEnd(t *testing.T) {
	p := newDirectPod(t, 2)
	p.mustUse(directly("1 live", "192.0.2.0/24", "2001:db8::/32"))
	flows := p.connect(1, 5)
	p.mustUse(directly("1 draining, 2 live", "192.0.2.0/24", "2001:db8::/32"))
	if p.pinned() != 10 {
		t.Fatalf("%d pins", p.pinned())
	}
	flows[0].Close()
	testkit.Eventually(t, 10*time.Second, "a pin ends with its flow", func() error {
		p.mustUse(directly("1 draining, 2 live", "192.0.2.0/24", "2001:db8::/32"))
		if n := p.pinned(); n != 9 {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
	p.mustUse(directly("1 draining, 2 live", "192.0.2.0/24"))
	if p.pinned() != 4 {
		t.Errorf("%d pins without IPv6", p.pinned())
	}
	p.mustUse(directly("2 live", "192.0.2.0/24"))
	if p.pinned() != 0 {
		t.Errorf("%d pins without the router", p.pinned())
	}
}

// Flows that are too many to be pinned are told once, when routers change.
func TestDirectMoreFlowsThanPins(t *testing.T) {
	p := newDirectPod(t, 3)
	destinations := []string{"192.0.2.0/24", "2001:db8::/32"}
	p.mustUse(directly("1 live, 2 live", destinations...))
	for _, addresses := range []int{client.MaxPins / 4, client.MaxPins / 4, 10} { // in both families
		p.connect(1, addresses)
	}
	out := p.mustUse(directly("1 live, 2 live, 3 live", destinations...))
	if p.pinned() != client.MaxPins || out.Unpinned != 20 {
		t.Errorf("%d pins, %d flows without one", p.pinned(), out.Unpinned)
	}
	for range 2 {
		if out = p.mustUse(directly("1 live, 2 live, 3 live", destinations...)); out.Unpinned != 0 {
			t.Errorf("%d flows without a pin are told again", out.Unpinned)
		}
	}
	if p.pinned() != client.MaxPins {
		t.Errorf("%d pins", p.pinned())
	}
}

// A process that knows nothing finds all as it should be, and repairs what isn't.
func TestDirectAdopted(t *testing.T) {
	p := newDirectPod(t, 3)
	e := directly("1 live, 2 live", "0.0.0.0/0", "::/0")
	p.mustUse(e)
	flows := p.connect(1, 20)
	p.network = New(dataplane.ProtocolNode, p.network.tunnels, nil)
	if out := p.mustUse(e); out.Changed() || out.Pins.Changed() {
		t.Errorf("after a restart: %+v", out)
	}
	p.idle()
	p.mustUse(directly("2 live, 3 live, 1 draining", "0.0.0.0/0", "::/0"))
	p.must("after a restart", flows)

	e = directly("2 live, 3 live, 1 draining", "0.0.0.0/0", "::/0")
	made := p.mustUse(e).State
	check := func() error { return p.check(made) }
	testkit.Check(t, check())
	link := dataplane.TunnelName(routerAddrs(2)[0], 0)
	index := testkit.Must(p.Handle.IndexByName(link))(t)
	group := dataplane.NexthopGroupOf("net/a", dataplane.IPv4, 0)
	for _, c := range []struct{ damage, says string }{
		{fmt.Sprintf("ip nexthop del id %d", group), "type resilient"},
		{fmt.Sprintf("ip nexthop del id %d", dataplane.NexthopOf(index)), fmt.Sprintf("nexthop id %#x dev", dataplane.NexthopOf(index))},
		{fmt.Sprintf("ip nexthop replace id %d group %d type resilient buckets 128 proto 30", group, dataplane.NexthopOf(index)), "type resilient buckets 128 idle_timer 20ms"},
		{fmt.Sprintf("ip route flush table %d", dataplane.TableOf(index)), "0.0.0.0/0"},
		{"ip link del " + link, link},
		{"ip route del default table 118 metric 0", "0.0.0.0/0 nhid"},
	} {
		testkit.Must(p.NS.Run("sh", "-c", c.damage))(t)
		for _, dst := range []string{"198.51.100.1", "2001:db8:1::1"} {
			if p.Escapes(dst) {
				t.Errorf("after %s, %s goes by eth0", c.damage, dst)
			}
		}
		if err := check(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("after %s: %v", c.damage, err)
		}
		p.mustUse(e)
		if err := check(); err != nil {
			t.Errorf("restored after %s: %v", c.damage, err)
		}
		p.WantWays(map[string]string{"198.51.100.1": "tunnel", "2001:db8:1::1": "tunnel", "10.7.0.1": "eth0"})
	}
}

// Flows that go by a router whose tunnel can't be looked at stay there; a router that can't be
// reached is no member.
func TestDirectWithBrokenTunnels(t *testing.T) {
	p := newDirectPod(t, 3)
	where := []string{"192.0.2.0/24", "2001:db8::/32"}
	p.mustUse(directly("1 live, 2 live", where...))
	flows := p.connect(1, 10)
	for n := range 4 {
		for _, a := range routerAddrs(n) {
			p.Links.Broken[a] = n == 3
		}
	}
	if _, err := p.use(t.Context(), directly("1 live, 2 live, 3 live", where...)); err == nil || !strings.Contains(err.Error(), "is broken") {
		t.Errorf("error %v", err)
	}
	p.must("a router can't be reached", flows)
	for n := range 4 {
		for _, a := range routerAddrs(n) {
			p.Links.Broken[a] = true
		}
	}
	if _, err := p.use(t.Context(), directly("1 draining, 2 live, 3 live", where...)); err == nil {
		t.Error("no error")
	}
	p.must("no tunnel can be looked at", flows)
	clear(p.Links.Broken)
	p.mustUse(directly("1 draining, 2 live, 3 live", where...))
	p.must("all is well", flows)
}

func TestSpread(t *testing.T) {
	for release, want := range map[string]string{
		"5.15.0-1": "1", "6.1.0-40-amd64": "1", "6.12.43+deb13-amd64": "1", "6.15.9": "1", "6.16.0-rc1": "0", "6.18.44": "0", "7.0": "0", "odd": "0",
	} {
		if got := policyOf(release); got != want {
			t.Errorf("%s: %s, want %s", release, got, want)
		}
	}
}

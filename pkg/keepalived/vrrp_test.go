package keepalived

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// takeover is how long it may take until another gateway has all addresses of a master that is gone.
const takeover = 3 * time.Second

const (
	ip4 = "10.0.0.%d"
	ip6 = "fd00::%d"
)

// One gateway has the addresses; when it is gone, another one has them soon, and the network knows it.
func TestScenario30MasterKilled(t *testing.T) {
	l := newLab(t, 2)
	a, b := l.gateways[0], l.gateways[1]
	four, six := some4(20), some6(20)
	for _, g := range l.gateways {
		g.apply(t, l.instance(g, "four", ip4, 4, 120-10*g.number, four), l.instance(g, "six", ip6, 6, 120-10*g.number, six))
	}
	l.masters(t, "four", a, b)
	l.masters(t, "six", a, b)
	all := append(append([]netip.Addr{}, four...), six...)
	worst := time.Duration(0)
	for round := range testkit.LBForm.Times(1, 20) {
		for _, to := range []netip.Addr{four[0], six[0]} {
			testkit.Eventually(t, patience, "the host reaches the master", func() error { return l.host.Ping(to, time.Second) })
		}
		start := time.Now()
		a.kill(t)
		testkit.Eventually(t, patience, "the other gateway takes over", func() error {
			if n := b.count(t, all); n < len(all) {
				return fmt.Errorf("it has %d of %d addresses", n, len(all))
			}
			// The dead daemon's addresses are still on its link: only what the new master says can change the host's mind.
			for _, to := range []netip.Addr{four[0], six[0]} {
				if got, want := l.mac(t, to), b.mac(t); got != want {
					return fmt.Errorf("the host knows %s at %s, not at %s", to, got, want)
				}
			}
			return nil
		})
		took := time.Since(start)
		worst = max(worst, took)
		t.Logf("round %d: %d addresses after %s", round, len(all), took.Round(time.Millisecond))
		a.start(t)
		l.masters(t, "four", a, b)
		l.masters(t, "six", a, b)
	}
	if worst > testkit.Limit(takeover) {
		t.Errorf("it took up to %s, more than %s", worst, testkit.Limit(takeover))
	}

	// The machine is gone, rather than its keepalived.
	pings := testkit.Must(l.host.Lab().Pings("host", four[0]))(t)
	defer pings.End()
	testkit.Eventually(t, patience, "the first answer", func() error {
		if pings.Answered() == 0 {
			return fmt.Errorf("there is none")
		}
		return nil
	})
	start := time.Now()
	l.host.Configure(t, "link set port1 down")
	testkit.Eventually(t, patience, "the other gateway answers", func() error {
		if answers := pings.Answers(); b.count(t, all) < len(all) || answers[len(answers)-1].Before(start.Add(10*time.Millisecond)) {
			return fmt.Errorf("it doesn't")
		}
		return nil
	})
	if took := time.Since(start); took > testkit.Limit(takeover) {
		t.Errorf("after %s there was no answer, more than %s", took, testkit.Limit(takeover))
	} else {
		t.Logf("link cut: answers after %s", took.Round(time.Millisecond))
	}
	testkit.Eventually(t, patience, "the cut gateway has a fault", func() error {
		if s := a.state(t, "four"); s.State != Fault || a.count(t, all) > 0 {
			return fmt.Errorf("it is %s and has %d addresses", s.State, a.count(t, all))
		}
		return nil
	})
}

// A gateway that comes back replaces the master at once, after a time, or not at all.
func TestScenario30Preemption(t *testing.T) {
	t.Parallel()
	l := newLab(t, 2)
	a, b := l.gateways[0], l.gateways[1]
	for _, g := range l.gateways {
		at, later, never := l.instance(g, "at-once", ip4, 1, 120-10*g.number, some4(3)[:1]), l.instance(g, "later", ip4, 2, 120-10*g.number, some4(3)[1:2]),
			l.instance(g, "never", ip4, 3, 120-10*g.number, some4(3)[2:])
		later.PreemptDelay, never.NoPreempt = 3*time.Second, true
		g.apply(t, at, later, never)
		for _, i := range []string{"at-once", "later", "never"} {
			testkit.Eventually(t, patience, "somebody is the master", func() error {
				if s := a.state(t, i); s.State != Master {
					return fmt.Errorf("gateway 1 is %s", s.State)
				}
				return nil
			})
		}
	}
	a.stop(t)
	l.masters(t, "later", b)
	l.masters(t, "never", b)
	a.start(t)
	l.masters(t, "at-once", a, b)
	if since := b.state(t, "later"); since.State != Master {
		t.Errorf("%s didn't wait", since.Name)
	}
	l.masters(t, "later", a, b)
	l.masters(t, "never", b, a)
}

// Two instances have different masters; one gateway has both when the other one is gone. Each family and each way of
// adverts is the same.
func TestScenario30Spread(t *testing.T) {
	t.Parallel()
	l := newLab(t, 2)
	a, b := l.gateways[0], l.gateways[1]
	four, six := some4(40), some6(40)
	kinds := []struct {
		name, source string
		multicast    bool
		addresses    []netip.Addr
	}{
		{"unicast4", ip4, false, four[:20]},
		{"multicast4", ip4, true, four[20:]},
		{"unicast6", ip6, false, six[:20]},
		{"multicast6", "fe80::%d", true, six[20:]},
	}
	for _, g := range l.gateways {
		var all []Instance
		for n, k := range kinds {
			x := l.instance(g, k.name+"-x", k.source, 2*n+1, 90+10*g.number, k.addresses[:10])
			y := l.instance(g, k.name+"-y", k.source, 2*n+2, 120-10*g.number, k.addresses[10:])
			if k.multicast {
				x.Peers, y.Peers = nil, nil
			}
			all = append(all, x, y)
		}
		g.apply(t, all...)
	}
	for _, k := range kinds {
		l.masters(t, k.name+"-x", b, a)
		l.masters(t, k.name+"-y", a, b)
	}
	b.stop(t)
	for _, k := range kinds {
		l.masters(t, k.name+"-x", a)
		l.masters(t, k.name+"-y", a)
	}
	if n := b.count(t, append(four, six...)); n > 0 {
		t.Errorf("the gateway whose keepalived was stopped has %d addresses", n)
	}
}

// Addresses come and go without a change of masters, and without a lost packet to the others, although one gateway is told
// before the other one is.
func TestAddressesComeAndGo(t *testing.T) {
	t.Parallel()
	l := newLab(t, 2)
	a, b := l.gateways[0], l.gateways[1]
	tell := func(g *gateway, four, six []netip.Addr) {
		t.Helper()
		g.apply(t, l.instance(g, "four", ip4, 4, 120-10*g.number, four), l.instance(g, "six", ip6, 6, 120-10*g.number, six))
	}
	for _, g := range l.gateways {
		tell(g, some4(2), some6(2))
	}
	for _, i := range []string{"four", "six"} {
		l.masters(t, i, a, b)
	}
	before := a.elections(t) + b.elections(t)
	for _, to := range []netip.Addr{some4(1)[0], some6(1)[0]} {
		testkit.Eventually(t, patience, "the host reaches the master", func() error { return l.host.Ping(to, time.Second) })
		pings := testkit.Must(l.host.Lab().Pings("host", to))(t)
		defer func() {
			if sent, answered, err := pings.End(); err != nil || answered < sent {
				t.Errorf("%s: %d of %d answered, %v", pings, answered, sent, err)
			}
		}()
	}
	// Whoever has the shorter list must not take the other one's adverts for bad.
	long := 4 * DefaultAdvertInterval
	for _, n := range []int{300, 1} {
		for _, g := range []*gateway{a, b} {
			tell(g, some4(n), some6(n))
			deadline := time.Now().Add(long)
			testkit.Eventually(t, patience, "several adverts", func() error {
				if time.Now().Before(deadline) {
					return fmt.Errorf("too early")
				}
				return nil
			})
			if got := a.count(t, some4(400)); got != n {
				t.Errorf("the master has %d addresses, want %d", got, n)
			}
			if got := b.count(t, append(some4(400), some6(400)...)); got > 0 {
				t.Errorf("the other gateway has %d addresses", got)
			}
		}
	}
	if got := a.elections(t) + b.elections(t); got != before {
		t.Errorf("instances have changed their states %d times", got-before)
	}
}

// Thousands of addresses are one change.
func TestManyAddresses(t *testing.T) {
	l := newLab(t, 2)
	a, b := l.gateways[0], l.gateways[1]
	all := some4(2000)
	for _, g := range l.gateways {
		g.apply(t, l.instance(g, "many", ip4, 1, 120-10*g.number, all))
	}
	l.masters(t, "many", a, b)
	start := time.Now()
	a.apply(t, l.instance(a, "many", ip4, 1, 110, all[1:]))
	t.Logf("Apply of one address less of %d: %s", len(all), time.Since(start).Round(time.Millisecond))
	start = time.Now()
	a.apply(t, l.instance(a, "many", ip4, 1, 110, all[1:]))
	t.Logf("Apply of the same: %s", time.Since(start).Round(time.Millisecond))
	l.masters(t, "many", a, b)
	start = time.Now()
	a.kill(t)
	testkit.Eventually(t, patience, "the other gateway takes over", func() error {
		if n := b.count(t, all); n < len(all) {
			return fmt.Errorf("it has %d of %d addresses", n, len(all))
		}
		return nil
	})
	if took := time.Since(start); took > testkit.Limit(takeover) {
		t.Errorf("%d addresses after %s, more than %s", len(all), took, testkit.Limit(takeover))
	} else {
		t.Logf("%d addresses after %s", len(all), took.Round(time.Millisecond))
	}
}

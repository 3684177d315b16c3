package routes

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// The router sends packets for a floating address to the node that has it: also while a former one still announces it, and when a node
// loses power.
func TestFloatingAddress(t *testing.T) {
	for _, v := range []struct {
		name string
		variant
	}{
		{"BIRD", variant{pools: both, external: true, bfd: true, daemon: onBIRD}},
		{"FRR", variant{pools: both[:1], external: true, bfd: true, daemon: onFRR("frr.conf")}},
	} {
		t.Run(v.name, func(t *testing.T) { floatingAddress(t, v.variant) })
	}
}

func floatingAddress(t *testing.T, v variant) {
	ctx := t.Context()
	c := newNetwork(t, v, 3)
	var nodes []*rig.Node
	for _, n := range c.nodes {
		nodes = append(nodes, n.Node)
	}
	f := testkit.Must(c.NewFloating(ctx, c.pool(2, 6), c.pool(0, 0), nodes...))(t)
	var prefixes []netip.Prefix
	for _, a := range f.Addrs {
		prefixes = append(prefixes, netip.PrefixFrom(a, a.BitLen()))
	}
	c.watcher.mayMove(prefixes)
	ping := func() (all []*netlab.Pinger) {
		for _, a := range f.Addrs {
			all = append(all, rigtest.Pings(t, func() (*netlab.Pinger, error) { return c.PingOutside(a) }))
		}
		return all
	}
	// moves waits until the address is at another node, and checks for how long it was silent.
	moves := func(why string, from int, pings []*netlab.Pinger) (to int) {
		t.Helper()
		c.eventually(20*time.Second, why+": another node has the address", func() error {
			h, err := f.Holding(ctx)
			if err != nil {
				return err
			}
			for i, n := range f.Candidates {
				if to = i; n.Name == h.Holder && i != from {
					return nil
				}
			}
			return fmt.Errorf("%q has it", h.Holder)
		})
		for _, p := range pings {
			before := p.Answered()
			c.eventually(20*time.Second, fmt.Sprintf("%s: %s is answered", why, p), func() error {
				if n := p.Answered() - before; n < 50 {
					return fmt.Errorf("%d answers", n)
				}
				return nil
			})
			sent, answered, _ := p.End() // the router has no route for some time
			gone := time.Duration(sent-answered) * 10 * time.Millisecond
			t.Logf("%s: %s was silent for %s", why, p, gone)
			if gone > testkit.Limit(5*time.Second) {
				t.Errorf("%s: %s was silent for %s, want at most 5s", why, p, gone)
			}
		}
		return to
	}
	claimed := func(n int) {
		t.Helper()
		c.eventually(20*time.Second, "the holder relies on its peers", func() error {
			h, err := f.Holding(ctx)
			if err == nil && (h.Holder != f.Candidates[n].Name || h.Claims == 0) {
				err = fmt.Errorf("%+v", h)
			}
			return err
		})
	}
	claimed(0)
	c.announced(c.nodes[0], prefixes...)

	pings := ping()
	pid := fmt.Sprint(f.Candidates[0].Coild.PID())
	testkit.Must(c.RunRouter(ctx, "kill", "-STOP", pid))(t)
	now := moves("coild is frozen", 0, pings)
	for _, p := range prefixes {
		if got := c.watcher.of(p); len(got) != 2 {
			t.Errorf("%s is announced by %v, want the former node, too", p, got)
		}
	}
	testkit.Must(c.RunRouter(context.WithoutCancel(ctx), "kill", "-CONT", pid))(t)
	c.announced(c.nodes[now], prefixes...)

	pings = ping()
	n := c.nodes[now]
	// As with a switch between them, the router doesn't lose the link.
	_, err := n.Run(ctx, "ip", "addr", "flush", "dev", "eth0")
	c.check(err)
	n.daemon.kill()
	n.Coild.Kill()
	next := moves("power-off", now, pings)
	c.announced(c.nodes[next], prefixes...)
}

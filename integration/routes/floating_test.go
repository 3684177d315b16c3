package routes

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// The router sends packets for a floating address to the node that has it: also while a former one still announces it, and when a node
// loses power, and the leader of the controllers with it.
func TestFloatingAddress(t *testing.T) {
	for _, v := range []struct {
		name string
		variant
		cuts int // of power, in the long form
	}{
		{"BIRD", variant{pools: both, external: true, bfd: true, daemon: onBIRD}, 20},
		{"FRR", variant{pools: both[:1], external: true, bfd: true, daemon: onFRR("frr.conf")}, 5},
	} {
		t.Run(v.name, func(t *testing.T) {
			f := newFloating(t, v.variant)
			f.frozen()
			f.powerCuts(testkit.FloatingForm.Times(1, v.cuts))
		})
	}
}

// floating is a network with an address that its nodes may have.
type floating struct {
	*network
	*rig.Floating
	prefixes []netip.Prefix
	// epoch and claims are those of the last holder.
	epoch, claims int64
}

func newFloating(t *testing.T, v variant) *floating {
	c := newNetwork(t, v, 3)
	var nodes []*rig.Node
	for _, n := range c.nodes {
		nodes = append(nodes, n.Node)
	}
	f := &floating{network: c, Floating: testkit.Must(c.NewFloating(t.Context(), c.pool(2, 6), c.pool(0, 0), nodes...))(t)}
	for _, a := range f.Addrs {
		f.prefixes = append(f.prefixes, netip.PrefixFrom(a, a.BitLen()))
	}
	c.watcher.mayMove(f.prefixes)
	f.relies(0)
	c.announced(c.nodes[0], f.prefixes...)
	return f
}

// relies waits until a node has the address and needs no API server to keep it, but its peers.
func (f *floating) relies(i int) {
	f.t.Helper()
	f.eventually(20*time.Second, "the holder relies on its peers", func() error {
		h, err := f.Holding(f.t.Context())
		if err == nil && (h.Holder != f.Candidates[i].Name || h.Epoch != f.epoch && h.Claims == f.claims) {
			err = fmt.Errorf("%+v", h)
		}
		if err == nil {
			f.epoch, f.claims = h.Epoch, h.Claims
		}
		return err
	})
}

// pings pings the address from the router, in each of its families.
func (f *floating) pings() (all []*netlab.Pinger) {
	for _, a := range f.Addrs {
		all = append(all, rigtest.Pings(f.t, func() (*netlab.Pinger, error) { return f.PingOutside(a) }))
	}
	return all
}

// holder waits until a node has the address, but the one that had it, and returns which.
func (f *floating) holder(why string, but int) (is int) {
	f.t.Helper()
	f.eventually(20*time.Second, why+": another node has the address", func() error {
		h, err := f.Holding(f.t.Context())
		if err != nil {
			return err
		}
		is = slices.IndexFunc(f.Candidates, func(n *rig.Node) bool { return n.Name == h.Holder })
		if is < 0 || is == but {
			return fmt.Errorf("%q has it", h.Holder)
		}
		return nil
	})
	return is
}

// moves waits until another node has the address, and returns which, and for how long the address was silent.
func (f *floating) moves(why string, from int, pings []*netlab.Pinger) (to int, silent time.Duration) {
	f.t.Helper()
	to = f.holder(why, from)
	for _, p := range pings {
		before := p.Answered()
		f.eventually(20*time.Second, fmt.Sprintf("%s: %s is answered", why, p), func() error {
			if n := p.Answered() - before; n < 50 {
				return fmt.Errorf("%d answers", n)
			}
			return nil
		})
		sent, answered, _ := p.End() // the router has no route for some time
		gone := time.Duration(sent-answered) * 10 * time.Millisecond
		f.t.Logf("%s: %s was silent for %s", why, p, gone)
		if gone > testkit.Limit(5*time.Second) {
			f.t.Errorf("%s: %s was silent for %s, want at most 5s", why, p, gone)
		}
		silent = max(silent, gone)
	}
	return to, silent
}

// frozen stops coild of the holder, which announces the address still when another node has it.
func (f *floating) frozen() {
	f.t.Helper()
	ctx := f.t.Context()
	pings := f.pings()
	pid := fmt.Sprint(f.Candidates[0].Coild.PID())
	testkit.Must(f.RunRouter(ctx, "kill", "-STOP", pid))(f.t)
	now, _ := f.moves("coild is frozen", 0, pings)
	for _, p := range f.prefixes {
		if got := f.watcher.of(p); len(got) != 2 {
			f.t.Errorf("%s is announced by %v, want the former node, too", p, got)
		}
	}
	testkit.Must(f.RunRouter(context.WithoutCancel(ctx), "kill", "-CONT", pid))(f.t)
	f.announced(f.nodes[now], f.prefixes...)
}

// powerCuts cuts the power of the node that has the address, again and again. No controller runs until another node has it.
func (f *floating) powerCuts(times int) {
	f.t.Helper()
	ctx := f.t.Context()
	var silent []time.Duration
	now := f.holder("before", -1)
	for {
		pings, n := f.pings(), f.nodes[now]
		// As with a switch between them, the router doesn't lose the link.
		_, err := n.Run(ctx, "ip", "addr", "flush", "dev", "eth0")
		f.check(err)
		n.daemon.kill()
		n.Coild.Kill()
		f.check(f.KillController(ctx))
		next, gone := f.moves("power-off", now, pings)
		f.check(f.Controller.Start())
		f.announced(f.nodes[next], f.prefixes...)
		if silent = append(silent, gone); len(silent) == times {
			break
		}
		f.back(now, next)
		now = next
	}
	if slices.Sort(silent); times > 1 {
		f.t.Logf("silent for %s after power cuts", silent)
		if median := silent[times/2]; median > testkit.Limit(4*time.Second) {
			f.t.Errorf("after %d power cuts the address was silent for %s (median), want at most 4s", times, median)
		}
	}
}

// back boots a node, and makes it the last that takes the address from its holder.
func (f *floating) back(i, holder int) {
	f.t.Helper()
	ctx, n := f.t.Context(), f.nodes[i]
	f.check(n.PowerCut(ctx), n.PowerOn(ctx), n.daemon.start(ctx), n.Start(ctx), f.NewRouter(ctx, i), f.Place(ctx, "", holder, 3-i-holder, i))
	for _, n := range f.nodes {
		f.announced(n, f.blocks(n)...)
	}
	f.relies(holder)
}

package crash

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
)

// translates waits until the node translates for the routers, each with one transit address of a family, and has nothing else.
func (c *cluster) translates(n *rig.Node, routers ...*rig.Sandbox) {
	c.t.Helper()
	testkit.Eventually(c.t, 20*time.Second, fmt.Sprintf("%s translates for %d routers", n.Name, len(routers)), func() error {
		out, err := n.NodeAddress(c.t.Context(), routers...)
		if err != nil {
			return err
		}
		lo, routes := 0, 0
		for line := range strings.Lines(out) {
			if addr, is := strings.CutPrefix(strings.TrimSpace(line), "lo "); is {
				addr, _, _ = strings.Cut(addr, "/")
				// Its route, and the sets of routers and of addresses. Another router's address isn't counted twice.
				if lo++; strings.Count(out, addr+" via ")+strings.Count(out, addr+" nhid") != 1 || !strings.Contains(out, ". "+addr) {
					return errors.New(out)
				}
			}
			if strings.Contains(line, " via ") {
				routes++
			}
		}
		if lo != 2*len(routers) || routes != 2*len(routers) || strings.Contains(out, "table inet") != (len(routers) > 0) {
			return errors.New(out)
		}
		return nil
	})
}

// coild is killed at each step by which a node begins to translate for a router, and by which it ceases. When it is back the node translates for the routers
// that there are, and for no others.
func TestKilledWhileItTranslates(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 4)
	ctx, n := t.Context(), c.node(rig.NodeOptions{})
	var all []faultpoint.Point
	for range testkit.CrashForm.Times(1, 10) {
		all = append(all, faultpoint.Transit...)
	}
	start := func(p faultpoint.Point) {
		t.Helper()
		n.Coild.Kill()
		if n.Coild.Faults = ""; p != "" {
			n.Coild.Faults = string(p) + "=1"
		}
		c.check(n.Start(ctx))
	}
	dies := func(p faultpoint.Point) {
		t.Helper()
		select {
		case <-n.Coild.Ended():
		case <-time.After(testkit.Timeout(20 * time.Second)):
			t.Fatalf("coild never passed %s", p)
		}
	}
	for i, p := range all {
		egress := fmt.Sprintf("out-%d", i)
		router := testkit.Must(n.NewEgressRouter(ctx, c.pools[0], egress))(t)
		start(p)
		c.check(c.NewNodeAddressEgress(ctx, c.pools[0], egress))
		dies(p)
		start("")
		c.translates(n, router)

		// The table goes, and the routes have gone with the link.
		start(faultpoint.TransitTabled)
		_ = router.Del(ctx) // coild may end before it answers
		dies(faultpoint.TransitTabled)
		start("")
		c.check(router.Del(ctx), router.Close())
		c.translates(n)
	}
	// A router goes while coild is away.
	c.check(c.NewNodeAddressEgress(ctx, c.pools[0], "out"))
	router, other := testkit.Must(n.NewEgressRouter(ctx, c.pools[0], "out"))(t), testkit.Must(n.NewEgressRouter(ctx, c.pools[0], "out"))(t)
	c.translates(n, router, other)
	n.Coild.Kill()
	c.check(router.RemoveNetns())
	start("")
	c.translates(n, other)
	c.check(router.Del(ctx), router.Close(), other.Del(ctx), other.Close())
	c.translates(n)
}

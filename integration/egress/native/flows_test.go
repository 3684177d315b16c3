package native

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/flows"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// flowPort is where the server of flows is.
const flowPort = 7000

// crowd is a world whose pods have flows by one pair of addresses.
type crowd struct {
	*world
	sources []netip.Addr
}

// newCrowd returns a world with an Egress of one pair of addresses. Routers take part in no connection that they haven't seen begin, and nodes
// neither.
func newCrowd(t *testing.T) *crowd {
	c := &crowd{world: newWorld(t, 3, 1, nil)}
	// A machine that is busy isn't a router that fails: its address would move without its connections.
	c.egress.Patience = 5 * time.Second
	// A router that ends forwards until its clients know another one, as with the flag's default.
	c.egress.Flags = []string{"--drain-period=4s"}
	for _, r := range c.egress.Routers() {
		testkit.Check(t, r.Remove(t.Context()))
	}
	for _, n := range c.nodes {
		c.strict(n)
		c.addRouter(n)
	}
	c.awaitHeld()
	c.choose("crowd", "crowd")
	c.sources = c.world.sources("crowd")
	return c
}

const strictly = "net.netfilter.nf_conntrack_tcp_loose=0"

// addRouter adds a router.
func (c *crowd) addRouter(n *rig.Node) {
	c.t.Helper()
	r := testkit.Must(c.egress.AddRouter(c.t.Context(), n))(c.t)
	testkit.Must(r.Run(c.t.Context(), "sysctl", "-w", strictly))(c.t)
}

// strict lets a node drop packets of connections that it doesn't know, as kube-proxy does, and translate the sources of all that leaves the
// cluster, as CNI plugins do.
func (c *crowd) strict(n *rig.Node) {
	c.t.Helper()
	const rules = `add table inet strict
add chain inet strict forward { type filter hook forward priority 0; }
add rule inet strict forward ct state invalid drop
add chain inet strict leave { type nat hook postrouting priority 100; }
add rule inet strict leave ip daddr 203.0.113.0/24 masquerade
add rule inet strict leave ip6 daddr 2001:db8:f::/64 masquerade
`
	rigtest.Sh(c.t, n, "echo '"+rules+"' | nft -f -; sysctl -w "+strictly)
}

// talking are flows, and what is counted where their server is.
type talking struct {
	*flows.Set
	guard *flows.Guard
}

// opens opens flows from pods, n of them in all, half of them in each family.
func (c *crowd) opens(n int, pods ...*pod) talking {
	c.t.Helper()
	ctx := c.t.Context()
	var at []netip.AddrPort
	for _, a := range servers {
		at = append(at, netip.AddrPortFrom(a, flowPort))
	}
	every := time.Duration(testkit.FloatingForm.Times(500, 1000)) * time.Millisecond
	s := testkit.Must(flows.Serve(ctx, c.server, every, at...))(c.t)
	c.t.Cleanup(func() { testkit.Check(c.t, s.Close()) })
	guard := testkit.Must(flows.NewGuard(ctx, c.server, flowPort, c.sources...))(c.t)
	var all errgroup.Group
	for _, p := range pods {
		all.Go(func() error {
			ns, err := netlab.Open(p.Path)
			if err != nil {
				return err
			}
			return errors.Join(s.Open(ctx, ns, n/len(pods)/len(at)), ns.Close())
		})
	}
	testkit.Check(c.t, all.Wait())
	return talking{s, guard}
}

// pods adds pods to nodes, and waits until they leave by the address.
func (c *crowd) pods(nodes ...*rig.Node) (all []*pod) {
	c.t.Helper()
	for _, n := range nodes {
		all = append(all, c.newPod(n, "crowd"))
	}
	for _, p := range all {
		for _, to := range servers {
			testkit.Eventually(c.t, 20*time.Second, fmt.Sprintf("%s leaves by the address", p), func() error {
				got, err := p.seen(c.t.Context(), to)
				if err == nil && got != family(c.sources, to) {
					err = fmt.Errorf("it leaves by %s", got)
				}
				return err
			})
		}
	}
	return all
}

// block is the AddressBlock of the address.
func (c *crowd) block() *v2.AddressBlock {
	c.t.Helper()
	return testkit.Must(c.Coil.CoilV2().AddressBlocks().Get(c.t.Context(), c.addresses[0].Block, metav1.GetOptions{}))(c.t)
}

// holder returns the router that has the address.
func (c *crowd) holder() *rig.Router {
	c.t.Helper()
	uid := c.block().Floating.Holding.PodUID
	routers := c.egress.Routers()
	i := slices.IndexFunc(routers, func(r *rig.Router) bool { return types.UID(r.UID) == uid })
	if i < 0 {
		c.t.Fatalf("no router has the UID %s", uid)
	}
	return routers[i]
}

// moved waits until another router has the address.
func (c *crowd) moved(from *rig.Router) {
	c.t.Helper()
	testkit.Eventually(c.t, 20*time.Second, "the address moves", func() error {
		h := c.block().Floating.Holding
		if h.Holder == "" || h.Holder == from.Node.Name {
			return fmt.Errorf("%+v", h)
		}
		return nil
	})
}

// talk waits until all flows have delivered something, again and again for some time.
func (c *crowd) talk(s talking, what string, least time.Duration) {
	c.t.Helper()
	for end := time.Now().Add(least); ; {
		now := time.Now()
		testkit.Eventually(c.t, 60*time.Second, what+": all flows talk", func() error { return s.Talked(now) })
		if now.After(end) {
			return
		}
	}
}

// fared checks how flows have fared since a moment.
func (c *crowd) fared(s talking, what string, moment time.Time) flows.Report {
	c.t.Helper()
	r := s.Since(moment)
	c.t.Logf("%s: %s", what, r)
	if len(r.Broken) > 0 {
		c.t.Errorf("%s: %d of %d flows are broken, such as %s", what, len(r.Broken), r.Flows, r.Broken[0])
	}
	if !slices.Equal(r.Sources, c.sources) {
		c.t.Errorf("%s: the server sees %v, want %v", what, r.Sources, c.sources)
	}
	testkit.Check(c.t, s.guard.Check(c.t.Context()))
	return r
}

// Thousands of connections live on, and none is silent for 300 ms longer than before, when the router that has their address is ending. None
// breaks when that router isn't ready for a moment, nor, with a standby, when its node loses power, and with it the leaders of the controllers.
func TestFlowsLiveOn(t *testing.T) {
	c := newCrowd(t)
	t.Run("a router ends", func(t *testing.T) { c.on(t).routerEnds() })
	t.Run("a router isn't ready", func(t *testing.T) { c.on(t).routerIsUnready() })
	t.Run("a power cut", func(t *testing.T) { c.on(t).powerCut() })
}

// on is the crowd in a subtest.
func (c *crowd) on(t *testing.T) *crowd {
	w := *c.world
	w.t = t
	return &crowd{&w, c.sources}
}

func (c *crowd) routerEnds() {
	ctx := c.t.Context()
	n := testkit.FloatingForm.Times(200, 5000)
	s := c.opens(n, c.pods(append(slices.Clone(c.nodes), c.nodes...)...)...)
	for i := range testkit.FloatingForm.Times(1, 3) {
		c.talk(s, "before", time.Duration(testkit.FloatingForm.Times(2, 11))*time.Second)
		from, moment := c.holder(), time.Now()
		gone := make(chan error, 1)
		go func() { gone <- from.Delete(ctx) }()
		c.moved(from)
		took := time.Since(moment)
		c.talk(s, "after the router has ended", time.Duration(testkit.FloatingForm.Times(2, 5))*time.Second)
		testkit.Check(c.t, <-gone)
		c.talk(s, "when it is gone", 0)
		what := fmt.Sprintf("move %d, in %s", i, took)
		r := c.fared(s, what, moment)
		// A machine that does other things as well, as in the short form, delays some words for longer.
		if over := r.Over(testkit.Limit(300 * time.Millisecond)); testkit.FloatingForm.Long() && len(over) > 0 {
			c.t.Errorf("%s: %d of %d flows were silent for 300ms longer than before, and more, such as %s", what, len(over), r.Flows, r.Longer())
		}
		c.addRouter(from.Node)
		c.awaitHeld()
	}
	testkit.Check(c.t, s.Close())
}

// routerIsUnready lets probes of the router that has the address fail for a moment.
func (c *crowd) routerIsUnready() {
	s := c.opens(100, c.pods(append(slices.Clone(c.nodes), c.nodes...)...)...)
	c.talk(s, "before", time.Second)
	from, moment := c.holder(), time.Now()
	from.SetUnready(true)
	c.moved(from)
	took := time.Since(moment)
	from.SetUnready(false)
	c.talk(s, "after the router wasn't ready", 2*time.Second)
	c.fared(s, fmt.Sprintf("a router that wasn't ready, in %s", took), moment)
	testkit.Check(c.t, s.Close())
	c.awaitHeld()
}

func (c *crowd) powerCut() {
	ctx := c.t.Context()
	egresses := c.Coil.CoilV2().Egresses(c.egress.Namespace)
	testkit.Must(egresses.Patch(ctx, c.egress.Name, types.MergePatchType, []byte(`{"spec":{"addresses":{"standby":true}}}`), metav1.PatchOptions{}))(c.t)
	from := c.holder()
	others := slices.DeleteFunc(slices.Clone(c.nodes), func(n *rig.Node) bool { return n == from.Node })
	inStep := func() {
		testkit.Eventually(c.t, 30*time.Second, "connections are copied", func() error {
			b := c.block()
			if !meta.IsStatusConditionTrue(b.Status.Conditions, v2.BlockStandbyInStep) {
				return fmt.Errorf("%+v", b.Status.Conditions)
			}
			return nil
		})
	}
	inStep()
	s := c.opens(testkit.FloatingForm.Times(100, 1500), c.pods(append(slices.Clone(others), others...)...)...)
	c.talk(s, "before", time.Second) // which makes them older than a second
	if h := c.holder(); h != from {
		c.t.Fatalf("%s has the address now, before it was %s", h, from)
	}
	moment := time.Now()
	c.controller.Kill()
	testkit.Check(c.t, c.KillController(ctx))
	defer func() { testkit.Check(c.t, c.Controller.Start()) }()
	c.forwarding[from.Node].Kill()
	testkit.Check(c.t, from.Lose(), from.Node.PowerCut(ctx))
	c.moved(from)
	took := time.Since(moment)
	c.talk(s, "after the power cut", 2*time.Second)
	c.fared(s, fmt.Sprintf("a power cut, another node has the address after %s", took), moment)
	testkit.Check(c.t, s.Close(), from.Node.PowerOn(context.WithoutCancel(ctx)))
}

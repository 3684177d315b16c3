package routes

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// probe is netlab.NS.Probe from the network namespace at a path.
func probe(path string, to netip.Addr, within time.Duration) ([]netlab.Answer, error) {
	ns, err := netlab.Open(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	return ns.Probe(to, within)
}

// refused ends the test unless a packet from a network namespace to an address that no
// pod has is answered once, as unreachable, by a node.
func (c *network) refused(path string, to netip.Addr, by *node) {
	c.t.Helper()
	want := netlab.Answer{From: by.Addr4, Kind: netlab.Unreachable}
	if to.Is6() {
		want.From = by.Addr6
	}
	// The kernel sends one such answer a second (net.ipv4.icmp_ratelimit).
	c.eventually(15*time.Second, fmt.Sprintf("an answer to a packet to %s", to), func() error {
		got, err := probe(path, to, testkit.Timeout(400*time.Millisecond))
		c.check(err)
		if slices.ContainsFunc(got, func(a netlab.Answer) bool { return a.Kind != netlab.Unreachable }) || len(got) > 1 {
			c.t.Fatalf("a packet to %s is answered %v, want %v", to, got, want)
		}
		if len(got) == 0 || got[0] != want {
			return fmt.Errorf("answers are %v, want %v", got, want)
		}
		return nil
	})
}

// free returns an address of each of a node's blocks that nobody has, or has had.
func (c *network) free(n *node, pool string) []netip.Addr {
	c.t.Helper()
	var all []netip.Addr
	for _, p := range c.blocks(n, pool) {
		// The last one is given last, and pools of these tests are never used up.
		a := p.Masked().Addr()
		for next := a; p.Contains(next); next = next.Next() {
			a = next
		}
		all = append(all, a)
	}
	return all
}

// connect ends the test unless a connection from somewhere reaches an address of a
// pod, and returns where the pod sees it coming from.
func (c *network) connect(dial netlab.Dialer, from string, to *rig.Sandbox, addr netip.Addr) netip.Addr {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), testkit.Timeout(10*time.Second))
	defer cancel()
	source, err := to.Reach(ctx, addr, dial)
	if err != nil {
		c.t.Fatalf("%s doesn't reach %s: %v", from, to, err)
	}
	return source
}

// A probe tells a loop from an answer: without the rule to its unreachable routes, a node
// sends a packet back to the router.
func TestProbeSeesLoops(t *testing.T) {
	c := newNetwork(t, variant{pools: both, external: true, daemon: onBIRD}, 2)
	pool := c.pool(5, 8)
	c.pod(c.nodes[0], pool)
	from := c.pod(c.nodes[1], pool)
	for _, n := range c.nodes {
		c.announced(n, c.blocks(n, pool)...)
	}
	n := c.nodes[0]
	n.Coild.Kill() // it would heal
	for _, family := range []string{"-4", "-6"} {
		_, err := n.Run(t.Context(), "ip", family, "rule", "del", "pref", "2001")
		c.check(err)
	}
	for _, a := range c.free(n, pool) {
		c.eventually(10*time.Second, fmt.Sprintf("a loop of packets to %s", a), func() error {
			got, err := probe(from.Path, a, testkit.Timeout(400*time.Millisecond))
			c.check(err)
			if !slices.ContainsFunc(got, func(a netlab.Answer) bool { return a.Kind == netlab.Looped }) {
				return fmt.Errorf("answers are %v", got)
			}
			return nil
		})
	}
}

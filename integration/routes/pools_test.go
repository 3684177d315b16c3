package routes

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// onTwo returns two nodes that run BIRD.
func onTwo(t *testing.T, families, pools []rig.Family) *network {
	return newNetwork(t, variant{families: families, pools: pools, external: true, daemon: onBIRD}, 2)
}

// sees waits until the remote peer, the second node's BIRD, has exactly these routes of the
// first node by its router.
func (c *network) sees(want ...netip.Prefix) {
	c.t.Helper()
	remote := c.nodes[1].daemon.(*bird)
	c.eventually(20*time.Second, "routes at the remote peer", func() error {
		all, err := remote.routes()
		if err != nil {
			return err
		}
		var got []netip.Prefix
		for _, a := range all {
			if a.origin == "router4" || a.origin == "router6" {
				got = append(got, a.prefix)
			}
		}
		if !sameSet(got, want) {
			return fmt.Errorf("%v, want %v", got, want)
		}
		return nil
	})
}

// sizes ends the test unless there is one prefix of each family of the network's pools, and
// each has room for 2^bits addresses.
func (c *network) sizes(bits int, prefixes []netip.Prefix) {
	c.t.Helper()
	if len(prefixes) != len(c.how.pools) {
		c.t.Errorf("there are %d prefixes %v, want %d", len(prefixes), prefixes, len(c.how.pools))
	}
	for _, p := range prefixes {
		if p.Addr().BitLen()-p.Bits() != bits {
			c.t.Errorf("%s has not 2^%d addresses", p, bits)
		}
	}
}

// Blocks of one address and the largest ones are announced as what they are.
func TestBlockSizes(t *testing.T) {
	c := onTwo(t, nil, both)
	n := c.nodes[0]
	from := c.pod(c.nodes[1], c.pool(3, 8))
	c.announced(c.nodes[1], c.blocks(c.nodes[1])...)
	one, large := c.pool(0, 4), c.pool(16, 16)
	single := c.pod(n, one)
	c.sizes(0, c.blocks(n, one))
	c.sees(c.blocks(n, one)...)
	c.reach(from, single)
	big := c.pod(n, large)
	c.sizes(16, c.blocks(n, large))
	c.sees(c.blocks(n)...)
	c.reach(from, big)
	c.reach(single, big)
	for _, a := range c.free(n, large) {
		c.refused(from.Path, a, n)
	}
	// The address of a pod that is gone is nobody's, but the block is still there (N7).
	gone := c.addrs(single)
	c.check(n.Restart(t.Context()))
	c.reach(from, single)
	c.end(single)
	c.sees(c.blocks(n, large)...)
	for _, a := range gone {
		got, err := probe(from.Path, a, 500*time.Millisecond)
		c.check(err)
		if slices.ContainsFunc(got, func(a netlab.Answer) bool { return a.Kind != netlab.Unreachable }) {
			t.Errorf("packets to %s, which was withdrawn, are answered %v", a, got)
		}
	}
	c.reach(from, big)
}

// A pool that is used up gets a subnet; its blocks are announced beside the old ones.
func TestSubnetAddedInUse(t *testing.T) {
	ctx := t.Context()
	c := onTwo(t, nil, both)
	n := c.nodes[0]
	name := c.pool(1, 1)
	from := c.pod(c.nodes[1], c.pool(3, 8))
	first, second := c.pod(n, name), c.pod(n, name)
	old := c.blocks(n, name)
	c.sees(old...)
	full := c.sandbox(n, name)
	if _, err := full.Add(ctx); err == nil {
		t.Fatal("the pool has more addresses than its subnet")
	}
	mark := c.watcher.mark()
	added := c.subnet(4)
	c.check(retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the controller writes its status
		pool, err := c.Coil.CoilV2().AddressPools().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		pool.Spec.Subnets = append(pool.Spec.Subnets, added)
		_, err = c.Coil.CoilV2().AddressPools().Update(ctx, pool, metav1.UpdateOptions{})
		return err
	}))
	c.check(testkit.Within(ctx, 20*time.Second, func() error { _, err := full.Add(ctx); return err }))
	now := c.blocks(n, name)
	if len(now) != 2*len(old) || !slices.Equal(now[:len(old)], old) {
		t.Errorf("the node has %v, want one block more than %v", now, old)
	}
	c.sees(now...)
	for _, pod := range []*rig.Sandbox{first, second, full} {
		c.reach(from, pod)
	}
	withdrawn := c.watcher.since(mark, func(ch change) bool { return ch.withdrawn })
	if len(withdrawn) > 0 {
		t.Errorf("withdrawn when the subnet was added: %q", withdrawn)
	}
}

// Blocks of two pools are announced side by side; when one pool's go back, the other's stay.
func TestTwoPools(t *testing.T) {
	c := onTwo(t, nil, both)
	n := c.nodes[0]
	from := c.pod(c.nodes[1], c.pool(3, 8))
	a, b := c.pool(3, 8), c.pool(5, 10)
	inA, inB := c.pod(n, a), c.pod(n, b)
	ofA, ofB := c.blocks(n, a), c.blocks(n, b)
	c.sizes(3, ofA)
	c.sizes(5, ofB)
	c.sees(slices.Concat(ofA, ofB)...)
	c.reach(from, inA)
	c.reach(from, inB)
	c.reach(inA, inB)
	mark := c.watcher.mark()
	c.end(inA)
	c.sees(ofB...)
	lost := c.watcher.since(mark, func(ch change) bool { return slices.Contains(ofB, ch.prefix) })
	if len(lost) > 0 {
		t.Errorf("while blocks of another pool went back: %q", lost)
	}
	c.reach(from, inB)
}

// Nodes, pools and pods that have IPv6 only.
func TestIPv6Only(t *testing.T) { families(t, both[1:], both[1:]) }

// Both families, IPv6 first.
func TestIPv6First(t *testing.T) {
	families(t, []rig.Family{rig.IPv6, rig.IPv4}, both)
}

// families checks that pods on nodes of these families reach each other and that the
// rest of their blocks is unreachable.
func families(t *testing.T, nodes, pools []rig.Family) {
	t.Helper()
	c := onTwo(t, nodes, pools)
	pool := c.pool(5, 10)
	s := &scenario{network: c, pool: pool}
	for _, n := range c.nodes {
		s.pods = append(s.pods, c.pod(n, pool))
	}
	for _, n := range c.nodes {
		c.sizes(5, c.blocks(n, pool))
		c.announced(n, c.blocks(n, pool)...)
	}
	c.sees(c.blocks(c.nodes[0], pool)...)
	s.everybody()
	s.unassigned()
	s.killed()
}

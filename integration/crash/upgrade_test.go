package crash

import (
	"errors"
	"os"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// Running pods notice nothing when their nodes' coild is replaced: of pings every 10 ms between
// pods of a node, and of two nodes, each is answered.
func TestUpgradeLosesNoPacket(t *testing.T) {
	// Not parallel: what is measured is coild, not how busy the machine is.
	c := newCluster(t, 3)
	ctx := t.Context()
	nodes := []*rig.Node{c.node(rig.NodeOptions{}), c.node(rig.NodeOptions{})}
	a, b, far := c.pod(nodes[0]), c.pod(nodes[0]), c.pod(nodes[1])
	for i, n := range nodes {
		blocks, err := n.Blocks(ctx)
		c.check(err)
		for _, k := range blocks {
			_, err4 := nodes[1-i].Run(ctx, "ip", "route", "add", *k.IPv4, "via", n.Addr4.String())
			_, err6 := nodes[1-i].Run(ctx, "ip", "route", "add", *k.IPv6, "via", n.Addr6.String())
			c.check(err4, err6)
		}
	}
	var pings []*netlab.Pinger
	for _, pair := range [][2]*rig.Sandbox{{a, b}, {b, a}, {a, far}, {far, b}} {
		for _, to := range c.Ledger.Live()[pair[1]] {
			pings = append(pings, rigtest.Pings(t, func() (*netlab.Pinger, error) { return pair[0].Ping(to) }))
		}
	}
	for round := range 3 {
		for _, leave := range []func(*rig.Node){func(n *rig.Node) { n.Coild.Stop() }, func(n *rig.Node) { n.Coild.Kill() }} {
			for _, n := range nodes {
				leave(n)
			}
			// An upgrade takes a while: coild must be away for a number of pings.
			c.awaitPings(pings, 30)
			for _, n := range nodes {
				c.replace(n)
				c.check(n.Start(ctx))
			}
			c.awaitPings(pings, 30)
			// Others come and go meanwhile.
			c.check(end(ctx, c.pod(nodes[round%2])))
		}
	}
	for _, p := range pings {
		sent, answered, err := p.End()
		if err != nil || answered != sent || sent < 300 {
			t.Errorf("%s: %d of %d pings were answered, want all: %v", p, answered, sent, err)
		} else {
			t.Logf("%s: %d of %d", p, answered, sent)
		}
	}
	c.clean()
}

// awaitPings waits until some more of all pings were answered.
func (c *cluster) awaitPings(pings []*netlab.Pinger, more int) {
	c.t.Helper()
	start := make([]int, len(pings))
	for i, p := range pings {
		start[i] = p.Answered()
	}
	testkit.Eventually(c.t, 30*time.Second, "pings are answered", func() error {
		for i, p := range pings {
			if p.Answered() < start[i]+more {
				return errors.New(p.String())
			}
		}
		return nil
	})
}

// replace makes the node's coild another file, as a new image does.
func (c *cluster) replace(n *rig.Node) {
	c.t.Helper()
	program, err := os.ReadFile(n.Coild.Path)
	c.check(err)
	f, err := os.CreateTemp(c.t.TempDir(), "coild-*")
	c.check(err)
	_, err = f.Write(program)
	c.check(err, f.Chmod(0o755), f.Close())
	n.Coild.Path = f.Name()
}

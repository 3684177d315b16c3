// Package routes proves that the blocks of nodes are routed by the daemons that
// people use, with the configuration of manifests/routing: BIRD 2 and FRR from Debian
// packages, on nodes that share no layer-2 network, with a router between them.
//
// Each test has nodes, pools and daemons of its own in one rig, and nothing of them
// outlives it. A watcher reads the router's table all the while: that no prefix is
// announced by two nodes is a part of every test.
package routes

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/lab/preflight"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// shared is the rig of all tests.
var shared = rigtest.Shared{Check: func() error { return preflight.Check(preflight.Routing) }}

func TestMain(m *testing.M) { shared.Main(m) }

// quick are flags that let things happen within a test's patience.
var quick = []string{"--cool-down=1s", "--block-min-age=500ms", "--sweep-interval=1s", "--block-timeout=5s"}

// both are the families.
var both = []rig.Family{rig.IPv4, rig.IPv6}

// network is one test's: nodes with a daemon each, and a router that runs BIRD.
type network struct {
	*rig.Rig
	t       testing.TB
	how     variant
	dir     string // of the daemons
	router  *bird
	watcher *watcher
	nodes   []*node
}

// node is a node of the rig with its routing daemon.
type node struct {
	*rig.Node
	daemon daemon
	number int // in the network, from 1
	as     int
	bfd    bool
	// routers has the router's address in each of the node's families.
	routers map[rig.Family]netip.Addr
}

// speaker is the node's name at the router, without the family.
func (n *node) speaker() string { return fmt.Sprintf("node%d", n.number) }

// newNetwork makes one with so many nodes; the routers have a session with each in
// each family.
func newNetwork(t testing.TB, how variant, count int) *network {
	t.Helper()
	r := shared.Rig(t)
	c := &network{Rig: r, t: t, how: how}
	t.Cleanup(c.remove)
	var err error
	if c.dir, err = os.MkdirTemp(r.Dir(), "routes-"); err != nil {
		t.Fatal(err)
	}
	for i := range count {
		c.addNode(i + 1)
	}
	c.router = newBIRD(filepath.Join(c.dir, "router"), r.RouterNetnsPath, routerConf(c.nodes))
	c.check(c.router.start(t.Context()))
	c.watcher = watch(t, c.router.announced)
	for _, n := range c.nodes {
		c.check(n.daemon.start(t.Context()))
	}
	return c
}

func (c *network) addNode(number int) {
	c.t.Helper()
	n, err := c.AddNode(c.t.Context(), rig.NodeOptions{
		CoildFlags: append(slices.Clone(quick), c.how.flags...), Segment: true, Families: c.how.families,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	as := routerAS
	if c.how.external {
		as += number
	}
	made := &node{Node: n, number: number, as: as, bfd: c.how.bfd, routers: map[rig.Family]netip.Addr{}}
	for _, f := range both {
		if a := n.RouterAddr(f); a.IsValid() {
			made.routers[f] = a
		}
	}
	made.daemon = c.how.daemon(c.t, made, filepath.Join(c.dir, n.Name))
	c.nodes = append(c.nodes, made)
}

// remove removes the daemons and the nodes; the pools stay.
func (c *network) remove() {
	ctx := context.WithoutCancel(c.t.Context())
	for _, n := range c.nodes {
		if c.t.Failed() {
			c.t.Logf("the end of the log of coild of %s:\n%s", n.Name, n.Coild.Logs(30))
			c.t.Logf("the end of the log of the daemon of %s:\n%s", n.Name, n.daemon.logs(30))
		}
		n.daemon.kill()
		if err := n.Remove(ctx); err != nil {
			c.t.Errorf("remove %s: %v", n.Name, err)
		}
	}
	if c.router != nil {
		if c.t.Failed() {
			c.t.Logf("the end of the log of the router:\n%s", c.router.logs(60))
		}
		c.router.kill()
	}
	if err := os.RemoveAll(c.dir); err != nil {
		c.t.Error(err)
	}
}

// check ends the test if there is an error.
func (c *network) check(errs ...error) {
	c.t.Helper()
	testkit.Check(c.t, errs...)
}

// number makes the ranges of pools unique.
var number struct {
	sync.Mutex
	pools int
}

// subnet returns ranges of 2^bits addresses that nobody else has, in the families of
// the network's pools.
func (c *network) subnet(bits int) v2.SubnetSet {
	number.Lock()
	number.pools++
	n := number.pools
	number.Unlock()
	four, six := fmt.Sprintf("10.%d.0.0/%d", n, 32-bits), fmt.Sprintf("fd00:%x::/%d", n, 128-bits)
	switch {
	case len(c.how.pools) == 2:
		return rig.Dual(four, six)
	case c.how.pools[0] == rig.IPv4:
		return rig.V4(four)
	default:
		return rig.V6(six)
	}
}

// pool makes a pool of one subnet of 2^size addresses in blocks of 2^bits, and a
// namespace that uses it; both have the name that is returned.
func (c *network) pool(bits int32, size int) string {
	c.t.Helper()
	s := c.subnet(size)
	number.Lock()
	name := fmt.Sprintf("pool-%d", number.pools)
	number.Unlock()
	ctx := c.t.Context()
	c.check(c.AddPool(ctx, name, bits, s), c.AddNamespace(ctx, name, name))
	return name
}

// sandbox makes one of a new pod.
func (c *network) sandbox(n *node, pool string) *rig.Sandbox {
	c.t.Helper()
	s, err := n.NewSandbox(c.t.Context(), rig.SandboxOptions{Namespace: pool})
	c.check(err)
	return s
}

// pod makes a pod with a network; its ADD is tried again, as kubelet does, while a
// block is on its way.
func (c *network) pod(n *node, pool string) *rig.Sandbox {
	c.t.Helper()
	s := c.sandbox(n, pool)
	c.check(testkit.Within(c.t.Context(), 20*time.Second, func() error {
		_, err := s.Add(c.t.Context())
		return err
	}))
	return s
}

// end ends a pod.
func (c *network) end(s *rig.Sandbox) {
	c.t.Helper()
	c.check(s.Del(c.t.Context()), s.Close())
}

// addrs are a pod's.
func (c *network) addrs(s *rig.Sandbox) []netip.Addr {
	c.t.Helper()
	all := c.Ledger.Live()[s]
	if len(all) != len(c.how.pools) {
		c.t.Fatalf("%s has addresses %v, want %d", s, all, len(c.how.pools))
	}
	return all
}

// reach ends the test unless one pod reaches the other by each of its addresses.
func (c *network) reach(from, to *rig.Sandbox) {
	c.t.Helper()
	for _, a := range c.addrs(to) {
		c.connect(from.Dial, from.String(), to, a)
	}
}

// blocks are the prefixes of the AddressBlocks that a node holds of pools, or of all of
// them if none is named.
func (c *network) blocks(n *node, pools ...string) []netip.Prefix {
	c.t.Helper()
	held, err := n.Blocks(c.t.Context())
	c.check(err)
	var all []netip.Prefix
	for _, b := range held {
		if len(pools) > 0 && !slices.Contains(pools, b.Labels[v2.LabelPool]) {
			continue
		}
		for _, p := range []*string{b.IPv4, b.IPv6} {
			if p != nil {
				all = append(all, netip.MustParsePrefix(*p))
			}
		}
	}
	return all
}

// eventually waits for a condition.
func (c *network) eventually(within time.Duration, what string, cond func() error) {
	c.t.Helper()
	testkit.Eventually(c.t, within, what, cond)
}

// announced waits until prefixes are announced by one node, and by nobody if it is nil.
func (c *network) announced(by *node, prefixes ...netip.Prefix) {
	c.t.Helper()
	if len(prefixes) == 0 {
		c.t.Fatal("no prefixes to wait for")
	}
	want := []string{}
	if by != nil {
		want = append(want, by.speaker())
	}
	c.eventually(20*time.Second, fmt.Sprintf("%v announced by %v", prefixes, want), func() error {
		for _, p := range prefixes {
			if got := c.watcher.of(p); !slices.Equal(got, want) {
				return fmt.Errorf("%s is announced by %v", p, got)
			}
		}
		return nil
	})
}

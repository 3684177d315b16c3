// Package crash proves that no address is lost and none is given twice, whatever
// ends coild or the controller, and whatever happens to the record, the Node or
// the API server.
//
// Each test has nodes and pools of its own in one rig; see package rig for what is
// compared at the end. Tests that disturb no other run in parallel. The environment variable COIL_CRASH=long asks for hundreds of kills
// rather than for one of each kind.
package crash

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// shared is the rig of all tests, which wait most of the time, for cool-downs above all.
var shared = rigtest.Shared{Options: rig.Options{Tags: []string{"faultpoints"}}, Parallel: 16}

func TestMain(m *testing.M) { shared.Main(m) }

// coolDown is that of all nodes.
const coolDown = 2 * time.Second

// quick are flags that let things happen within a test's patience.
func quick(more ...string) []string {
	return append([]string{
		"--cool-down=" + coolDown.String(), "--block-min-age=500ms", "--sweep-interval=1s", "--block-timeout=10s",
	}, more...)
}

// cluster is a part of the rig that is one test's own.
type cluster struct {
	*rig.Rig
	t testing.TB
	// pools are the namespaces of the test; each has a pool of its name.
	pools []string
	nodes []*rig.Node
}

// number makes the ranges of pools unique.
var number struct {
	sync.Mutex
	pools int
}

// newCluster returns the part of a test, with one dual-stack pool for each number
// of bits. At the end it is removed.
func newCluster(t testing.TB, bits ...int32) *cluster {
	t.Helper()
	r := shared.Rig(t)
	c := &cluster{Rig: r, t: t}
	t.Cleanup(c.remove)
	for _, b := range bits {
		c.pools = append(c.pools, c.pool(b, 0))
	}
	return c
}

// pool makes a namespace with a pool of /20s, or, if size isn't 0, of that many
// addresses; both have the name that is returned.
func (c *cluster) pool(bits int32, size int) string {
	c.t.Helper()
	number.Lock()
	number.pools++
	n := number.pools
	number.Unlock()
	name := fmt.Sprintf("pool-%d", n)
	length := 20
	for s := 4096; size > 0 && s > size; s /= 2 {
		length++
	}
	ctx := c.t.Context()
	c.check(
		c.AddPool(ctx, name, bits, rig.Dual(fmt.Sprintf("10.%d.0.0/%d", n, length), fmt.Sprintf("fd00:%x::/%d", n, length+96))),
		c.AddNamespace(ctx, name, name),
	)
	return name
}

// remove removes the nodes; the pools stay.
func (c *cluster) remove() {
	ctx := context.WithoutCancel(c.t.Context())
	for _, n := range c.nodes {
		if c.t.Failed() {
			c.t.Logf("the end of the log of %s:\n%s", n.Name, n.Coild.Logs(60))
		}
		if err := n.Remove(ctx); err != nil {
			c.t.Errorf("remove %s: %v", n.Name, err)
		}
	}
}

// node adds a node.
func (c *cluster) node(o rig.NodeOptions) *rig.Node {
	c.t.Helper()
	o.CoildFlags = quick(o.CoildFlags...)
	n, err := c.AddNode(c.t.Context(), o)
	if err != nil {
		c.t.Fatal(err)
	}
	c.nodes = append(c.nodes, n)
	return n
}

// check ends the test if there is an error.
func (c *cluster) check(errs ...error) {
	c.t.Helper()
	testkit.Check(c.t, errs...)
}

// sandbox makes a sandbox of a new pod in the first pool's namespace.
func (c *cluster) sandbox(n *rig.Node) *rig.Sandbox {
	c.t.Helper()
	s, err := n.NewSandbox(c.t.Context(), rig.SandboxOptions{Namespace: c.pools[0]})
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

// pod makes a sandbox with a network.
func (c *cluster) pod(n *rig.Node) *rig.Sandbox {
	c.t.Helper()
	s := c.sandbox(n)
	if _, err := s.Add(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	return s
}

func (c *cluster) podsOf(n *rig.Node, count int) []*rig.Sandbox {
	c.t.Helper()
	var all []*rig.Sandbox
	for range count {
		all = append(all, c.pod(n))
	}
	return all
}

// rested reports addresses that were given again before they had cooled down.
func (c *cluster) rested() {
	c.t.Helper()
	for _, n := range c.nodes {
		if rest := c.Ledger.ShortestRest(n); rest != nil && rest.Took < coolDown {
			c.t.Errorf("%s gave an address again before it had rested for %s: %s", n.Name, coolDown, rest)
		}
	}
}

// works ends the test unless pods kept their network, and others can come and go.
func (c *cluster) works(n *rig.Node, pods ...*rig.Sandbox) {
	c.t.Helper()
	ctx := c.t.Context()
	for i, s := range pods {
		c.check(s.Check(ctx))
		c.reach(s, pods[(i+1)%len(pods)])
	}
	fresh := c.podsOf(n, 6)
	c.reach(fresh[0], fresh[5])
	if len(pods) > 0 {
		c.reach(fresh[0], pods[0])
	}
	c.clean()
	for _, s := range fresh {
		c.check(end(ctx, s))
	}
	c.clean()
}

// reach ends the test unless one pod reaches the other by each of its addresses.
func (c *cluster) reach(from, to *rig.Sandbox) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), testkit.Timeout(10*time.Second))
	defer cancel()
	addrs := c.Ledger.Live()[to]
	if len(addrs) == 0 {
		c.t.Fatalf("%s has no address", to)
	}
	for _, a := range addrs {
		if _, err := to.Reach(ctx, a, from.Dial); err != nil {
			c.t.Fatalf("%s doesn't reach %s: %v", from, to, err)
		}
	}
}

// clean ends the test unless everything agrees with what was answered.
func (c *cluster) clean() {
	c.t.Helper()
	c.check(c.awaitClean(20 * time.Second))
}

// awaitClean waits until everything that is the test's agrees.
func (c *cluster) awaitClean(within time.Duration) error {
	ctx := c.t.Context()
	mine := map[string]bool{}
	var errs []error
	for _, n := range c.nodes {
		mine[n.Name] = true
		if n.Coild.Running() {
			errs = append(errs, n.AwaitClean(ctx, within))
		}
	}
	of, err := labels.NewRequirement(v2.LabelPool, selection.In, c.pools)
	if err != nil {
		return err
	}
	wrongs, err := c.BlockDifferences(ctx, labels.NewSelector().Add(*of), func(node string) bool { return mine[node] })
	for _, w := range wrongs {
		errs = append(errs, errors.New(w))
	}
	return errors.Join(append(errs, err)...)
}

// live returns the test's sandboxes on a node that have a network.
func (c *cluster) live(n *rig.Node) []*rig.Sandbox {
	var all []*rig.Sandbox
	for s := range c.Ledger.Live() {
		if s.Node == n {
			all = append(all, s)
		}
	}
	return all
}

// end is the end of a pod as the runtime does it: DEL until it succeeds, then the
// namespace.
func end(ctx context.Context, s *rig.Sandbox) error {
	deadline := time.Now().Add(testkit.Timeout(60 * time.Second))
	for {
		err := s.Del(ctx)
		if err == nil {
			return s.Close()
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
	}
}

package crash

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// TestPodWithoutLink: a pod deletes its own link. No other one gets its address, and coild's loops
// don't fail because of it, until its network namespace is gone.
func TestPodWithoutLink(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.node(rig.NodeOptions{})
	ctx := t.Context()
	pod, other := c.pod(n), c.pod(n)
	own := c.Ledger.Live()[pod]
	_, err := pod.Run(ctx, "ip", "link", "del", pod.IfName)
	c.check(err)
	testkit.Eventually(t, 20*time.Second, "coild tells of it", func() error {
		if n.Coild.CountLogs("A pod has lost its link") == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	fresh := c.podsOf(n, 6)
	for _, s := range fresh {
		if addrs := c.Ledger.Live()[s]; slices.ContainsFunc(own, func(a netip.Addr) bool { return slices.Contains(addrs, a) }) {
			t.Fatalf("%s got the address of a pod that lives: %s", s, addrs)
		}
	}
	c.reach(other, fresh[0])
	if told := n.Coild.CountLogs("A pod has lost its link"); told != 1 {
		t.Errorf("told of %d times", told)
	}
	c.Ledger.Lose(pod)
	c.check(pod.RemoveNetns())
	c.clean()
	c.rested()
	for _, s := range append(fresh, other) {
		c.check(end(ctx, s))
	}
	c.blocksGoBack()
}

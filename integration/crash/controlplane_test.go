package crash

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/testkit"
)

// GC lists what the runtime knew a moment ago, while pods come and go: it frees nothing
// that lives.
func TestGCWhilePodsComeAndGo(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 5)
	n := c.node(rig.NodeOptions{})
	l := startLoad(c, n)
	calls := 0
	keys := [][]string{{rig.ValidAttachments}, {rig.Attachments}, {rig.ValidAttachments, rig.Attachments}}
	rounds := testkit.CrashForm.Times(3, 10)
	for range rounds {
		until := time.Now().Add(2 * time.Second)
		for time.Now().Before(until) {
			c.check(n.GC(t.Context(), c.live(n), keys[calls%len(keys)]...))
			calls++
		}
		c.check(l.compare())
	}
	c.check(l.finish())
	c.clean()
	adds, _ := c.Ledger.Counts(n)
	t.Logf("%d GCs while %d ADDs were answered and %d failed", calls, adds, l.failed.Load())
	if calls < rounds || adds < 50 || l.failed.Load() > 0 {
		t.Errorf("%d GCs, %d ADDs, %d of them failed", calls, adds, l.failed.Load())
	}
	c.rested()
	c.blocksGoBack()
}

// Without the API server pods come and go as long as the node has addresses, and what
// it can't do it says. Also a coild that is started meanwhile waits for it.
func TestAPIServerAway(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, 5, 5)
	n := c.node(rig.NodeOptions{CoildFlags: []string{"--block-timeout=3s"}})
	pods := c.podsOf(n, 4)
	var known []*rig.Sandbox // by coild, which asks the API server for others
	for i := range 4 {
		s, err := n.NewSandbox(ctx, rig.SandboxOptions{Namespace: c.pools[i/3]})
		c.check(err)
		_, err = s.Add(ctx)
		c.check(err, s.Del(ctx))
		known = append(known, s)
	}
	other := known[3]
	testkit.Eventually(t, 30*time.Second, "the block of the other pool goes back", func() error {
		held, err := n.Blocks(ctx)
		if len(held) != 1 {
			return fmt.Errorf("%d blocks are held: %v", len(held), err)
		}
		return nil
	})
	c.clean()

	c.API.StopServer()
	restart := sync.OnceFunc(func() { c.check(c.API.StartServer(ctx)) })
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		restart() // others need it
	})
	_, err := known[0].Add(ctx)
	c.check(err, n.Status(ctx), end(ctx, pods[0]))
	_, err = other.Add(ctx)
	var e *cnitypes.Error
	if !errors.As(err, &e) || e.Code != cnitypes.ErrTryAgainLater {
		t.Errorf("ADD that needs a block: %v, want code %d", err, cnitypes.ErrTryAgainLater)
	}
	c.keep(append(pods[1:], known[0]))

	n.Coild.Kill()
	c.check(n.Coild.Start())
	c.refuseKnown(n, known[1])
	c.check(pods[1].Del(ctx), pods[1].Close())
	c.keep(append(pods[2:], known[0]))
	restart()
	c.ready(n)
	for _, s := range known[1:] {
		c.check(end(ctx, s))
	}
	c.works(n, append(pods[2:], known[0])...)
	c.rested()
}

// refuseKnown ends the test unless STATUS says that ADD isn't served, and it isn't.
func (c *cluster) refuseKnown(n *rig.Node, s *rig.Sandbox) {
	c.t.Helper()
	var e *cnitypes.Error
	if err := n.Status(c.t.Context()); !errors.As(err, &e) || e.Code != cnitypes.ErrPluginNotAvailable {
		c.t.Fatalf("STATUS says %v, want code %d", err, cnitypes.ErrPluginNotAvailable)
	}
	if _, err := s.Add(c.t.Context()); !errors.As(err, &e) || e.Code != cnitypes.ErrTryAgainLater {
		c.t.Fatalf("ADD says %v, want code %d", err, cnitypes.ErrTryAgainLater)
	}
}

// addAll attaches pods of which each needs a block, and ends the test unless each has
// exactly one. A block that a second controller made for the same request gives no address, and
// its node gives it back although pods live.
func (c *cluster) addAll(meanwhile func(), each int) {
	c.t.Helper()
	ctx := c.t.Context()
	var all []*rig.Sandbox
	for range each {
		for _, n := range c.nodes {
			all = append(all, c.sandbox(n))
		}
	}
	errs := make(chan error, len(all))
	for _, s := range all {
		go func() {
			_, err := s.Add(ctx)
			errs <- err
		}()
	}
	meanwhile()
	for range all {
		c.check(<-errs)
	}
	c.clean()
	testkit.Eventually(c.t, 30*time.Second, "the nodes hold a block for each pod and no other", func() error {
		held := 0
		for _, n := range c.nodes {
			of, err := n.Blocks(ctx)
			if err != nil {
				return err
			}
			held += len(of)
		}
		if held != len(all) {
			return fmt.Errorf("%d pods, %d blocks", len(all), held)
		}
		return nil
	})
	for _, s := range all {
		c.check(end(ctx, s))
	}
	c.blocksGoBack()
}

// The controller is killed before and after each of its writes, while nodes wait for
// blocks: each gets exactly those that it needs.
func TestControllerKilled(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, 0)
	for range 2 {
		c.node(rig.NodeOptions{})
	}
	restart := func(faults string) {
		c.check(c.KillController(ctx))
		c.Controller.Faults = faults
		c.check(c.Controller.Start())
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the controller's log:\n%s", c.Controller.Logs(40))
		}
	})
	kills := 0
	for round := range testkit.CrashForm.Times(1, 20) {
		for _, p := range faultpoint.Carve {
			restart(fmt.Sprintf("%s=%d", p, 1+round%3))
			c.addAll(func() {
				select {
				case <-c.Controller.Ended():
					kills++
				case <-time.After(testkit.Timeout(8 * time.Second)):
					t.Errorf("the controller wasn't killed at %s", p)
				}
				restart("")
			}, 2)
		}
	}
	t.Attr("kills", fmt.Sprint(kills))
}

// Two controllers that both believe to lead give each node exactly the blocks that it
// needs, and none twice.
func TestTwoLeaders(t *testing.T) {
	c := newCluster(t, 0)
	for range 2 {
		c.node(rig.NodeOptions{})
	}
	second, err := c.SecondController(t.Context())
	c.check(err, second.Start())
	t.Cleanup(func() {
		second.Kill()
		if t.Failed() {
			t.Logf("the end of the controllers' logs:\n%s\n%s", c.Controller.Logs(40), second.Logs(40))
		}
	})
	testkit.Eventually(t, 20*time.Second, "the second one leads", func() error {
		if second.CountLogs("Leading") == 0 {
			return errors.New("it doesn't say so")
		}
		return nil
	})
	for range testkit.CrashForm.Times(2, 20) {
		c.addAll(func() {}, 3)
	}
}

// Etcd is restored from a backup of the time before the nodes got their blocks, and others would get
// the same ones next. The node that has pods in them claims them, and the pool waits for an admin.
func TestBlocksLostWithABackup(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, 2)
	n, other := c.node(rig.NodeOptions{}), c.node(rig.NodeOptions{CoildFlags: []string{"--block-timeout=3s"}})
	pods := c.podsOf(n, 6)
	before, err := n.Blocks(ctx)
	c.check(err, c.KillController(ctx))
	for _, b := range before {
		c.check(c.DropBlock(ctx, b.Name))
	}
	pools := c.Coil.CoilV2().AddressPools()
	_, err = pools.Patch(ctx, c.pools[0], types.MergePatchType, []byte(`{"status":{"lastIndex":null}}`), metav1.PatchOptions{}, "status")
	c.check(err)
	testkit.Eventually(t, 20*time.Second, "the node claims its blocks", func() error {
		l, err := c.Coil.CoilV2().BlockRequests().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelNode + "=" + n.Name})
		claims := 0
		for _, r := range l.Items {
			if slices.ContainsFunc(before, func(b v2.AddressBlock) bool { return b.Name == r.Spec.Claim }) {
				claims++
			}
		}
		if claims != len(before) {
			return fmt.Errorf("%d claims of %d blocks: %v", claims, len(before), err)
		}
		return nil
	})
	c.check(c.Controller.Start())
	testkit.Eventually(t, 30*time.Second, "the node has its blocks again", func() error {
		now, err := n.Blocks(ctx)
		same := func(a, b v2.AddressBlock) bool {
			return a.Name == b.Name && *a.IPv4 == *b.IPv4 && *a.IPv6 == *b.IPv6 && a.UID != b.UID
		}
		if !slices.EqualFunc(now, before, same) {
			return fmt.Errorf("%d blocks of %d: %v", len(now), len(before), err)
		}
		return nil
	})
	late := c.sandbox(other)
	if _, err := late.Add(ctx); err == nil || !strings.Contains(err.Error(), "suspended") {
		t.Fatalf("ADD on another node says %v, want that the pool is suspended", err)
	}
	testkit.Eventually(t, 20*time.Second, "the pool says that it is suspended", func() error {
		p, err := pools.Get(ctx, c.pools[0], metav1.GetOptions{})
		if err == nil && !meta.IsStatusConditionTrue(p.Status.Conditions, v2.PoolSuspended) {
			err = fmt.Errorf("conditions of the pool: %+v", p.Status.Conditions)
		}
		return err
	})
	_, err = pools.Patch(ctx, c.pools[0], types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+v2.AnnotationSuspend+`":"false"}}}`), metav1.PatchOptions{})
	c.check(err)
	testkit.Eventually(t, 20*time.Second, "the other node gets a block after an admin decided", func() error {
		_, err := late.Add(ctx)
		return err
	})
	c.works(n, pods...)
	for _, s := range append(pods, late) {
		c.check(end(ctx, s))
	}
	c.blocksGoBack()
}

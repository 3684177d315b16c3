package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// diskBytes holds the record, its log and the space that coild keeps for itself.
const diskBytes = 16 << 20

// refuses waits until STATUS says, with a code of CNI, that ADD isn't served, then ends the test
// unless ADD fails with one that says to try again, and its sandbox keeps nothing.
func (c *cluster) refuses(n *rig.Node, status uint) {
	c.t.Helper()
	ctx := c.t.Context()
	testkit.Eventually(c.t, 10*time.Second, "STATUS says that ADD isn't served", func() error {
		var e *cnitypes.Error
		if err := n.Status(ctx); !errors.As(err, &e) || e.Code != status {
			return fmt.Errorf("it says %v, want code %d", err, status)
		}
		return nil
	})
	s := c.sandbox(n)
	_, err := s.Add(ctx)
	var e *cnitypes.Error
	if !errors.As(err, &e) || e.Code != cnitypes.ErrTryAgainLater {
		c.t.Errorf("ADD says %v, want code %d", err, cnitypes.ErrTryAgainLater)
	}
	c.check(s.Close())
}

// keep ends the test unless pods have their network still.
func (c *cluster) keep(pods []*rig.Sandbox) {
	c.t.Helper()
	for i, s := range pods {
		c.reach(s, pods[(i+1)%len(pods)])
	}
}

// detached ends the test unless DEL takes a pod down, so that its link and routes are
// gone while its network namespace is still there.
func (c *cluster) detached(s *rig.Sandbox) {
	c.t.Helper()
	ctx := c.t.Context()
	addrs := c.Ledger.Live()[s]
	c.check(s.Del(ctx))
	testkit.Eventually(c.t, 5*time.Second, "link and routes of "+s.String()+" are gone", func() error {
		if out, err := s.Run(ctx, "ip", "-o", "link", "show", "dev", s.IfName); err == nil {
			return fmt.Errorf("the link is there: %s", out)
		}
		for _, a := range addrs {
			family := map[bool]string{true: "-4", false: "-6"}[a.Is4()]
			out, err := s.Node.Run(ctx, "ip", family, "route", "show", "table", "116", a.String())
			if err != nil || out != "" {
				return fmt.Errorf("the route is there: %s: %v", out, err)
			}
		}
		return nil
	})
	c.check(s.Del(ctx), s.Close()) // a runtime may repeat itself
}

// ready waits until ADD is served again.
func (c *cluster) ready(n *rig.Node) {
	c.t.Helper()
	c.check(n.AwaitReady(c.t.Context(), 30*time.Second))
}

// trouble is something that keeps the record from being written.
type trouble struct {
	name       string
	begin, end func(c *cluster, n *rig.Node) error
}

func troubles() []trouble {
	return []trouble{
		{
			name:  "full",
			begin: func(_ *cluster, n *rig.Node) error { return n.FillDisk() },
			end:   func(_ *cluster, n *rig.Node) error { return n.EmptyDisk() },
		},
		{
			name:  "broken",
			begin: func(c *cluster, n *rig.Node) error { return n.BreakDisk(c.t.Context()) },
			end: func(c *cluster, n *rig.Node) error {
				n.Coild.Kill()
				return errors.Join(n.MountDisk(c.t.Context(), false), n.Coild.Start())
			},
		},
	}
}

// While the disk takes no writes, DEL works, pods keep their network, ADD is refused and
// STATUS says so; afterwards all is as if nothing had been. Also when coild is killed
// in between.
func TestDisk(t *testing.T) {
	t.Parallel()
	for _, tr := range troubles() {
		for _, killed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, killed=%t", tr.name, killed), func(t *testing.T) {
				t.Parallel()
				c := newCluster(t, 3)
				n := c.node(rig.NodeOptions{DiskBytes: diskBytes})
				pods := c.podsOf(n, 6)
				c.clean()
				c.check(tr.begin(c, n))
				// The first call that must write finds it out.
				s := c.sandbox(n)
				if _, err := s.Add(t.Context()); err == nil {
					t.Log("an ADD was answered still")
				}
				c.check(end(t.Context(), s))
				c.refuses(n, cnitypes.ErrPluginNotAvailable)
				c.keep(pods)
				c.detached(pods[0])
				if killed {
					n.Coild.Kill()
					c.check(n.Coild.Start())
					c.refuses(n, cnitypes.ErrPluginNotAvailable)
				}
				c.keep(pods[1:])
				if n.Coild.Running() {
					c.detached(pods[1])
				}
				c.check(tr.end(c, n))
				c.ready(n)
				c.works(n, c.live(n)...)
				c.rested()
				for _, s := range c.live(n) {
					c.check(end(t.Context(), s))
				}
				c.blocksGoBack()
			})
		}
	}
}

// A coild that is started on a read-only disk refuses ADD, and nothing is lost. If it
// can read the record it does DEL; else it ends and the kubelet starts it again.
func TestDiskReadOnlyAtStart(t *testing.T) {
	t.Parallel()
	for _, how := range []struct {
		name string
		end  func(*rig.Program)
	}{{"killed before", (*rig.Program).Kill}, {"stopped before", (*rig.Program).Stop}} {
		t.Run(how.name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t, 3)
			n := c.node(rig.NodeOptions{DiskBytes: diskBytes})
			pods := c.podsOf(n, 4)
			how.end(n.Coild)
			c.check(n.MountDisk(t.Context(), true), n.Coild.Start())
			c.refuses(n, cnitypes.ErrPluginNotAvailable)
			c.keep(pods)
			ended := func() bool {
				select {
				case <-n.Coild.Ended():
					return true
				case <-time.After(testkit.Timeout(3 * time.Second)):
					return false
				}
			}()
			t.Logf("coild ended: %t", ended)
			err := pods[0].Del(t.Context())
			if ended == (err == nil) {
				t.Errorf("coild ended: %t; DEL: %v", ended, err)
			}
			c.check(n.RemountDisk(false))
			if ended {
				c.check(n.Coild.Start())
			}
			c.ready(n)
			c.check(end(t.Context(), pods[0]))
			c.works(n, pods[1:]...)
			c.rested()
		})
	}
}

// A record that is removed or replaced while coild has it open isn't written any more:
// whoever starts next would not see it. coild ends, so that kubelet starts it and it makes
// the record anew.
func TestRecordRemovedWhileOpen(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	n := c.node(rig.NodeOptions{})
	pods := c.podsOf(n, 4)
	aside := filepath.Join(n.StateDir(), "aside")
	c.check(os.Mkdir(aside, 0o700))
	for _, suffix := range sidecars {
		c.check(os.Rename(n.Database()+suffix, filepath.Join(aside, "db"+suffix)))
	}
	select {
	case <-n.Coild.Ended():
	case <-time.After(testkit.Timeout(15 * time.Second)):
		t.Error("coild goes on without its record")
	}
	c.keep(pods)
	c.check(n.Restart(t.Context()))
	c.works(n, pods...)
	c.rested()
}

package routes

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// A prefix is never in the hands of two BIRDs, whatever becomes of coild when the Node
// object is deleted (C12): what the node exports is withdrawn as soon as coild knows,
// and nobody else gets the block before.
func TestDeletedNodeLosesItsBlocks(t *testing.T) {
	for _, tt := range []struct {
		name string
		// before is what happens to coild, after how it is back, if it was away.
		before, after func(*network, *node)
	}{
		{name: "coild runs"},
		{
			name:   "coild was killed",
			before: func(_ *network, n *node) { n.Coild.Kill() },
			// It doesn't become ready, since there is no Node.
			after: func(c *network, n *node) { c.check(n.Coild.Start()) },
		},
		{
			name:   "coild is cut off",
			before: func(_ *network, n *node) { n.CutAPI(true) },
			after:  func(_ *network, n *node) { n.CutAPI(false) },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := t.Context()
			c := newNetwork(t, variant{pools: both, external: true, daemon: onBIRD}, 2)
			owner, other := c.nodes[0], c.nodes[1]
			exports := watch(t, c.exported)
			spare, only := c.pool(3, 6), c.pool(3, 3)
			from := c.pod(other, spare)
			pod := c.pod(owner, only)
			had := c.blocks(owner, only)
			c.announced(owner, had...)
			if tt.before != nil {
				tt.before(c, owner)
			}
			c.check(owner.DeleteObject(ctx))
			if tt.before != nil {
				exports.awaitLooks(100)
				for _, p := range had {
					if got := c.watcher.of(p); !slices.Equal(got, []string{owner.speaker()}) {
						t.Errorf("%s is announced by %v while coild can't know", p, got)
					}
				}
				c.reach(from, pod)
			}
			if _, err := c.sandbox(other, only).Add(ctx); err == nil {
				t.Error("another node got the block of a Node that was deleted just now")
			}
			if tt.after != nil {
				tt.after(c, owner)
			}
			c.announced(nil, had...)
			c.eventually(10*time.Second, "withdrawal from the table of blocks", func() error {
				if left := exports.by(owner.speaker()); len(left) > 0 {
					return fmt.Errorf("the node's BIRD has %v", left)
				}
				return nil
			})
			if _, err := c.sandbox(other, only).Add(ctx); err == nil {
				t.Error("another node got the block during its quarantine")
			}
		})
	}
}

// exported returns what the BIRDs of the nodes have imported from table 119.
func (c *network) exported() ([]announcement, error) {
	var all []announcement
	for _, n := range c.nodes {
		has, err := n.daemon.(*bird).routes("coil4", "coil6")
		if err != nil {
			return nil, err
		}
		for _, a := range has {
			all = append(all, announcement{a.prefix, n.speaker()})
		}
	}
	return all, nil
}

// Blocks that come and go all the time, many at once, never withdraw one that stays
// (A7), and in the end exactly those are announced that the node has.
func TestChurnWithdrawsNoLiveBlock(t *testing.T) {
	c := newNetwork(t, variant{pools: both, external: true, daemon: onBIRD}, 2)
	n := c.nodes[0]
	stay, churn := c.pool(3, 6), c.pool(0, 8)
	pod, from := c.pod(n, stay), c.pod(c.nodes[1], stay)
	live := c.blocks(n, stay)
	c.announced(n, live...)
	c.announced(c.nodes[1], c.blocks(c.nodes[1], stay)...)
	mark := c.watcher.mark()
	const rounds, width = 6, 8
	for range rounds {
		done := make(chan error)
		for range width {
			s := c.sandbox(n, churn)
			go func() {
				err := testkit.Within(t.Context(), 20*time.Second, func() error { _, err := s.Add(t.Context()); return err })
				if err == nil {
					err = s.Del(t.Context())
				}
				done <- err
			}()
		}
		for range width {
			c.check(<-done)
		}
	}
	c.eventually(60*time.Second, "withdrawal of blocks that nobody uses", func() error {
		if left := c.blocks(n, churn); len(left) > 0 {
			return fmt.Errorf("the node has %d of them", len(left))
		}
		return nil
	})
	c.eventually(10*time.Second, "what the node announces", func() error {
		if got := c.watcher.by(n.speaker()); !sameSet(got, live) {
			return fmt.Errorf("%v, want %v", got, live)
		}
		return nil
	})
	came := c.watcher.since(mark, func(ch change) bool { return !ch.withdrawn })
	if len(came) < 2*width {
		t.Errorf("only %d announcements in all rounds", len(came))
	}
	lost := c.watcher.since(mark, func(ch change) bool { return slices.Contains(live, ch.prefix) })
	if len(lost) > 0 {
		t.Errorf("changes of blocks that stayed: %q", lost)
	}
	c.reach(from, pod)
}

func sameSet(a, b []netip.Prefix) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.SortFunc(a, netip.Prefix.Compare)
	slices.SortFunc(b, netip.Prefix.Compare)
	return slices.Equal(a, b)
}

// The first IPv6 packet to a new pod of a known block is answered: nothing waits for
// duplicate address detection (N6), and the answer finds its way.
func TestNewPodIsReachedAtOnce(t *testing.T) {
	c := newNetwork(t, variant{pools: both[1:], external: true, daemon: onBIRD}, 2)
	pool := c.pool(5, 10)
	from, first := c.pod(c.nodes[0], pool), c.pod(c.nodes[1], pool)
	for _, n := range c.nodes {
		c.announced(n, c.blocks(n, pool)...)
	}
	s := &scenario{network: c}
	c.eventually(10*time.Second, "routes at "+from.Node.Name, func() error { return s.hasRoutes(from.Node, c.addrs(first)) })
	for range 10 {
		pod := c.pod(c.nodes[1], pool)
		a := c.addrs(pod)[0]
		// Programs that a runtime starts in the pod come later than the kernel's work in the background.
		c.eventually(time.Second, "the link of "+pod.Name, func() error {
			out, err := pod.Run(t.Context(), "ip", "-6", "route", "show", "table", "local")
			if err == nil && !strings.Contains(out, "local "+a.String()+" dev") {
				err = errors.New(out)
			}
			return err
		})
		got, err := probe(from.Path, a, testkit.Timeout(500*time.Millisecond))
		c.check(err)
		if want := []netlab.Answer{{From: a, Kind: netlab.Reached}}; !slices.Equal(got, want) {
			t.Errorf("the first packet to %s is answered %v, want %v", a, got, want)
		}
		out, err := pod.Run(t.Context(), "ip", "-6", "addr", "show", "tentative")
		c.check(err)
		if out != "" {
			t.Errorf("%s has tentative addresses after ADD:\n%s", pod, out)
		}
	}
}

// A pod whose network namespace was made anew at the same path is reached there by others, at
// its old address (N15).
func TestNamespaceMadeAnewIsReached(t *testing.T) {
	c := newNetwork(t, variant{pools: both, external: true, daemon: onBIRD}, 2)
	pool := c.pool(5, 10)
	from, pod := c.pod(c.nodes[0], pool), c.pod(c.nodes[1], pool)
	for _, n := range c.nodes {
		c.announced(n, c.blocks(n, pool)...)
	}
	c.reach(from, pod)
	mark := c.watcher.mark()
	c.Ledger.Lose(pod)
	c.check(pod.MakeNetns())
	_, err := pod.Add(t.Context())
	c.check(err)
	c.reach(from, pod)
	if got := c.watcher.since(mark, func(change) bool { return true }); len(got) > 0 {
		t.Errorf("routes changed: %q", got)
	}
}

// FRR copies the blocks into the main table as routes to lo. They lead no packet: the rules
// to the pods' table and to that of unassigned addresses come before the main table.
func TestFRRLeaksHarmlessly(t *testing.T) {
	c := newNetwork(t, variant{pools: both[:1], external: true, daemon: onFRR("frr.conf")}, 2)
	pool := c.pool(3, 8)
	n := c.nodes[0]
	pod, from := c.pod(n, pool), c.pod(c.nodes[1], pool)
	for _, n := range c.nodes {
		c.announced(n, c.blocks(n, pool)...)
	}
	leak := func() (string, error) {
		return n.Run(t.Context(), "ip", "route", "show", "table", "main", "proto", "zebra")
	}
	block := c.blocks(n, pool)[0]
	c.eventually(10*time.Second, "the leak", func() error {
		out, err := leak()
		if err == nil && !strings.Contains(out, block.String()+" ") {
			err = fmt.Errorf("routes of zebra in main:\n%s", out)
		}
		return err
	})
	c.reach(from, pod)
	c.connect(n.Dial, n.Name, pod, c.addrs(pod)[0])
	for _, a := range c.free(n, pool) {
		c.refused(c.RouterNetnsPath(), a, n)
		c.refused(from.Path, a, n)
		c.refused(pod.Path, a, n)
	}
	c.end(pod)
	c.announced(nil, block)
	c.eventually(10*time.Second, "the end of the leak", func() error {
		out, err := leak()
		if err == nil && out != "" {
			err = fmt.Errorf("routes of zebra in main:\n%s", out)
		}
		return err
	})
}

package routes

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// scenario is three nodes with a pod each, all announced.
type scenario struct {
	*network
	pool string
	pods []*rig.Sandbox // by node
}

// Demands on three nodes in different segments, whatever daemon they run. In the short form each daemon, and each kind of BGP, comes once.
func TestNetwork(t *testing.T) {
	ip4 := []rig.Family{rig.IPv4}
	for _, v := range []struct {
		name string
		variant
	}{
		{"BIRD by eBGP", variant{pools: both, external: true, daemon: onBIRD}},
		{"FRR by iBGP", variant{pools: ip4, daemon: onFRR("frr.conf")}},
		{"BIRD by iBGP", variant{pools: both, daemon: onBIRD}},
		{"FRR by eBGP", variant{pools: ip4, external: true, daemon: onFRR("frr.conf")}},
	}[:testkit.RepairForm.Times(2, 4)] {
		t.Run(v.name, func(t *testing.T) { threeNodes(t, v.variant) })
	}
}

// threeNodes checks what must hold.
func threeNodes(t *testing.T, v variant) {
	s := &scenario{network: newNetwork(t, v, 3)}
	s.pool = s.network.pool(3, 12)
	for _, n := range s.nodes {
		s.pods = append(s.pods, s.pod(n, s.pool))
	}
	for _, n := range s.nodes {
		s.announced(n, s.blocks(n, s.pool)...)
	}
	for _, step := range []struct {
		name string
		do   func(*scenario)
	}{
		{"pods reach each other", (*scenario).everybody},
		{"an unassigned address", (*scenario).unassigned},
		{"kill -9 of coild", (*scenario).killed},
		{"a block that moves", (*scenario).moves},
		{"power-off and return", (*scenario).power},
		{"the Node is deleted", (*scenario).deleted},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			at := *s.network
			at.t = t
			do := &scenario{network: &at, pool: s.pool, pods: s.pods}
			step.do(do)
			s.pods = do.pods
		}) {
			t.FailNow()
		}
	}
}

// everybody checks that each pod reaches each other one, by each of its addresses, and
// that nodes do.
func (s *scenario) everybody() {
	s.t.Helper()
	for i, from := range s.pods {
		for j, to := range s.pods {
			if i == j {
				continue
			}
			s.eventually(20*time.Second, "routes at "+from.Node.Name, func() error { return s.hasRoutes(from.Node, s.addrs(to)) })
			s.reach(from, to)
			for _, a := range s.addrs(to) {
				want := s.nodes[i].Addr4
				if a.Is6() {
					want = s.nodes[i].Addr6
				}
				if got := s.connect(s.nodes[i].Dial, s.nodes[i].Name, to, a); got != want {
					s.t.Errorf("a connection from %s to a pod of another node comes from %s, want its InternalIP %s", s.nodes[i].Name, got, want)
				}
			}
		}
	}
}

// hasRoutes says whether a node's kernel has routes to blocks with these addresses that
// are no default routes.
func (s *scenario) hasRoutes(n *rig.Node, addrs []netip.Addr) error {
	for _, a := range addrs {
		out, err := n.Run(s.t.Context(), "ip", "route", "get", "fibmatch", a.String())
		if err != nil {
			return err
		}
		if !strings.Contains(out, "proto bird") && !strings.Contains(out, "proto bgp") {
			return fmt.Errorf("the route to %s is %s", a, out)
		}
	}
	return nil
}

// unassigned checks that packets to addresses of blocks that no pod has are answered
// once, by the node that has the block (N7).
func (s *scenario) unassigned() {
	for i, n := range s.nodes {
		for _, a := range s.free(n, s.pool) {
			s.refused(s.RouterNetnsPath(), a, n)
			// The router takes no packet of its own back, so that only others' can loop.
			s.refused(s.pods[(i+1)%len(s.pods)].Path, a, n)
		}
	}
}

// killed checks that a restart of coild changes no route.
func (s *scenario) killed() {
	n := s.nodes[0]
	mark := s.watcher.mark()
	n.Coild.Kill()
	s.watcher.awaitLooks(100)
	s.reach(s.pods[1], s.pods[0])
	s.check(n.Start(s.t.Context()), n.AwaitClean(s.t.Context(), 20*time.Second))
	s.check(n.Restart(s.t.Context()), n.AwaitClean(s.t.Context(), 20*time.Second))
	s.watcher.awaitLooks(100)
	if got := s.watcher.since(mark, func(change) bool { return true }); len(got) > 0 {
		s.t.Errorf("while coild was killed and started: %q", got)
	}
	s.reach(s.pods[1], s.pods[0])
}

// moves checks that a block which another node acquires is announced by its new owner
// only; the pool has no other block.
func (s *scenario) moves() {
	pool := s.network.pool(3, 3)
	var prefixes []netip.Prefix
	for _, n := range []*node{s.nodes[0], s.nodes[1], s.nodes[0]} {
		mark := s.watcher.mark()
		pod := s.pod(n, pool)
		has := s.blocks(n, pool)
		if prefixes != nil && !slices.Equal(prefixes, has) {
			s.t.Fatalf("%s has blocks %v, want %v", n.Name, has, prefixes)
		}
		prefixes = has
		s.announced(n, prefixes...)
		s.eventually(10*time.Second, "routes at the third node", func() error { return s.hasRoutes(s.nodes[2].Node, s.addrs(pod)) })
		s.reach(s.pods[2], pod)
		others := s.watcher.since(mark, func(c change) bool {
			return slices.Contains(prefixes, c.prefix) && c.origin != n.speaker()
		})
		if len(others) > 0 {
			s.t.Errorf("while %s acquired %v: %q", n.Name, prefixes, others)
		}
		s.end(pod)
		s.announced(nil, prefixes...)
	}
}

// power checks that what a node has announced goes with its power and nobody else
// announces it, and that the node announces again what it has when it is back.
func (s *scenario) power() {
	ctx := s.t.Context()
	n := s.nodes[2]
	had := s.blocks(n, s.pool)
	mark := s.watcher.mark()
	// The daemon can't take its leave, and the router doesn't lose the link, as with a switch
	// between them: the sessions last until their hold time is over.
	_, err := n.Run(ctx, "ip", "addr", "flush", "dev", "eth0")
	s.check(err)
	n.daemon.kill()
	s.announced(nil, had...)
	s.check(n.PowerCut(ctx))
	s.reach(s.pods[0], s.pods[1])
	others := s.pod(s.nodes[0], s.pool)
	s.check(n.PowerOn(ctx), n.daemon.start(ctx), n.Start(ctx))
	s.pods[2] = s.pod(n, s.pool)
	s.announced(n, s.blocks(n, s.pool)...)
	s.everybody()
	s.end(others)
	foreign := s.watcher.since(mark, func(c change) bool { return slices.Contains(had, c.prefix) && c.origin != n.speaker() })
	if len(foreign) > 0 {
		s.t.Errorf("while %s was away: %q", n.Name, foreign)
	}
}

// deleted checks that a node whose Node object is gone announces nothing any more, and
// that others go on.
func (s *scenario) deleted() {
	ctx := s.t.Context()
	n := s.nodes[1]
	had := s.blocks(n, s.pool)
	s.check(n.DeleteObject(ctx))
	s.announced(nil, had...)
	if left := s.watcher.by(n.speaker()); len(left) > 0 {
		s.t.Errorf("%s, whose Node is deleted, still announces %v", n.Name, left)
	}
	s.reach(s.pods[0], s.pods[2])
}

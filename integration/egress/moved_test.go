package egress

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
)

// The address of a router, in a pool of its own, comes to a pod of another node. A neighbour on
// the nodes' layer-2 network reaches the new pod as soon as it has the block's new route, and
// not when its neighbour table forgets: addresses of pods are routed to nodes and never on that
// network, so that nobody knows, or could know, a MAC address that is the old one.
func TestMovedAddress(t *testing.T) {
	ctx := t.Context()
	r := rigtest.New(t)
	testkit.Check(t, r.AddPool(ctx, "default", 0, rig.Dual("10.64.0.7/32", "fd64::7/128")))
	addrs := []netip.Addr{netip.MustParseAddr("10.64.0.7"), netip.MustParseAddr("fd64::7")}
	var nodes []*rig.Node
	for range 3 {
		nodes = append(nodes, testkit.Must(r.AddNode(ctx, rig.NodeOptions{CoildFlags: []string{
			"--cool-down=1s", "--block-min-age=500ms", "--sweep-interval=1s", "--block-timeout=5s",
		}}))(t))
	}
	neighbour := nodes[2]
	router := testkit.Must(neighbour.NewRouter(ctx))(t)
	testkit.Check(t, router.Start())
	defer router.Kill()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of coil-router's log:\n%s", router.Logs(20))
		}
	})
	run := func(args ...string) string {
		t.Helper()
		return testkit.Must(neighbour.Run(ctx, args[0], args[1:]...))(t)
	}
	// Old neighbour entries; no packet may be sent by them.
	for _, a := range addrs {
		run("ip", "neigh", "replace", a.String(), "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
	}
	var slowest time.Duration
	for _, n := range []*rig.Node{nodes[0], nodes[1], nodes[0], nodes[1]} {
		s := testkit.Must(n.NewSandbox(ctx, rig.SandboxOptions{}))(t)
		testkit.Eventually(t, within, "ADD at "+n.Name, func() error {
			_, err := s.Add(ctx)
			return err
		})
		begin := time.Now()
		for _, a := range addrs {
			testkit.Eventually(t, within, fmt.Sprintf("%s reaches %s at %s", neighbour.Name, a, n.Name), func() error {
				if err := reaches(ctx, neighbour, s, a); err != nil {
					return fmt.Errorf("%w, by %s", err, run("ip", "route", "get", a.String()))
				}
				return nil
			})
		}
		slowest = max(slowest, time.Since(begin))
		testkit.Check(t, s.Del(ctx), s.Close())
	}
	t.Logf("a moved address is reached after %s at most", slowest.Round(time.Millisecond))
	// A neighbour is asked again after 15 to 45 s (base_reachable_time, arp(7)) at the earliest.
	if limit := testkit.Limit(5 * time.Second); slowest > limit {
		t.Errorf("it takes longer than %s", limit)
	}

	// A neighbour that takes the address for one of the network gets no answer that could become old.
	s := testkit.Must(nodes[0].NewSandbox(ctx, rig.SandboxOptions{}))(t)
	testkit.Eventually(t, within, "ADD", func() error {
		_, err := s.Add(ctx)
		return err
	})
	for _, a := range addrs {
		family := map[bool]string{true: "-4", false: "-6"}[a.Is4()]
		testkit.Eventually(t, within, "a route", func() error { return reaches(ctx, neighbour, s, a) })
		run("ip", "neigh", "del", a.String(), "dev", "eth0")
		run("ip", family, "route", "add", a.String(), "dev", "eth0", "table", "99")
		run("ip", family, "rule", "add", "to", a.String(), "lookup", "99", "priority", "10")
		if err := reaches(ctx, neighbour, s, a); err == nil {
			t.Errorf("%s is on the nodes' network", a)
		}
		run("ip", family, "rule", "del", "priority", "10")
		testkit.Check(t, reaches(ctx, neighbour, s, a))
		if known := run("ip", "neigh", "show", "to", a.String()); strings.Contains(known, "lladdr") {
			t.Errorf("%s knows a MAC address of %s: %s", neighbour.Name, a, known)
		}
	}
	testkit.Check(t, s.Del(ctx), r.AwaitClean(ctx, within))
}

// reaches connects from a node to a pod, by an address that the pod has.
func reaches(ctx context.Context, from *rig.Node, to *rig.Sandbox, a netip.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(500*time.Millisecond))
	defer cancel()
	_, err := to.Reach(ctx, a, from.Dial)
	return err
}

// Package legacy checks that coild takes over nodes that Coil 2.x has wired.
//
// It owns no fixture of its own: package rig wires as 2.x did. It must not know how
// coild finds what it adopts.
package legacy

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

func addrs(texts ...string) []netip.Addr {
	var all []netip.Addr
	for _, s := range texts {
		all = append(all, netip.MustParseAddr(s))
	}
	return all
}

// wire makes a pod that 2.x has wired.
func wire(t *testing.T, n *rig.Node, texts ...string) (*rig.Sandbox, string) {
	t.Helper()
	s := testkit.Must(n.NewSandbox(t.Context(), rig.SandboxOptions{}))(t)
	return s, testkit.Must(s.WireLegacy(t.Context(), "default", addrs(texts...)...))(t)
}

// A node of 2.x is taken over without a lost packet.
func TestTakeOver(t *testing.T) {
	r := rigtest.New(t)
	ctx := t.Context()
	testkit.Check(t, r.AddPool(ctx, "default", 3, rig.Dual("10.1.0.0/24", "fd00:1::/120")))
	n := testkit.Must(r.AddNode(ctx, rig.NodeOptions{Down: true}))(t)
	block := testkit.Must(r.AddLegacyBlock(ctx, "default", 0, n.Name, "10.1.0.0/29", "fd00:1::/125"))(t)
	testkit.Check(t, n.LegacyNode(ctx, block), r.RouteOutside(ctx, *block.IPv4, n), r.RouteOutside(ctx, *block.IPv6, n))
	a, _ := wire(t, n, "10.1.0.0", "fd00:1::")
	b, _ := wire(t, n, "10.1.0.1", "fd00:1::1")
	c, _ := wire(t, n, "10.1.0.5", "fd00:1::5")
	old := []*rig.Sandbox{a, b, c}

	var pings []*netlab.Pinger
	for _, to := range addrs("10.1.0.1", "fd00:1::1") {
		for _, begin := range []func() (*netlab.Pinger, error){
			func() (*netlab.Pinger, error) { return a.Ping(to) },
			func() (*netlab.Pinger, error) { return r.PingOutside(to) },
		} {
			pings = append(pings, rigtest.Pings(t, begin))
		}
	}
	testkit.Check(t, n.Start(ctx))
	if got := n.Coild.CountLogs("adopted=3"); got != 1 {
		t.Errorf("%d lines say that 3 pods are adopted, want 1:\n%s", got, n.Coild.Logs(20))
	}
	testkit.Check(t, r.AwaitClean(ctx, 10*time.Second))

	t.Run("a second start changes nothing", func(t *testing.T) {
		before := testkit.Must(n.Run(ctx, "ip", "-d", "link", "show", "type", "veth"))(t)
		testkit.Check(t, n.Restart(ctx), r.AwaitClean(ctx, 10*time.Second))
		if after := testkit.Must(n.Run(ctx, "ip", "-d", "link", "show", "type", "veth"))(t); after != before {
			t.Errorf("links before:\n%s\nafter:\n%s", before, after)
		}
		if n.Coild.CountLogs("Routes of pods changed") > 1 || n.Coild.CountLogs("kept=3") != 1 {
			t.Errorf("the log:\n%s", n.Coild.Logs(20))
		}
	})
	t.Run("CHECK", func(t *testing.T) {
		for _, s := range old {
			if err := s.Check(ctx); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("DEL frees, ADD never gives an adopted address", func(t *testing.T) {
		testkit.Check(t, c.Del(ctx), c.Close())
		// More pods than the adopted block has addresses.
		for range 8 {
			s := testkit.Must(n.NewSandbox(ctx, rig.SandboxOptions{}))(t)
			testkit.Must(s.Add(ctx))(t)
			testkit.Check(t, s.Check(ctx))
		}
		testkit.Check(t, r.AwaitClean(ctx, 10*time.Second)) // the ledger knows who has what
	})
	for _, p := range pings {
		sent, answered, err := p.End()
		if err != nil {
			t.Error(err)
		} else if sent < 50 || answered != sent {
			t.Errorf("%s: %d of %d pings were answered, want all", p, answered, sent)
		} else {
			t.Logf("%s: %d of %d", p, answered, sent)
		}
	}
	for _, s := range old[:2] {
		testkit.Check(t, s.Del(ctx), s.Close())
	}
	testkit.Check(t, r.AwaitClean(ctx, 10*time.Second))
	if left := testkit.Must(n.Run(ctx, "ip", "-o", "link", "show", "type", "veth"))(t); strings.Contains(left, a.ContainerID) || strings.Contains(left, b.ContainerID) {
		t.Errorf("links of deleted pods are left:\n%s", left)
	}
}

// A broken object on a node of 2.x costs only itself, and is reported.
func TestTakeOverOfBrokenNode(t *testing.T) {
	r := rigtest.New(t)
	ctx := t.Context()
	testkit.Check(t, r.AddPool(ctx, "default", 3, rig.Dual("10.1.0.0/24", "fd00:1::/120")))
	n := testkit.Must(r.AddNode(ctx, rig.NodeOptions{Down: true}))(t)
	other := testkit.Must(r.AddNode(ctx, rig.NodeOptions{Down: true}))(t)
	block := testkit.Must(r.AddLegacyBlock(ctx, "default", 0, n.Name, "10.1.0.0/29", "fd00:1::/125"))(t)
	testkit.Must(r.AddLegacyBlock(ctx, "default", 1, other.Name, "10.1.0.8/29", "fd00:1::8/125"))(t)
	testkit.Check(t, n.LegacyNode(ctx, block))
	healthy, _ := wire(t, n, "10.1.0.0", "fd00:1::")
	nameless, link := wire(t, n, "10.1.0.1", "fd00:1::1")
	outside, _ := wire(t, n, "10.9.0.1", "fd00:9::1")
	foreign, _ := wire(t, n, "10.1.0.9", "fd00:1::9")
	gone, _ := wire(t, n, "10.1.0.2", "fd00:1::2")
	testkit.Must(n.Run(ctx, "ip", "link", "set", link, "alias", ""))(t)
	r.Ledger.Lose(nameless)
	r.Ledger.Lose(gone)
	testkit.Check(t, gone.Close())
	testkit.Must(n.Run(ctx, "ip", "route", "add", "10.1.0.3", "dev", "lo", "table", "116", "proto", "30", "scope", "link"))(t)

	testkit.Check(t, n.Start(ctx))
	t.Logf("log of coild:\n%s", n.Coild.Logs(40))
	testkit.Eventually(t, 10*time.Second, "Events", func() error {
		events, err := r.Core.EventsV1().Events("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var notes []string
		for _, e := range events.Items {
			notes = append(notes, e.Reason+": "+e.Note)
		}
		for _, want := range []string{link, "10.9.0.1", "10.1.0.9"} {
			if !slices.ContainsFunc(notes, func(s string) bool {
				return (strings.HasPrefix(s, "LinkNotAdopted: ") || strings.HasPrefix(s, "AddressWithoutBlock: ")) && strings.Contains(s, want)
			}) {
				return errors.New("no Event names " + want + ": " + strings.Join(notes, "; "))
			}
		}
		return nil
	})
	testkit.Check(t, healthy.Check(ctx))
	for _, s := range []*rig.Sandbox{outside, foreign} {
		testkit.Check(t, s.Check(ctx)) // they keep their network
	}
	for range 8 {
		s := testkit.Must(n.NewSandbox(ctx, rig.SandboxOptions{}))(t)
		testkit.Must(s.Add(ctx))(t)
	}
	for _, s := range []*rig.Sandbox{healthy, outside, foreign} {
		testkit.Check(t, s.Del(ctx), s.Close())
	}
	if wrongs := r.Ledger.Wrongs(n); len(wrongs) > 0 {
		t.Errorf("addresses: %q", wrongs)
	}
}

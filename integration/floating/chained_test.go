package floating

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// Behind plugins that attach pods by veths alone, and by a bridge: with no right on the addresses of pods, nodes hold the address, routers
// send from it though the node masquerades all that leaves, and another node takes it when one fails.
func TestBehindOtherPlugins(t *testing.T) {
	ctx := t.Context()
	r := rigtest.New(t)
	testkit.Check(t, r.Core.RbacV1().ClusterRoleBindings().Delete(ctx, "coild-ipam", metav1.DeleteOptions{}), r.AddNamespace(ctx, egressNamespace, ""))
	testkit.Check(t, r.AddPool(ctx, "chained", 0, rig.Dual("10.255.99.0/32", "fd00:255::9900/128")), r.Announce(ctx, "chained", v2.AnnounceNeighbor))
	f := &fixture{Rig: r, t: t}
	var all []*rig.Node
	// The first node keeps the source by a translation to itself, the others track nothing.
	for i, plugin := range []string{"ptp", "bridge", "ptp"} {
		flags := []string{"--enable-ipam=false", "--enable-floating", fmt.Sprintf("--floating-notrack=%t", i > 0)}
		n := testkit.Must(r.AddNode(ctx, rig.NodeOptions{Behind: plugin, CoildFlags: flags}))(t)
		// As plugins do for what leaves the cluster.
		testkit.Must(n.Run(ctx, "nft", `add table inet other; add chain inet other post { type nat hook postrouting priority 100; }; add rule inet other post oifname "eth0" masquerade`))(t)
		testkit.Must(n.Run(ctx, "sysctl", "-w", "net.ipv4.conf.all.rp_filter=1"))(t)
		all = append(all, n)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the end of the log of %s:\n%s", n.Name, n.Coild.Logs(60))
			}
		})
	}
	f.Floating = testkit.Must(r.NewFloating(ctx, egressNamespace, "chained", all...))(t)
	f.held(0)
	f.sendsAsItself(0)
	testkit.Must(all[0].Run(ctx, "sh", "-ec", "ip rule del lookup 116; ip -6 rule del lookup 116"))(t)
	testkit.Eventually(t, 10*time.Second, "rules that were deleted are there again", func() error {
		out, err := all[0].Run(ctx, "sh", "-ec", "ip rule; ip -6 rule")
		if err == nil && strings.Count(out, "lookup 116") != 2 {
			err = errors.New(out)
		}
		return err
	})
	pings := f.pings()

	testkit.Check(t, f.Place(ctx, f.Candidates[1].Name, 1, 0, 2))
	f.held(1)
	f.sendsAsItself(1)
	if gone := outage(t, pings); gone > testkit.Timeout(time.Second) {
		t.Errorf("in a move from a node with ptp to one with a bridge the address was silent for %s", gone)
	}
	if testkit.FloatingForm.Long() {
		f.blocked(1)
	}

	pings = f.pings()
	testkit.Check(t, f.Candidates[1].PowerCut(ctx))
	f.held(0)
	if gone := outage(t, pings); gone > testkit.Limit(5*time.Second) {
		t.Errorf("the address was silent for %s after a power cut", gone)
	}
	testkit.Check(t, f.Candidates[1].PowerOn(ctx), f.Candidates[1].Start(ctx), f.NewRouter(ctx, 1), f.Place(ctx, "", 0, 1, 2))
	f.held(0)

	// coild gives the address to another node when it ends, and knows its router when it begins anew. Without its router no node has the address.
	f.Candidates[0].Coild.Stop()
	f.held(1)
	testkit.Check(t, f.Candidates[0].Start(ctx), f.Routers[1].Del(ctx))
	f.held(0)
	for _, n := range f.Candidates {
		if logs := n.Coild.Logs(1000); strings.Contains(logs, "forbidden") {
			t.Errorf("a right is missing:\n%s", logs)
		}
	}
}

// sendsAsItself opens connections from the router of a node, by its map as a router of an Egress has it, and wants that the host outside
// sees the floating address.
func (f *fixture) sendsAsItself(i int) {
	f.t.Helper()
	ctx, router := f.t.Context(), f.Routers[i]
	host := testkit.Must(f.NewHost(ctx, byte(10+i)))(f.t)
	defer func() { testkit.Check(f.t, host.Close()) }()
	testkit.Must(router.Run(ctx, "nft", fmt.Sprintf(
		"add table inet egress; add chain inet egress post { type nat hook postrouting priority 100; }; add rule inet egress post oifname eth0 snat ip to %s; add rule inet egress post oifname eth0 snat ip6 to %s",
		f.Addrs[0], f.Addrs[1])))(f.t)
	for j, own := range []netip.Addr{netip.AddrFrom4([4]byte{10, 255, 200, byte(10 + i)}), netip.MustParseAddr(fmt.Sprintf("fd00:255::c8:%x", 10+i))} {
		testkit.Eventually(f.t, 10*time.Second, fmt.Sprintf("the router of %s sends from %s", f.Candidates[i].Name, f.Addrs[j]), func() error {
			ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(3*time.Second))
			defer cancel()
			seen, err := host.Reach(ctx, own, router.Dial)
			if err == nil && seen != f.Addrs[j] {
				err = fmt.Errorf("the host outside sees %s", seen)
			}
			return err
		})
	}
}

// blocked lets the rules of another program drop what the router of a node sends: the node tells so.
func (f *fixture) blocked(i int) {
	f.t.Helper()
	n := f.Candidates[i]
	testkit.Must(n.Run(f.t.Context(), "nft", fmt.Sprintf("add table ip rpf; add chain ip rpf c { type filter hook forward priority 0; }; add rule ip rpf c ip saddr %s drop", f.Addrs[0])))(f.t)
	testkit.Eventually(f.t, 30*time.Second, n.Name+" tells that packets are dropped", func() error {
		b, err := f.Coil.CoilV2().AddressBlocks().Get(f.t.Context(), f.Block, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(b.Status.Conditions, func(c metav1.Condition) bool {
			return c.Type == v2.BlockForwardingBlocked && c.Status == metav1.ConditionTrue && strings.Contains(c.Message, n.Name)
		}) {
			return fmt.Errorf("conditions %+v", b.Status.Conditions)
		}
		return nil
	})
	testkit.Must(n.Run(f.t.Context(), "nft", "delete table ip rpf"))(f.t)
	testkit.Check(f.t, f.Place(f.t.Context(), n.Name, i, 0, 2))
	f.held(i)
}

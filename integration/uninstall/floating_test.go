package uninstall

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// serves gives the node addresses of Services, as coil-lb-controller does: it may hold the first one of a pool, and announces the second one beside another node.
func (n *node) serves(pool string) (all []netip.Addr) {
	n.t.Helper()
	ctx := n.t.Context()
	claims := n.Coil.CoilV2().AddressClaims("default")
	claim := &v2.AddressClaim{ObjectMeta: metav1.ObjectMeta{Name: pool}, Spec: v2.AddressClaimSpec{Pool: pool, Count: new(int32(2))}}
	testkit.Must(claims.Create(ctx, claim, metav1.CreateOptions{}))(n.t)
	testkit.Eventually(n.t, 20*time.Second, "the Services have addresses", func() (err error) {
		if claim, err = claims.Get(ctx, pool, metav1.GetOptions{}); err == nil && len(claim.Status.Addresses) != 2 {
			err = fmt.Errorf("%+v", claim.Status)
		}
		return err
	})
	mayHave := []v2.FloatingNode{{Node: n.Name, Addresses: []string{n.Addr4.String(), n.Addr6.String()}}, {Node: "elsewhere", Addresses: []string{"10.255.0.200"}}}
	for i, a := range claim.Status.Addresses {
		patch := testkit.Must(json.Marshal(map[string]any{"floating": map[string]any{
			"ports": []v2.FloatingPort{{Protocol: "TCP", Port: 80, Service: "default/web"}}, "successors": mayHave[i : i+1],
			"announcers": v2.FloatingAnnouncers{Nodes: [][]string{nil, {n.Name}}[i]},
		}}))(n.t)
		testkit.Must(n.Coil.CoilV2().AddressBlocks().Patch(ctx, a.Block, types.MergePatchType, patch, metav1.PatchOptions{}))(n.t)
		all = append(all, netip.MustParseAddr(a.IPv4), netip.MustParseAddr(a.IPv6))
	}
	return all
}

// A node that has floating addresses of an Egress and of Services when its coild is killed has nothing of them after the cleanup.
func TestFloatingAddress(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	n := newNode(t, r)
	n.check(r.AddNamespace(ctx, "routers", "default"), r.AddPool(ctx, "partners", 0, rig.Dual("10.255.65.1/32", "fd00:255::2:1/128")), r.Announce(ctx, "partners", v2.AnnounceNeighbor),
		r.AddPool(ctx, "services", 0, rig.Dual("203.0.113.98/31", "2001:db8:4::2/127")))
	before := n.settled()
	n.check(n.Start(ctx))
	f := testkit.Must(r.NewFloating(ctx, "routers", "partners", n.Node))(t)
	services := n.serves("services")
	testkit.Eventually(t, 20*time.Second, "the node has the addresses", func() error {
		out := n.sh(`for family in -4 -6; do
				ip $family route show table 116 proto 32; ip $family route show table 119 proto 32; ip $family route show table 255 proto 32; ip $family neigh show proxy
			done; nft list tables`)
		for _, a := range slices.Concat(f.Addrs, services) {
			want := 3 // to the router, for routing daemons, and for hosts of the link
			if slices.Contains(services, a) {
				want = 2 // to the node itself, and for routing daemons
			}
			if strings.Count(out, a.String()+" ") != want {
				return errors.New(out)
			}
		}
		if strings.Count(out, "coil_floating") != 3 {
			return errors.New(out)
		}
		return nil
	})
	n.Coild.Kill()
	testkit.Eventually(t, 20*time.Second, "for addresses that it holds the kernel has stopped answering by itself", func() error {
		out := n.sh("nft list ruleset")
		for _, a := range slices.Concat(f.Addrs, services) {
			lasts, want := regexp.MustCompile(`\b`+regexp.QuoteMeta(a.String())+` (timeout \S+ )?expires `).MatchString(out), slices.Contains(services[2:], a)
			if lasts != want {
				return fmt.Errorf("it answers for %s: %t, want %t\n%s", a, lasts, want, out)
			}
		}
		return nil
	})
	n.refused("1 pods", f.Routers[0].Name)
	out, err := n.cleanup("--force")
	n.check(err)
	t.Logf("it printed:\n%s", out)
	for _, want := range []string{"6 routes of protocol 32 from table 119", "2 routes of protocol 32 from table 116", "4 routes of protocol 32 from table 255", "2 proxy neighbour entries of protocol 30", "table ip coil_floating of nftables", "table ip6 coil_floating of nftables", "table arp coil_floating of nftables"} {
		if strings.Count(out, want) != 1 {
			t.Errorf("%d lines are of %q, want 1", strings.Count(out, want), want)
		}
	}
	n.same(before)
	if out, err = n.cleanup(); err != nil || out != "" {
		t.Errorf("again it printed %q, %v", out, err)
	}
	n.check(f.Routers[0].Close())
}

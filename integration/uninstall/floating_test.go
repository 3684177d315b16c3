package uninstall

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// A node that has a floating address when its coild is killed has nothing of it after the cleanup.
func TestFloatingAddress(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	n := newNode(t, r)
	n.check(r.AddNamespace(ctx, "routers", "default"), r.AddPool(ctx, "partners", 0, rig.Dual("10.255.65.1/32", "fd00:255::2:1/128")), r.Announce(ctx, "partners", v2.AnnounceNeighbor))
	before := n.settled()
	n.check(n.Start(ctx))
	f := testkit.Must(r.NewFloating(ctx, "routers", "partners", n.Node))(t)
	testkit.Eventually(t, 20*time.Second, "the node has the address", func() error {
		out := n.sh(`for family in -4 -6; do
				ip $family route show table 116 proto 32; ip $family route show table 119 proto 32; ip $family neigh show proxy
			done; nft list tables`)
		for _, a := range f.Addrs {
			if strings.Count(out, a.String()+" ") != 3 {
				return errors.New(out)
			}
		}
		if strings.Count(out, "coil_floating") != 3 {
			return errors.New(out)
		}
		return nil
	})
	n.Coild.Kill()
	testkit.Eventually(t, 20*time.Second, "the kernel has stopped answering by itself", func() error {
		if out := n.sh("nft list ruleset"); strings.Contains(out, "expires") {
			return errors.New(out)
		}
		return nil
	})
	n.sh("ip route add local 203.0.113.99 dev lo table local proto 32") // as of an address of Services
	n.refused("1 pods", f.Routers[0].Name)
	out, err := n.cleanup("--force")
	n.check(err)
	t.Logf("it printed:\n%s", out)
	for _, want := range []string{"2 routes of protocol 32 from table 119", "2 routes of protocol 32 from table 116", "1 routes of protocol 32 from table 255", "2 proxy neighbour entries of protocol 30", "table ip coil_floating of nftables", "table ip6 coil_floating of nftables", "table arp coil_floating of nftables"} {
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

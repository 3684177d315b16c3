package egress

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

func (s *standIns) Check(ctx context.Context, _ *netns.NS, h *rtnl.Handle, _ uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error) {
	links := map[netip.Addr]dataplane.TunnelLink{}
	var errs []error
	for _, w := range want {
		l, err := h.LinkByName(ctx, dataplane.TunnelName(w.Remote, 0))
		errs = append(errs, err)
		if err == nil {
			links[w.Remote] = dataplane.TunnelLink{Index: l.Index, Name: l.Name}
		}
	}
	return links, errors.Join(errs...)
}

// Each thing that somebody destroys is told by its name, and nothing is repaired.
func TestCheck(t *testing.T) {
	p := newPod(t)
	e := gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
	e.OriginatingOnly = true
	e.InCluster = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}
	made := p.mustUse(e).State
	check := func() error { return p.check(made) }
	if err := check(); err != nil {
		t.Fatal(err)
	}
	named := func(set string) string { return "$(nft list sets | grep -o '" + set + "_[0-9a-f]*')" }
	for _, c := range []struct{ damage, says string }{
		{"ip link del fou4_0a600001", "fou4_0a600001"},
		{"ip rule del priority 1700", "fwmark"},
		{"ip -6 rule del priority 1900", "117"},
		{"ip rule del priority 2100", "118"},
		{"ip route flush table 118", "192.0.2.0/24"},
		{"ip route del unreachable 192.0.2.0/24 table 118", "unreachable 192.0.2.0/24"},
		{"ip route del 172.20.0.0/16 dev fou4_0a600001 table 117", "172.20.0.0/16"},
		{"ip route replace 192.0.2.0/24 dev eth0 table 118 proto 30", "192.0.2.0/24"},
		{"ip -6 route flush table 118", "2001:db8::/32"},
		{"ip route del throw 100.64.0.0/16 table 117", "100.64.0.0/16"},
		{"nft delete table inet coil", "table coil of nftables is missing"},
		{"nft flush chain inet coil leave", "table coil of nftables: rule leave"},
		{"nft flush set inet coil peers_ipv6", "set peers_ipv6 has other elements"},
		{"nft delete element inet coil " + named("destinations_ipv4") + " { 192.0.2.0-192.0.2.255 }", "set destinations_ipv4_"},
		{"nft flush chain inet coil exit", "table coil of nftables: rule exit"},
		{"nft flush set inet coil " + named("sources_ipv4"), "set sources_ipv4_"},
		{"sysctl -qw net.ipv4.conf.all.rp_filter=1", "net/ipv4/conf/all/rp_filter is 1, not 0"},
		{"sysctl -qw net.ipv4.conf.fou4_0a600001.rp_filter=2", "fou4_0a600001/rp_filter is 2"},
	} {
		if _, err := p.ns.Run("sh", "-c", c.damage); err != nil {
			t.Fatal(err)
		}
		for range 2 { // nothing is repaired
			if err := check(); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("after %s: %v", c.damage, err)
			}
		}
		p.mustUse(e)
		if err := check(); err != nil {
			t.Errorf("restored after %s: %v", c.damage, err)
		}
	}

	if _, err := p.kernel.Router(t.Context(), p.at(), "eth0"); err != nil {
		t.Fatal(err)
	}
	if err := p.kernel.CheckRouter(t.Context(), p.at(), "eth0"); err != nil {
		t.Error(err)
	}
	if _, err := p.ns.Run("sysctl", "-qw", "net.ipv6.conf.all.forwarding=0"); err != nil {
		t.Fatal(err)
	}
	if err := p.kernel.CheckRouter(t.Context(), p.at(), "eth0"); err == nil || !strings.Contains(err.Error(), "net/ipv6/conf/all/forwarding") {
		t.Errorf("a router that doesn't forward: %v", err)
	}
	gone := p.at()
	gone.Inode++
	if err := errors.Join(p.kernel.Check(t.Context(), gone, p.client, made)); !errors.Is(err, ErrGone) {
		t.Errorf("another network namespace: %v", err)
	}
	if err := p.kernel.CheckRouter(t.Context(), gone, "eth0"); !errors.Is(err, ErrGone) {
		t.Errorf("another network namespace: %v", err)
	}
}

// CHECK is about what was made, as far as this process knows.
func TestManagerCheck(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("a", "a")
	w.pod("plain", "")
	m := w.manager(true)
	id := sandboxOf("a").ID
	for _, pod := range []string{"a", "plain"} {
		if err := errors.Join(w.add(t, m, pod), m.Check(t.Context(), sandboxOf(pod).ID)); err != nil {
			t.Fatal(err)
		}
	}
	w.wrong = errors.New("tunnel x is missing")
	if err := m.Check(t.Context(), id); err == nil || err.Error() != "egress: tunnel x is missing" {
		t.Errorf("something is missing: %v", err)
	}
	if err := errors.Join(m.Check(t.Context(), sandboxOf("plain").ID), m.Check(t.Context(), store.ID{ContainerID: "other"})); err != nil {
		t.Errorf("pods without Egress: %v", err)
	}

	// Another process doesn't know what there should be until it has looked.
	w.wrong = nil
	for what, guard := range map[string]dataplane.ClientGuard{"another": {}, "its": w.guards["/a"]} {
		w.guards["/a"] = guard
		if err := m.Check(t.Context(), id); (err != nil) != (what == "another") {
			t.Errorf("the node has %s guard: %v", what, err)
		}
	}
	again := w.manager(true)
	if err := again.Restore(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if err := again.Check(t.Context(), id); !errors.Is(err, node.ErrUnavailable) {
		t.Errorf("after a restart: %v", err)
	}
	w.broken["/a"] = errors.New("no such device")
	if err := again.sync(t.Context(), "a"); err == nil {
		t.Error("no error")
	}
	if err := again.Check(t.Context(), id); err == nil || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("what couldn't be made: %v", err)
	}
	delete(w.broken, "/a")
	testkit.Check(t, again.sync(t.Context(), "a"))
	if err := errors.Join(again.Check(t.Context(), id), again.Forget(t.Context(), id), again.Check(t.Context(), id)); err != nil {
		t.Errorf("set up, then deleted: %v", err)
	}
}

package clientnet

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
)

// Each thing that somebody destroys is told by its name, and nothing is repaired.
func TestCheck(t *testing.T) {
	p := newPod(t)
	e := clientnettest.Gateway("net/a", 1, "192.0.2.0/24", "2001:db8::/32", "172.20.0.0/16")
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
		if _, err := p.NS.Run("sh", "-c", c.damage); err != nil {
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

	if _, err := p.network.Router(t.Context(), p.At(), "eth0", false); err != nil {
		t.Fatal(err)
	}
	if err := p.network.CheckRouter(t.Context(), p.At(), "eth0"); err != nil {
		t.Error(err)
	}
	if _, err := p.NS.Run("sysctl", "-qw", "net.ipv6.conf.all.forwarding=0"); err != nil {
		t.Fatal(err)
	}
	if err := p.network.CheckRouter(t.Context(), p.At(), "eth0"); err == nil || !strings.Contains(err.Error(), "net/ipv6/conf/all/forwarding") {
		t.Errorf("a router that doesn't forward: %v", err)
	}
	gone := p.At()
	gone.Inode++
	if err := errors.Join(p.network.Check(t.Context(), gone, p.Client, made)); !errors.Is(err, ErrGone) {
		t.Errorf("another network namespace: %v", err)
	}
	if err := p.network.CheckRouter(t.Context(), gone, "eth0"); !errors.Is(err, ErrGone) {
		t.Errorf("another network namespace: %v", err)
	}
}

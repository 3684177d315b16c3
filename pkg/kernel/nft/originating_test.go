package nft_test

import (
	"net/netip"
	"testing"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// A client has two links, and all that it sends takes the second: the first answers only
// connections that came in by it from one of the sources.
func TestOriginating(t *testing.T) {
	client, peer := netnstest.New(t), netnstest.New(t)
	client.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", peer.Path)
	client.IP(t, "link", "add", "tunnel", "type", "veth", "peer", "name", "tunnel", "netns", peer.Path)
	for _, n := range []*netnstest.NS{client, peer} {
		for _, link := range []string{"lo", "eth0", "tunnel"} {
			n.IP(t, "link", "set", link, "up")
		}
		if _, err := n.Run("sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.eth0.rp_filter=0", "net.ipv4.conf.tunnel.rp_filter=0"); err != nil {
			t.Fatal(err)
		}
	}
	var sources []netipx.IPRange
	l := lab{t: t}
	uplink := l.index(client, "eth0")
	for _, f := range families {
		l.address(client, "eth0", addr(f, 1, 1), 24)
		l.address(peer, "eth0", addr(f, 1, 2), 24)
		family := map[dataplane.Family]string{4: "-4", 6: "-6"}[f]
		for _, source := range []netip.Addr{addr(f, 8, 1), addr(f, 9, 1)} {
			l.address(peer, "lo", source, 32)
			client.IP(t, "route", "add", source.String(), "dev", "tunnel")
		}
		client.IP(t, family, "route", "add", "default", "via", addr(f, 1, 2).String(), "table", "99")
		client.IP(t, family, "rule", "add", "fwmark", "0x100000/0x100000", "lookup", "99", "pref", "1700")
		sources = append(sources, netipx.IPRangeFrom(addr(f, 8, 1), addr(f, 8, 1)))
	}
	// Packets that leave by the tunnel get lost.
	client.IP(t, "link", "set", "tunnel", "arp", "off")
	o := clientTable(t, client.NS)
	t.Cleanup(o.Close)
	ping := func(f dataplane.Family, from netip.Addr) error {
		_, err := peer.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", from.String(), addr(f, 1, 1).String())
		return err
	}
	for _, f := range families {
		if ping(f, addr(f, 8, 1)) == nil {
			t.Fatal("answered by eth0 without a rule")
		}
	}
	for _, want := range []dataplane.Result{{Added: 1}, {}} {
		if got := testkit.Must(o.Sync(t.Context(), ruleset.Client{Uplink: uplink, Port: 5555, Sources: sources}))(t); got != want {
			t.Errorf("Sync did %+v, want %+v", got, want)
		}
	}
	for _, f := range families {
		if err := ping(f, addr(f, 8, 1)); err != nil {
			t.Errorf("from a source: %v", err)
		}
		if ping(f, addr(f, 9, 1)) == nil {
			t.Errorf("%s: answered by eth0 what isn't from a source", f)
		}
	}
	testkit.Check(t, o.Remove(t.Context()), o.Remove(t.Context()))
	for _, f := range families {
		if ping(f, addr(f, 8, 1)) == nil {
			t.Error("answered by eth0 after the removal")
		}
	}
}

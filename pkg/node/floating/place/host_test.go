package place

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// rules makes what another program on the node makes of nftables.
func (l *lab) rules(text string) {
	l.t.Helper()
	testkit.Must(l.node.Run("nft", text))(l.t)
}

// The node finds out that rules of others drop packets of an address, in each family, and by none of its other properties. No probe leaves
// the node, and nothing that is others' changes.
func TestBlocked(t *testing.T) {
	l := newLab(t)
	p := l.start()
	o := order(7, time.Hour)
	testkit.Check(t, p.Answer(t.Context(), o))
	l.await(o, true)
	outside := testkit.Must(l.host.Lab().NewCapture("eth0", func(p netlab.Packet) bool {
		return p.Protocol == unix.IPPROTO_UDP && p.DPort == 9
	}))(t)
	is := func(what string, want ...dataplane.Family) {
		t.Helper()
		got := testkit.Must(p.Blocked(t.Context(), o.Address))(t)
		if !slices.Equal(got, want) {
			t.Errorf("%s: blocked are %v, want %v", what, got, want)
		}
	}
	is("without a route to the outside")
	testkit.Check(t, l.node.Lab().IP(t.Context(), "route add default via 10.0.0.2", "-6 route add default via fd00::2"))
	is("without rules of others")
	l.rules("add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; add rule ip filter FORWARD ip saddr 10.0.1.0/24 accept")
	before := testkit.Must(l.node.Run("nft", "list", "table", "ip", "filter"))(t)
	is("with a policy and an exception for pods", dataplane.IPv4)
	if got := testkit.Must(p.cfg.Table.Dropping())(t); !slices.Equal(got, []string{"ip filter FORWARD"}) {
		t.Errorf("chains that drop are %q", got)
	}
	l.rules("add table ip6 t; add chain ip6 t c { type filter hook forward priority 10; }; add rule ip6 t c iifname \"pod\" drop")
	is("with a rule for the link", dataplane.IPv4, dataplane.IPv6)
	l.rules("delete table ip6 t")
	is("with a policy", dataplane.IPv4)
	if after := testkit.Must(l.node.Run("nft", "list", "table", "ip", "filter"))(t); after != before {
		t.Errorf("the table of another program was\n%s\nand is\n%s", before, after)
	}
	l.rules("add rule ip filter FORWARD ip saddr 192.0.2.0/24 accept")
	is("with an exception for the address")
	if got := outside.Take(); len(got) > 0 {
		t.Errorf("outside are %v", got)
	}
	l.rules("flush chain ip filter FORWARD")
	is("without it again", dataplane.IPv4)
	testkit.Check(t, p.Stop(t.Context(), o.Address))
	is("when the node has stopped")
	l.pods["router"] = Pod{Link: l.pods["router"].Link, Address: l.pods["router"].Address}
	if _, err := p.Blocked(t.Context(), o.Address); err == nil {
		t.Error("probes are sent in a network namespace that isn't known")
	}
	delete(l.pods, "router")
	is("when the pod has gone")
	testkit.Must(outside.Close())(t)
}

// sees returns by which source the host gets a packet that the pod sends from an address.
func (l *lab) sees(ctx context.Context, a netip.Addr) (netip.Addr, error) {
	to := "10.0.0.2"
	if a.Is6() {
		to = "fd00::2"
	}
	hears, err := l.host.Lab().ListenPacket(ctx, "udp", net.JoinHostPort(to, "0"))
	if err != nil {
		return netip.Addr{}, err
	}
	defer hears.Close()
	sends, err := l.pod.Lab().ListenPacket(ctx, "udp", netip.AddrPortFrom(a, 0).String())
	if err != nil {
		return netip.Addr{}, err
	}
	defer sends.Close()
	if _, err := sends.WriteTo([]byte("x"), hears.LocalAddr()); err != nil {
		return netip.Addr{}, err
	}
	if err := hears.SetReadDeadline(time.Now().Add(testkit.Timeout(200 * time.Millisecond))); err != nil {
		return netip.Addr{}, err
	}
	_, from, err := hears.ReadFrom(make([]byte, 1))
	if err != nil {
		return netip.Addr{}, err
	}
	at, err := netip.ParseAddrPort(from.String())
	return at.Addr().Unmap(), err
}

// middle sends to an address what comes in the middle of a connection, and says whether that reaches the pod.
func (l *lab) middle(a netip.Addr) error {
	from := netip.MustParseAddr("10.0.0.2")
	if a.Is6() {
		from = netip.MustParseAddr("fd00::2")
	}
	arrived, err := l.pod.Lab().NewCapture("eth0", func(p netlab.Packet) bool { return p.Protocol == unix.IPPROTO_TCP && p.Dst == a })
	if err != nil {
		return err
	}
	raw, err := l.host.Lab().NewRaw(from, a, unix.IPPROTO_TCP, 16)
	if err != nil {
		return err
	}
	defer raw.Close()
	const ack = 0x10
	err = raw.Send(netlab.TCPHeader(443, 40000, 1, 1, ack))
	until := time.Now().Add(testkit.Timeout(200 * time.Millisecond))
	for err == nil && len(arrived.All(func(netlab.Packet) bool { return true })) == 0 {
		if time.Now().After(until) {
			err = errors.New("it doesn't arrive")
		}
		<-time.After(5 * time.Millisecond)
	}
	_, errClose := arrived.Close()
	return errors.Join(err, errClose)
}

// Rules of others that translate all that leaves the node, and drop what belongs to no connection that they have seen, leave the packets of
// Egresses' addresses alone, unless these are to be tracked: then the source stays all the same.
func TestRulesOfOthers(t *testing.T) {
	for _, c := range []struct {
		name              string
		ofEgress, tracked bool
		keeps, moves      bool
	}{
		{"of an Egress", true, false, true, true},
		{"tracked", true, true, true, false},
		{"of others", false, false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLab(t)
			l.tracked = c.tracked
			p := l.start()
			o := order(7, time.Hour)
			o.OfEgress = c.ofEgress
			testkit.Check(t, p.Answer(t.Context(), o))
			l.await(o, true)
			l.rules("add table inet others; add chain inet others post { type nat hook postrouting priority 100; }; add rule inet others post oifname \"uplink\" masquerade;" +
				"add chain inet others forward { type filter hook forward priority 0; }; add rule inet others forward ct state invalid drop")
			testkit.Check(t, l.node.Lab().Sysctl("netfilter/nf_conntrack_tcp_loose=0"))
			for _, a := range o.Addrs() {
				var from netip.Addr
				testkit.Eventually(t, 5*time.Second, fmt.Sprintf("the host hears %s", a), func() (err error) {
					from, err = l.sees(t.Context(), a)
					return err
				})
				if (from == a) != c.keeps {
					t.Errorf("the host sees %s, which sends from %s", from, a)
				}
				if err := l.middle(a); (err == nil) != c.moves {
					t.Errorf("a packet of an old connection to %s: %v", a, err)
				}
			}
		})
	}
}

// The host's own connections with an Egress's address are tracked, whatever others do with those that aren't.
func TestHostsOwnConnections(t *testing.T) {
	l := newLab(t)
	p := l.start()
	o := order(7, time.Hour)
	o.OfEgress = true
	testkit.Check(t, p.Answer(t.Context(), o))
	l.await(o, true)
	l.rules("add table inet others; add chain inet others in { type filter hook input priority 0; policy drop; }; add rule inet others in ct state established accept;" +
		"add rule inet others in icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept")
	for _, a := range o.Addrs() {
		testkit.Eventually(t, 5*time.Second, fmt.Sprintf("%s answers the node", a), func() error { return l.node.Ping(a, time.Second) })
	}
	if out := testkit.Must(l.node.Run("nft", "list", "ruleset"))(t); !strings.Contains(out, "notrack") {
		t.Errorf("the rules are %s", out)
	}
}

package place

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// sees returns by which source the host gets a packet that the pod sends from an address.
func (l *lab) sees(ctx context.Context, a netip.Addr) (netip.Addr, error) {
	to := "10.0.0.2"
	if a.Is6() {
		to = "fd00::2"
	}
	hears, err := l.Host.Lab().ListenPacket(ctx, "udp", net.JoinHostPort(to, "0"))
	if err != nil {
		return netip.Addr{}, err
	}
	defer hears.Close()
	sends, err := l.Pod.Lab().ListenPacket(ctx, "udp", netip.AddrPortFrom(a, 0).String())
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
	arrived, err := l.Pod.Lab().NewCapture("eth0", func(p netlab.Packet) bool { return p.Protocol == unix.IPPROTO_TCP && p.Dst == a })
	if err != nil {
		return err
	}
	raw, err := l.Host.Lab().NewRaw(from, a, unix.IPPROTO_TCP, 16)
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
			o := floatingtest.Order(7, time.Hour)
			o.OfEgress = c.ofEgress
			testkit.Check(t, p.Answer(t.Context(), o))
			l.Await(o, true)
			l.Rules("add table inet others; add chain inet others post { type nat hook postrouting priority 100; }; add rule inet others post oifname \"uplink\" masquerade;" +
				"add chain inet others forward { type filter hook forward priority 0; }; add rule inet others forward ct state invalid drop")
			testkit.Check(t, l.Node.Lab().Sysctl("netfilter/nf_conntrack_tcp_loose=0"))
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
	o := floatingtest.Order(7, time.Hour)
	o.OfEgress = true
	testkit.Check(t, p.Answer(t.Context(), o))
	l.Await(o, true)
	l.Rules("add table inet others; add chain inet others in { type filter hook input priority 0; policy drop; }; add rule inet others in ct state established accept;" +
		"add rule inet others in icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept")
	for _, a := range o.Addrs() {
		testkit.Eventually(t, 5*time.Second, fmt.Sprintf("%s answers the node", a), func() error { return l.Node.Ping(a, time.Second) })
	}
	// So they are by an address that comes later.
	testkit.Check(t, l.Node.Lab().IP(t.Context(), "addr add 10.9.9.9/32 dev lo", "addr add fd00:9::9/128 dev lo nodad", "route add 192.0.2.7 dev pod src 10.9.9.9 metric 1"),
		p.Sync(t.Context()))
	for _, ping := range [][]string{{"-I", "10.9.9.9", "192.0.2.7"}, {"-I", "fd00:9::9", "2001:db8::7"}} {
		testkit.Must(l.Node.Run("ping", append([]string{"-c", "1", "-W", "2"}, ping...)...))(t)
	}
	if out := testkit.Must(l.Node.Run("nft", "list", "ruleset"))(t); !strings.Contains(out, "notrack") {
		t.Errorf("the rules are %s", out)
	}
}

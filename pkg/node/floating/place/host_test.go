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
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// rules makes what another program on the node makes of nftables.
func (l *lab) rules(text string) {
	l.t.Helper()
	testkit.Must(l.node.Run("nft", text))(l.t)
}

// leaving captures what probes may cause outside of the node: themselves, and errors about them. It returns a function that wants none.
func (l *lab) leaving() (none func()) {
	l.t.Helper()
	seen := testkit.Must(l.host.Lab().NewCapture("eth0", func(p netlab.Packet) bool {
		isError := p.Protocol == unix.IPPROTO_ICMP || p.Protocol == unix.IPPROTO_ICMPV6
		return p.Protocol == unix.IPPROTO_UDP && p.DPort == 9 || isError && slices.Contains(order(7, 0).Addrs(), p.Dst)
	}))(l.t)
	return func() {
		l.t.Helper()
		if got := seen.Take(); len(got) > 0 {
			l.t.Errorf("outside are %v", got)
		}
		testkit.Must(seen.Close())(l.t)
	}
}

// outside gives the node routes.
func (l *lab) outside() {
	l.t.Helper()
	testkit.Check(l.t, l.node.Lab().IP(l.t.Context(), "route add default via 10.0.0.2", "-6 route add default via fd00::2"))
}

// fates returns a function that wants a fate of the probes of an address.
func (l *lab) fates(p *Place, a floating.Address) func(what string, passed bool, dropped ...dataplane.Family) {
	return func(what string, passed bool, dropped ...dataplane.Family) {
		l.t.Helper()
		got := testkit.Must(p.Probe(l.t.Context(), a))(l.t)
		if got.Passed != passed || !slices.Equal(got.Dropped, dropped) {
			l.t.Errorf("%s: the fate is %+v, want passed %t, dropped %v", what, got, passed, dropped)
		}
	}
}

const forwardingPolicy = "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }; add rule ip filter FORWARD ip saddr 10.0.1.0/24 accept"

// The node finds out that rules of others drop packets of an address, in each family, and by none of its other properties. No probe leaves
// the node, and nothing that is others' changes.
func TestProbe(t *testing.T) {
	l := newLab(t)
	p := l.start()
	o := order(7, time.Hour)
	testkit.Check(t, p.Answer(t.Context(), o))
	l.await(o, true)
	none := l.leaving()
	is := l.fates(p, o.Address)
	is("without a route to the outside", false)
	testkit.Check(t, l.node.Lab().IP(t.Context(), "route add default via 10.0.0.2"))
	is("with a route of IPv4 alone", true)
	testkit.Check(t, l.node.Lab().IP(t.Context(), "-6 route add default via fd00::2"))
	is("without rules of others", true)
	l.rules(forwardingPolicy)
	before := testkit.Must(l.node.Run("nft", "list", "table", "ip", "filter"))(t)
	is("with a policy and an exception for pods", false, dataplane.IPv4)
	if got := testkit.Must(p.cfg.Tables.Dropping())(t); !slices.Equal(got, []string{"ip filter FORWARD"}) {
		t.Errorf("chains that drop are %q", got)
	}
	l.rules("add table ip6 t; add chain ip6 t c { type filter hook forward priority 10; }; add rule ip6 t c iifname \"pod\" drop")
	is("with a rule for the link", false, dataplane.IPv4, dataplane.IPv6)
	l.rules("delete table ip6 t")
	is("with a policy", false, dataplane.IPv4)
	if after := testkit.Must(l.node.Run("nft", "list", "table", "ip", "filter"))(t); after != before {
		t.Errorf("the table of another program was\n%s\nand is\n%s", before, after)
	}
	l.rules("add rule ip filter FORWARD ip saddr 192.0.2.0/24 accept")
	is("with an exception for the address", true)
	l.rules("flush chain ip filter FORWARD")
	is("without it again", false, dataplane.IPv4)
	l.rules("delete table ip filter; add table ip early; add chain ip early c { type filter hook prerouting priority 0; }; add rule ip early c iifname \"pod\" drop")
	is("before the node decides to forward", false, dataplane.IPv4)
	l.rules("delete table ip early")
	testkit.Check(t, p.Stop(t.Context(), o.Address))
	p.Wait()
	is("when the node has stopped", false)
	l.pods["router"] = Pod{Link: l.pods["router"].Link, Address: l.pods["router"].Address}
	if _, err := p.Probe(t.Context(), o.Address); err == nil {
		t.Error("probes are sent in a network namespace that isn't known")
	}
	delete(l.pods, "router")
	is("when the pod has gone", false)
	none()
}

// A node finds out whether it would forward packets of an address that is at another node. It doesn't answer for it, leads no packets to it,
// and nothing leaves it: no probe, and no error about one.
func TestProbeOfAddressElsewhere(t *testing.T) {
	for _, tracked := range []bool{false, true} {
		t.Run(fmt.Sprintf("tracked %t", tracked), func(t *testing.T) {
			l := newLab(t)
			l.tracked = tracked
			p := l.start()
			a := order(7, 0).Address
			a.OfEgress = true
			l.outside()
			none := l.leaving()
			is := l.fates(p, a)
			is("before it is prepared", false)
			testkit.Check(t, p.Prepare(t.Context(), []floating.Address{a}))
			is("without rules of others", true)
			testkit.Check(t, p.Sync(t.Context()), p.Prepare(t.Context(), []floating.Address{a}))
			is("after a look at all objects", true)
			for _, to := range a.Addrs() {
				testkit.Check(t, l.passes(to, false))
			}
			if got := l.routes("116") + l.routes("119"); got != "" || len(l.told.calls) > 0 {
				t.Errorf("routes are %q, and hosts were told %q", got, l.told.calls)
			}
			l.rules(forwardingPolicy)
			is("with a policy", false, dataplane.IPv4)
			l.rules("delete table ip filter; add table inet t; add chain inet t c { type filter hook forward priority 10; }; add rule inet t c iifname \"pod\" reject")
			is("with a rule that says so", false, dataplane.IPv4, dataplane.IPv6)
			l.rules("delete table inet t; add table inet t; add chain inet t c { type nat hook postrouting priority 100; }; add rule inet t c masquerade")
			is("translated, unless it is an Egress's", true)
			l.rules("delete table inet t; add table inet t; add chain inet t c { type filter hook postrouting priority 300; }; add rule inet t c ip saddr 192.0.2.7 ip saddr set 10.0.0.1")
			is("with another source", false, dataplane.IPv4)
			l.rules("delete table inet t")
			// It comes here, and goes again.
			o := order(7, time.Hour)
			o.OfEgress = true
			testkit.Check(t, p.Answer(t.Context(), o))
			l.await(o, true)
			is("when it is here", true)
			testkit.Check(t, p.Stop(t.Context(), o.Address))
			is("when it has gone", true)
			testkit.Check(t, p.Prepare(t.Context(), nil))
			is("when it isn't prepared any more", false)
			if got := testkit.Must(l.node.Run("nft", "list", "ruleset"))(t); got != "" {
				t.Errorf("there is still %s", got)
			}
			none()
		})
	}
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
	// So they are by an address that comes later.
	testkit.Check(t, l.node.Lab().IP(t.Context(), "addr add 10.9.9.9/32 dev lo", "addr add fd00:9::9/128 dev lo nodad", "route add 192.0.2.7 dev pod src 10.9.9.9 metric 1"),
		p.Sync(t.Context()))
	for _, ping := range [][]string{{"-I", "10.9.9.9", "192.0.2.7"}, {"-I", "fd00:9::9", "2001:db8::7"}} {
		testkit.Must(l.node.Run("ping", append([]string{"-c", "1", "-W", "2"}, ping...)...))(t)
	}
	if out := testkit.Must(l.node.Run("nft", "list", "ruleset"))(t); !strings.Contains(out, "notrack") {
		t.Errorf("the rules are %s", out)
	}
}

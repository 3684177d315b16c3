package nft_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// floatingLab is a node between a host and a pod that has floating addresses.
type floatingLab struct {
	t                   *testing.T
	host, node, pod     *netnstest.NS
	tables              map[dataplane.Family]*nft.Table
	addrs               map[dataplane.Family]netip.Addr
	hostAddrs           map[dataplane.Family]netip.Addr
	toPod, toHost       map[dataplane.Family]net.Conn
	hostHears, podHears map[dataplane.Family]net.PacketConn
}

func newFloatingLab(t *testing.T) *floatingLab {
	l := &floatingLab{
		t: t, host: netnstest.New(t), node: netnstest.New(t), pod: netnstest.New(t),
		addrs:     map[dataplane.Family]netip.Addr{dataplane.IPv4: netip.MustParseAddr("192.0.2.7"), dataplane.IPv6: netip.MustParseAddr("2001:db8::7")},
		hostAddrs: map[dataplane.Family]netip.Addr{dataplane.IPv4: netip.MustParseAddr("10.0.0.2"), dataplane.IPv6: netip.MustParseAddr("fd00::2")},
		toPod:     map[dataplane.Family]net.Conn{}, toHost: map[dataplane.Family]net.Conn{},
		hostHears: map[dataplane.Family]net.PacketConn{}, podHears: map[dataplane.Family]net.PacketConn{},
	}
	ctx := t.Context()
	l.tables = map[dataplane.Family]*nft.Table{}
	for _, f := range families {
		l.tables[f] = testkit.Must(nft.NewIP(l.node.NS, dataplane.NftTableFloating, f))(t)
		t.Cleanup(l.tables[f].Close)
	}
	testkit.Check(t,
		l.node.Lab().Forward(),
		l.node.Lab().IP(ctx,
			fmt.Sprintf("link add uplink type veth peer name eth0 netns %s", l.host.Lab().Path()),
			fmt.Sprintf("link add pod type veth peer name eth0 netns %s", l.pod.Lab().Path()),
			"link set uplink up", "link set pod up",
			"addr add 10.0.0.1/24 dev uplink", "addr add fd00::1/64 dev uplink nodad",
			"addr add 10.0.1.1/24 dev pod", "addr add fd00:1::1/64 dev pod nodad"),
		l.host.Lab().IP(ctx, "link set eth0 up", "addr add 10.0.0.2/24 dev eth0", "addr add fd00::2/64 dev eth0 nodad",
			"route add 192.0.2.7 via 10.0.0.1", "route add 2001:db8::7 via fd00::1"),
		l.pod.Lab().IP(ctx, "link set eth0 up", "addr add 10.0.1.2/24 dev eth0", "addr add fd00:1::2/64 dev eth0 nodad",
			"addr add 192.0.2.7/32 dev lo", "addr add 2001:db8::7/128 dev lo nodad", "route add default via 10.0.1.1", "-6 route add default via fd00:1::1"),
		l.node.Lab().IP(ctx, "route add 192.0.2.7 via 10.0.1.2 dev pod onlink", "route add 2001:db8::7 via fd00:1::2 dev pod onlink"),
	)
	for _, f := range families {
		l.hostHears[f], l.toHost[f] = l.way(l.pod, l.addrs[f], l.host, l.hostAddrs[f])
		l.podHears[f], l.toPod[f] = l.way(l.host, l.hostAddrs[f], l.pod, l.addrs[f])
	}
	return l
}

// way returns a socket at an address, and one that sends to it.
func (l *floatingLab) way(from *netnstest.NS, source netip.Addr, to *netnstest.NS, target netip.Addr) (hears net.PacketConn, sends net.Conn) {
	l.t.Helper()
	testkit.Check(l.t, to.Do(func() (err error) {
		hears, err = net.ListenPacket("udp", netip.AddrPortFrom(target, 0).String())
		return err
	}), from.Do(func() (err error) {
		sends, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)), hears.LocalAddr().(*net.UDPAddr))
		return err
	}))
	l.t.Cleanup(func() { testkit.Check(l.t, hears.Close(), sends.Close()) })
	return hears, sends
}

// passes says whether packets of a family pass in both directions.
func (l *floatingLab) passes(f dataplane.Family) bool {
	passed := 0
	for _, way := range []struct {
		sends net.Conn
		hears net.PacketConn
	}{{l.toHost[f], l.hostHears[f]}, {l.toPod[f], l.podHears[f]}} {
		text := time.Now().String()
		testkit.Must(way.sends.Write([]byte(text)))(l.t)
		testkit.Check(l.t, way.hears.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
		for buffer := make([]byte, 200); ; {
			n, _, err := way.hears.ReadFrom(buffer)
			if err != nil {
				break
			}
			if string(buffer[:n]) == text {
				passed++
				break
			}
		}
	}
	return passed == 2
}

func (l *floatingLab) await(f dataplane.Family, pass bool) {
	l.t.Helper()
	testkit.Eventually(l.t, 5*time.Second, fmt.Sprintf("%s passes: %t", f, pass), func() error {
		if l.passes(f) != pass {
			return errors.New("not yet")
		}
		return nil
	})
}

func (l *floatingLab) renew(f dataplane.Family, d time.Duration) {
	l.t.Helper()
	testkit.Check(l.t, l.tables[f].Renew(l.t.Context(), nft.Renewal{Set: ruleset.Answering(f), Key: dataplane.KeyOf(l.addrs[f]), For: d}))
}

// counted is what the node has counted of an address.
func (l *floatingLab) counted(f dataplane.Family, set string) nft.ElementCounter {
	l.t.Helper()
	all := testkit.Must(l.tables[f].Counted(l.t.Context(), f.Named(set)))(l.t)
	if len(all) != 1 || all[0].Key != dataplane.KeyOf(l.addrs[f]) {
		l.t.Fatalf("the set %s counts %+v", set, all)
	}
	return all[0]
}

// The node stops answering for an address by itself, at the time that it was told, and at once when it is told to.
func TestFloatingEndsByItself(t *testing.T) {
	l := newFloatingLab(t)
	for _, f := range families {
		l.await(f, true) // all is set up
	}
	addrs := []netip.Addr{l.addrs[dataplane.IPv4], l.addrs[dataplane.IPv6]}
	want := ruleset.Floating{Addresses: addrs, OfEgresses: addrs}
	shown := want
	for _, text := range []string{"203.0.113.8", "2001:db8:113::8"} {
		a := netip.MustParseAddr(text)
		shown.Addresses = append(slices.Clone(shown.Addresses), a)
		shown.Services = append(shown.Services, ruleset.Service{Address: a, Ports: []ruleset.Port{{Protocol: unix.IPPROTO_TCP, Port: 443}, {Protocol: unix.IPPROTO_UDP, Port: 53}}})
	}
	for _, f := range families {
		tracked := shown
		tracked.Tracked = true
		family := map[dataplane.Family]string{dataplane.IPv4: "ip", dataplane.IPv6: "ip6"}[f]
		testkit.Must(l.tables[f].Sync(t.Context(), tracked.Ruleset(f)))(t)
		goldenOf(t, l.node, family, dataplane.NftTableFloating, "floating_tracked_"+family)
		testkit.Must(l.tables[f].Sync(t.Context(), shown.Ruleset(f)))(t)
		goldenOf(t, l.node, family, dataplane.NftTableFloating, "floating_"+family)
		testkit.Must(l.tables[f].Sync(t.Context(), want.Ruleset(f)))(t)
	}
	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) {
			if l.passes(f) {
				t.Error("it passes before the node answers")
			}
			sent, received := l.counted(f, ruleset.Sent), l.counted(f, ruleset.Received)
			if sent.Packets < 1 || received.Packets < 1 {
				t.Errorf("packets that didn't pass: %+v sent, %+v received", sent, received)
			}
			l.renew(f, time.Hour)
			l.await(f, true)
			if after := l.counted(f, ruleset.Sent); after.Packets <= sent.Packets || after.Bytes < sent.Bytes+28*(after.Packets-sent.Packets) {
				t.Errorf("%+v sent, and before %+v", after, sent)
			}
			if after := l.counted(f, ruleset.Received); after.Packets <= received.Packets || after.Bytes < received.Bytes+28*(after.Packets-received.Packets) {
				t.Errorf("%+v received, and before %+v", after, received)
			}
			l.renew(f, 0)
			if l.passes(f) {
				t.Error("it passes after the node has stopped")
			}
			l.renew(f, 0) // the second time, too
			const lasts = 400 * time.Millisecond
			l.renew(f, testkit.Timeout(lasts/2))
			renewed := time.Now()
			l.renew(f, lasts)
			last := renewed
			for time.Since(renewed) < 2*lasts {
				if at := time.Now(); l.passes(f) {
					last = at
				}
			}
			// Its clock ticks each 4 ms, or 10 ms.
			if after := last.Sub(renewed); after < lasts/2 || after > lasts+testkit.Limit(50*time.Millisecond) {
				t.Errorf("packets passed for %s, the node was told to answer for %s", after, lasts)
			}
		})
	}
	for _, f := range families {
		if got := testkit.Must(l.tables[f].Sync(t.Context(), want.Ruleset(f)))(t); got.Changed() {
			t.Errorf("the second time it changed %+v", got)
		}
	}
}

// An element that lives survives a change of the addresses.
func TestFloatingAddressIsAdded(t *testing.T) {
	l := newFloatingLab(t)
	another := map[dataplane.Family]string{dataplane.IPv4: "192.0.2.8", dataplane.IPv6: "2001:db8::8"}
	for _, f := range families {
		r := ruleset.Floating{Addresses: []netip.Addr{l.addrs[f]}}
		sync := func(what string, elements int) {
			t.Helper()
			if got := testkit.Must(l.tables[f].Sync(t.Context(), r.Ruleset(f)))(t); got.Added != elements {
				t.Errorf("%s changed %+v", what, got)
			}
		}
		testkit.Must(l.tables[f].Sync(t.Context(), r.Ruleset(f)))(t)
		l.renew(f, time.Hour)
		r.Addresses = append(r.Addresses, netip.MustParseAddr(another[f]))
		sync("another address", 4) // it is counted in both directions
		r.OfEgresses = r.Addresses
		sync("addresses of Egresses", 6) // their packets meet other rules
		l.await(f, true)
		testkit.Must(l.tables[f].Sync(t.Context(), ruleset.Floating{}.Ruleset(f)))(t)
		if exists := testkit.Must(l.tables[f].Exists(t.Context()))(t); exists {
			t.Error("the table of no address is there")
		}
	}
}

// Probes of both families are counted, and kept on the node, by a table of their own.
func TestProbesTable(t *testing.T) {
	node := netnstest.New(t)
	table := testkit.Must(nft.New(node.NS, dataplane.NftTableProbes))(t)
	t.Cleanup(table.Close)
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")}
	for _, tracked := range []bool{false, true} {
		rules := ruleset.Probes{Addresses: addrs, OfEgresses: addrs, Tracked: tracked}.Ruleset()
		testkit.Must(table.Sync(t.Context(), rules))(t)
		if again := testkit.Must(table.Sync(t.Context(), rules))(t); again.Changed() {
			t.Errorf("the second time it changed %+v", again)
		}
		goldenOf(t, node, "inet", dataplane.NftTableProbes, map[bool]string{false: "probes", true: "probes_tracked"}[tracked])
	}
}

// Elements of several tables are renewed together, or not at all.
func TestRenewTables(t *testing.T) {
	l := newFloatingLab(t)
	for _, f := range families {
		testkit.Must(l.tables[f].Sync(t.Context(), ruleset.Floating{Addresses: []netip.Addr{l.addrs[f]}}.Ruleset(f)))(t)
	}
	renew := func(d time.Duration) error {
		var all []nft.Renewals
		for _, f := range families {
			all = append(all, nft.Renewals{Table: l.tables[f], Elements: []nft.Renewal{{Set: ruleset.Answering(f), Key: dataplane.KeyOf(l.addrs[f]), For: d}}})
		}
		return nft.Renew(t.Context(), all...)
	}
	testkit.Check(t, renew(time.Hour))
	for _, f := range families {
		l.await(f, true)
	}
	testkit.Must(l.node.Run("nft", "delete", "table", "ip6", dataplane.NftTableFloating))(t)
	if err := renew(0); err == nil {
		t.Error("an element of a table that isn't there is removed")
	}
	if !l.passes(dataplane.IPv4) {
		t.Error("the element of the other table is gone")
	}
}

package nft_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
)

// floating is a floating address in either family.
func floating(f dataplane.Family, n int) netip.Addr { return addr(f, 7, 100+n) }

// withFloating gives the router two floating addresses, whose replies the server sends to it.
func (l *lab) withFloating(sources ...ruleset.GatewaySource) {
	l.t.Helper()
	l.rules.Floating = &ruleset.GatewayFloating{Sources: sources}
	for _, f := range families {
		for n := range 2 {
			l.rules.Floating.Addresses = append(l.rules.Floating.Addresses, floating(f, n))
		}
		for n := range 3 {
			l.server.IP(l.t, "route", "add", floating(f, n).String(), "via", addr(f, 9, 1).String())
			l.router.IP(l.t, "route", "add", floating(f, n).String(), "via", addr(f, 9, 2).String()) // as its default route
		}
	}
}

// single is the range of one address.
func single(a netip.Addr) netipx.IPRange { return netipx.IPRangeFrom(a, a) }

// Each client leaves by its own address, and by none if it has none.
func TestClientsLeaveByFloatingAddresses(t *testing.T) {
	l := newLab(t)
	var sources []ruleset.GatewaySource
	for _, f := range families {
		l.address(l.server, "eth0", addr(f, 9, 3), 24)
		sources = append(sources,
			ruleset.GatewaySource{Client: addr(f, 1, 1), Address: floating(f, 0)},
			ruleset.GatewaySource{Client: addr(f, 1, 1), Address: floating(f, 1), Destinations: single(addr(f, 9, 3))},
			ruleset.GatewaySource{Client: addr(f, 1, 2), Address: floating(f, 0), Destinations: single(addr(f, 9, 3))},
		)
	}
	l.withFloating(sources...)
	l.sync(dataplane.Result{Added: 1})
	l.sync(dataplane.Result{})
	for _, f := range families {
		for _, c := range []struct {
			name         string
			client, host int
			want         netip.Addr
		}{
			{"any destination", 0, 2, floating(f, 0)},
			{"a destination of its own", 0, 3, floating(f, 1)},
			{"a destination alone", 1, 3, floating(f, 0)},
		} {
			got := testkit.Must(l.clients[c.client].SourceOf(l.server, addr(f, 9, c.host), timeout))(t)
			if got != c.want {
				t.Errorf("%s, %s: the server sees %s, want %s", f, c.name, got, c.want)
			}
		}
		before := l.count(ruleset.ForeignSource, f)
		if err := l.clients[1].Ping(addr(f, 9, 2), silence); err == nil {
			t.Errorf("%s: a client without an address for the destination reaches it", f)
		}
		if l.count(ruleset.ForeignSource, f) == before {
			t.Errorf("%s: %s wasn't counted", f, ruleset.ForeignSource)
		}
		testkit.Check(t, l.router.Ping(addr(f, 9, 2), timeout), l.server.Ping(addr(f, 9, 1), timeout))
	}
}

// A floating address answers echo requests, and nothing else: not even a reset, which would end a connection that the router
// before had.
func TestFloatingAddressAnswersEcho(t *testing.T) {
	l := newLab(t)
	l.withFloating()
	l.sync(dataplane.Result{Added: 1})
	for _, f := range families {
		testkit.Check(t, l.server.Ping(floating(f, 0), timeout))
		if err := l.server.Ping(floating(f, 2), silence); err == nil {
			t.Errorf("%s: an address that isn't the router's answers", f)
		}
		l.dropped(ruleset.Unsolicited, f, func() error {
			// Shorter than the second after which TCP sends the packet again.
			conn, err := dial(l.server, netip.AddrPortFrom(floating(f, 0), 22).String(), 300*time.Millisecond)
			if err == nil {
				conn.Close()
				return fmt.Errorf("a connection to %s was opened", floating(f, 0))
			}
			return nil
		})
	}
}

// A living connection keeps its address when its client gets another one, or none.
func TestConnectionsKeepTheirFloatingAddress(t *testing.T) {
	l := newLab(t)
	var sources []ruleset.GatewaySource
	for _, f := range families {
		sources = append(sources, ruleset.GatewaySource{Client: addr(f, 1, 1), Address: floating(f, 0)})
	}
	l.withFloating(sources...)
	l.sync(dataplane.Result{Added: 1})
	for i, f := range families {
		to := l.receiver(addr(f, 9, 2))
		conn := l.dial(l.clients[0], to)
		ask := func() netip.Addr {
			t.Helper()
			testkit.Must(conn.Write([]byte("question")))(t)
			return receive(t, to).Addr()
		}
		if got := ask(); got != floating(f, 0) {
			t.Fatalf("%s: the server sees %s", f, got)
		}
		l.rules.Floating.Sources[i].Address = floating(f, 1)
		l.sync(dataplane.Result{Added: 1, Deleted: 1})
		if got := ask(); got != floating(f, 0) {
			t.Errorf("%s: the server sees %s in a connection that was opened as %s", f, got, floating(f, 0))
		}
		if got := testkit.Must(l.clients[0].SourceOf(l.server, addr(f, 9, 2), timeout))(t); got != floating(f, 1) {
			t.Errorf("%s: a new connection has %s, want %s", f, got, floating(f, 1))
		}
	}
	l.rules.Floating.Sources = nil
	l.sync(dataplane.Result{Deleted: 2})
	for _, f := range families {
		if err := l.clients[0].Ping(addr(f, 9, 2), silence); err == nil {
			t.Errorf("%s: a client without an address opens a connection", f)
		}
	}
}

// One client's change among 10,000 writes its own element alone.
func TestManyFloatingSources(t *testing.T) {
	l := newLab(t)
	var sources []ruleset.GatewaySource
	for i := range 10_000 {
		c := netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)})
		l.rules.Clients = append(l.rules.Clients, ruleset.GatewayClient{Addr: c, Link: 100 + i})
		sources = append(sources, ruleset.GatewaySource{Client: c, Address: floating(4, 0)},
			ruleset.GatewaySource{Client: c, Address: floating(4, 1), Destinations: netipx.RangeOfPrefix(netip.MustParsePrefix("10.9.0.128/25"))})
	}
	l.withFloating(sources...)
	start := time.Now()
	l.sync(dataplane.Result{Added: 1})
	t.Logf("20,000 sources in %s", time.Since(start))
	for name, i := range map[string]int{"any destination": 10_000, "some destinations": 10_001} {
		start := time.Now()
		for n := range 6 { // an even number leaves the first address
			l.rules.Floating.Sources[i].Address = floating(4, (i+n+1)%2)
			l.sync(dataplane.Result{Added: 1, Deleted: 1})
		}
		t.Logf("one of %s in %s", name, time.Since(start)/6)
	}
}

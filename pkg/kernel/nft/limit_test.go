package nft_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/natgateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// echoServer answers TCP connections at an address of the server with what they say.
func (l *lab) echoServer(a netip.Addr) string {
	l.t.Helper()
	var listener net.Listener
	testkit.Check(l.t, l.server.Do(func() (err error) {
		listener, err = net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
		return err
	}))
	l.t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	return listener.Addr().String()
}

// dial opens a connection of a client.
func dial(client *netnstest.NS, to string, wait time.Duration) (conn net.Conn, err error) {
	err = errors.Join(client.Do(func() (err error) {
		conn, err = net.DialTimeout("tcp", to, wait)
		return err
	}), err)
	return conn, err
}

// lives says whether a connection still carries something in both directions.
func lives(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 1))
	return err
}

// A client that has as many connections as one may have opens no more until one has ended. Its others go
// on, another client is served, and a router that starts again has forgotten nothing.
func TestConnectionLimit(t *testing.T) {
	const most = 4
	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) {
			l := newLab(t)
			l.rules.MaxPerClient = most
			l.sync(dataplane.Result{Added: 1})
			to := l.echoServer(addr(f, 9, 2))
			var open []net.Conn
			for range most {
				conn := testkit.Must(dial(l.clients[0], to, timeout))(t)
				defer conn.Close()
				open = append(open, conn)
			}
			refused := func() {
				t.Helper()
				before := l.count(ruleset.ConnectionLimit, f)
				if conn, err := dial(l.clients[0], to, silence); err == nil {
					conn.Close()
					t.Errorf("there are more than %d connections", most)
				}
				if l.count(ruleset.ConnectionLimit, f) == before {
					t.Error("it wasn't counted")
				}
			}
			masqueraded := l.count(ruleset.Masqueraded, f)
			refused()
			if got := l.count(ruleset.Masqueraded, f); got != masqueraded {
				t.Errorf("%d packets that were dropped are counted as masqueraded", got-masqueraded)
			}
			for _, conn := range open {
				testkit.Check(t, lives(conn))
			}
			other := testkit.Must(dial(l.clients[1], to, timeout))(t)
			defer other.Close()
			testkit.Check(t, lives(other))
			if got := testkit.Must(natgateway.Nft{Table: l.Table}.AtLimit(t.Context(), time.Minute))(t); !slices.Equal(got, []netip.Addr{addr(f, 1, 1)}) {
				t.Errorf("at the limit are %v", got)
			}

			again := gatewayTable(t, l.router.NS)
			defer again.Close()
			if got := testkit.Must(again.Sync(t.Context(), l.rules))(t); got.Changed() {
				t.Errorf("a router that starts again did %+v", got)
			}
			refused()
			l.rules.Destinations = append(l.rules.Destinations, netip.MustParsePrefix("192.0.2.0/24"))
			l.sync(dataplane.Result{Replaced: 1})
			refused()

			open[0].Close()
			conn := l.opens(l.clients[0], to)
			defer conn.Close()
			testkit.Check(t, lives(conn))
			if got := testkit.Must(natgateway.Nft{Table: l.Table}.AtLimit(t.Context(), time.Minute))(t); len(got) != 0 {
				t.Errorf("at the limit are %v, and nobody is", got)
			}
			refused()
			l.rules.MaxPerClient = 0
			l.sync(dataplane.Result{Replaced: 1})
			conn = testkit.Must(dial(l.clients[0], to, timeout))(t)
			defer conn.Close()
		})
	}
}

// opens opens a connection as soon as the router lets it.
func (l *lab) opens(client *netnstest.NS, to string) net.Conn {
	l.t.Helper()
	for end := time.Now().Add(timeout); ; {
		conn, err := dial(client, to, silence)
		if err == nil {
			return conn
		}
		if time.Now().After(end) {
			l.t.Fatal("a connection has ended, and the client can open none: ", err)
		}
	}
}

// A limit of many connections is kept to within what samples tell, also by a client that goes on for
// ever; and ended ones make room.
func TestSampledConnectionLimit(t *testing.T) {
	const most = 1000
	l := newLab(t)
	l.rules.MaxPerClient = most
	l.sync(dataplane.Result{Added: 1})
	l.run(l.router, "sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=600")
	l.run(l.server, "nft", "add table inet deaf; add chain inet deaf input { type filter hook input priority 0; }; add rule inet deaf input meta l4proto udp drop")
	server := addr(dataplane.IPv4, 9, 2)
	tracked := func() int {
		return testkit.Must(strconv.Atoi(strings.TrimSpace(l.run(l.router, "sysctl", "-n", "net.netfilter.nf_conntrack_count"))))(t)
	}
	flood := func(from, to int) {
		testkit.Check(t, l.clients[0].Do(func() error {
			socket, err := net.ListenPacket("udp4", ":0")
			if err != nil {
				return err
			}
			defer socket.Close()
			for port := from; port < to; port++ {
				if _, err := socket.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(server, uint16(port)))); err != nil {
					return fmt.Errorf("to port %d: %w", port, err)
				}
			}
			return nil
		}))
	}
	for round := range 3 {
		flood(1+round*5000, 5001+round*5000)
		if n := tracked(); n < most*3/4 || n > most*5/4 {
			t.Fatalf("after %d connections %d are tracked, the limit is %d", (round+1)*5000, n, most)
		}
	}
	// The kernel takes a few ended ones off its list at each look.
	flows := testkit.Must(conntrack.New(l.router.NS))(t)
	defer flows.Close()
	if n := testkit.Must(flows.Forget(t.Context(), addr(dataplane.IPv4, 1, 1)))(t); n < most*3/4 {
		t.Fatalf("%d connections are forgotten", n)
	}
	for end, port := time.Now().Add(timeout), 20000; tracked() < most/2; port += 100 {
		if time.Now().After(end) {
			t.Fatalf("the client had %d connections that have ended, and has only %d now", most, tracked())
		}
		flood(port, port+100)
	}
}

// A client that is over the limit by a count of all its connections opens no more, though samples don't
// say so; its others go on, and other clients are served.
func TestOverConnectionLimit(t *testing.T) {
	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) {
			l := newLab(t)
			l.rules.MaxPerClient = 1000
			l.sync(dataplane.Result{Added: 1})
			to := l.echoServer(addr(f, 9, 2))
			has := testkit.Must(dial(l.clients[0], to, timeout))(t)
			defer has.Close()
			flows := testkit.Must(conntrack.New(l.router.NS))(t)
			defer flows.Close()
			if got := testkit.Must(flows.Clients(t.Context(), l.rules.Addresses...))(t); len(got) != 1 || got[addr(f, 1, 1)] != 1 {
				t.Errorf("clients have %v", got)
			}
			l.rules.Over = []netip.Addr{addr(f, 1, 1)}
			l.sync(dataplane.Result{Added: 1})
			for range 20 {
				if conn, err := dial(l.clients[0], to, silence/10); err == nil {
					conn.Close()
					t.Fatal("a client that is over the limit has opened another connection")
				}
			}
			if l.count(ruleset.ConnectionLimit, f) < 20 {
				t.Error("it wasn't counted")
			}
			if got := testkit.Must(natgateway.Nft{Table: l.Table}.AtLimit(t.Context(), time.Minute))(t); !slices.Equal(got, l.rules.Over) {
				t.Errorf("at the limit are %v", got)
			}
			testkit.Check(t, lives(has))
			other := testkit.Must(dial(l.clients[1], to, timeout))(t)
			defer other.Close()
			l.rules.Over = nil
			l.sync(dataplane.Result{Deleted: 1})
			l.opens(l.clients[0], to).Close()
		})
	}
}

package nft_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// watch counts what leaves the router for the server with another address than the pod's.
func (l *lab) watch() {
	l.t.Helper()
	l.run(l.router, "nft", `add table inet seen; add chain inet seen leaves { type filter hook postrouting priority 300; }
		add rule inet seen leaves oifname eth0 ip saddr != 10.9.0.1 counter
		add rule inet seen leaves oifname eth0 ip6 saddr != { fd00:9::1, fe80::/10, :: } counter`)
}

// sound fails the test if anything did since watch.
func (l *lab) sound() {
	l.t.Helper()
	if seen := l.run(l.router, "nft", "list", "table", "inet", "seen"); strings.Count(seen, "counter packets 0 ") != 2 {
		l.t.Errorf("packets left with another address:\n%s", seen)
	}
}

// dropped expects that what is done is one packet that is counted.
func (l *lab) dropped(name string, f dataplane.Family, do func() error) {
	l.t.Helper()
	before := l.count(name, f)
	testkit.Check(l.t, do())
	testkit.Eventually(l.t, timeout, fmt.Sprintf("one %s packet that is %s", f, name), func() error {
		if got := l.count(name, f) - before; got != 1 {
			return fmt.Errorf("%d were counted", got)
		}
		return nil
	})
}

// prefer gives the uplink another address, which the kernel prefers for what is sent to the
// server: in IPv4 because it is the first, in IPv6 because it is nearer (RFC 6724).
func (l *lab) prefer() {
	l.t.Helper()
	own := addr(dataplane.IPv4, 9, 1).String() + "/24"
	l.router.IP(l.t, "address", "del", own, "dev", "eth0")
	l.address(l.router, "eth0", addr(dataplane.IPv4, 9, 3), 24)
	l.router.IP(l.t, "address", "add", own, "dev", "eth0")
	l.address(l.router, "eth0", addr(dataplane.IPv6, 9, 3), 32)
}

// Clients get the address of the pod, also where the kernel would prefer another of the uplink's,
// such as router advertisements give.
func TestClientsGetThePodsAddress(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	l.prefer()
	for _, f := range families {
		if got := testkit.Must(l.clients[0].SourceOf(l.server, addr(f, 9, 2), timeout))(t); got != addr(f, 9, 1) {
			t.Errorf("%s: the server sees %s, want %s", f, got, addr(f, 9, 1))
		}
	}
}

// The server learns the MTU of a tunnel, also if the router tells it by another of its addresses.
func TestServersLearnTheMTU(t *testing.T) {
	const mtu = 1400
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	l.prefer()
	l.watch()
	for _, f := range families {
		to := l.receiver(addr(f, 9, 2))
		testkit.Must(l.dial(l.clients[0], to).Write([]byte("question")))(t)
		from := receive(t, to)
		l.router.IP(t, "link", "set", "fou4_1", "mtu", fmt.Sprint(mtu))
		testkit.Must(to.WriteToUDPAddrPort(make([]byte, mtu), from))(t)
		testkit.Eventually(t, timeout, fmt.Sprintf("%s: the server knows the MTU", f), func() error {
			if route := l.server.IP(t, "route", "get", addr(f, 9, 1).String()); !strings.Contains(route, fmt.Sprint("mtu ", mtu)) {
				return errors.New(route)
			}
			return nil
		})
	}
	l.sound()
}

// A connection keeps its port when the table is made anew.
func TestConnectionsOutliveTheTable(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	l.watch()
	for i, f := range families {
		to := l.receiver(addr(f, 9, 2))
		conn := l.dial(l.clients[0], to)
		testkit.Must(conn.Write([]byte("before")))(t)
		before := receive(t, to)
		l.rules.MTU = 1400 + i
		l.sync(dataplane.Result{Replaced: 1})
		testkit.Must(conn.Write([]byte("after")))(t)
		if after := receive(t, to); after != before {
			t.Errorf("the server sees %s, and saw %s before", after, before)
		}
	}
	l.sound()
}

// Whatever let a packet in, it doesn't open a connection with an address that is no client's.
func TestStrangersDoNotOpenConnections(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	l.watch()
	l.run(l.router, "nft", "insert rule inet coil sent accept")
	for _, f := range families {
		l.address(l.clients[0], "eth0", addr(f, 7, 7), 32)
		l.dropped(ruleset.ForeignSource, f, func() error {
			return l.clients[0].Do(func() error {
				conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr(f, 7, 7), 0)),
					net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr(f, 9, 2), 9)))
				if err != nil {
					return err
				}
				defer conn.Close()
				_, err = conn.Write([]byte("forged"))
				return err
			})
		})
	}
	l.sound()
}

// While the rule is gone that translates, nothing leaves.
func TestNothingLeavesUntranslated(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	l.watch()
	l.run(l.router, "nft", "flush chain inet coil nat")
	for _, f := range families {
		conn := l.dial(l.clients[0], l.receiver(addr(f, 9, 2)))
		l.dropped(ruleset.ForeignSource, f, func() error {
			_, err := conn.Write([]byte("opens"))
			return err
		})
	}
	l.sound()
}

// receiver is a socket of the server for UDP.
func (l *lab) receiver(a netip.Addr) *net.UDPConn {
	l.t.Helper()
	var conn *net.UDPConn
	testkit.Check(l.t, l.server.Do(func() (err error) {
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 0)))
		return err
	}))
	l.t.Cleanup(func() { conn.Close() })
	return conn
}

// dial opens a socket of a client to the server's.
func (l *lab) dial(client *netnstest.NS, to *net.UDPConn) *net.UDPConn {
	l.t.Helper()
	var conn *net.UDPConn
	testkit.Check(l.t, client.Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, to.LocalAddr().(*net.UDPAddr))
		return err
	}))
	l.t.Cleanup(func() { conn.Close() })
	return conn
}

// receive returns whom the next packet is from.
func receive(t *testing.T, conn *net.UDPConn) netip.AddrPort {
	t.Helper()
	testkit.Check(t, conn.SetReadDeadline(time.Now().Add(timeout)))
	_, from, err := conn.ReadFromUDPAddrPort(make([]byte, 100))
	testkit.Check(t, err)
	return netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
}

// Connections that were tracked before the table was made aren't translated any more, and don't leave.
func TestEarlierConnectionsDoNotLeave(t *testing.T) {
	l := newLab(t)
	l.run(l.router, "nft", "add table inet other; add chain inet other c { type filter hook forward priority 5; }; add rule inet other c ct state new counter")
	type flow struct {
		family dataplane.Family
		name   string
		conn   *net.UDPConn
	}
	var flows []flow
	for _, f := range families {
		for _, answered := range []bool{false, true} {
			to := l.receiver(addr(f, 9, 2))
			conn := l.dial(l.clients[0], to)
			testkit.Must(conn.Write([]byte("before")))(t)
			from := receive(t, to)
			if from.Addr() != addr(f, 1, 1) {
				t.Fatalf("without a table the server sees %s", from)
			}
			if answered {
				testkit.Must(to.WriteToUDPAddrPort([]byte("answer"), from))(t)
				receive(t, conn)
			}
			flows = append(flows, flow{f, fmt.Sprintf("%s, answered is %t", f, answered), conn})
		}
	}
	l.sync(dataplane.Result{Added: 1})
	l.watch()
	for _, c := range flows {
		t.Log(c.name)
		l.dropped(ruleset.ForeignSource, c.family, func() error {
			_, err := c.conn.Write([]byte("after"))
			return err
		})
	}
	l.sound()
}

// An error of another one's connection, as the server would see it, isn't taken for one of its
// answers, also if that one has no tunnel.
func TestForgedErrorsDoNotLeave(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	l.watch()
	for _, f := range families {
		to := l.receiver(addr(f, 9, 2))
		testkit.Must(l.dial(l.clients[1], to).Write([]byte("opens")))(t)
		from := receive(t, to)
		if from.Addr() != addr(f, 9, 1) {
			t.Fatalf("the server sees %s", from)
		}
		l.router.IP(t, "route", "replace", addr(f, 1, 2).String(), "via", addr(f, 9, 2).String())
		l.dropped(ruleset.Invalid, f, func() error {
			return unreachable(l.clients[0], from, to.LocalAddr().(*net.UDPAddr).AddrPort())
		})
	}
	l.sound()
}

// unreachable tells the destination of a packet of UDP that it didn't arrive there.
func unreachable(from *netnstest.NS, src, dst netip.AddrPort) error {
	const udp = 17
	network, any := "ip4:icmp", "0.0.0.0"
	m := icmp.Message{Type: ipv4.ICMPTypeDestinationUnreachable, Code: 3}
	header := make([]byte, 20)
	if dst.Addr().Is4() {
		header[0], header[8], header[9] = 0x45, 64, udp
		binary.BigEndian.PutUint16(header[2:], 28)
		copy(header[12:], src.Addr().AsSlice())
		copy(header[16:], dst.Addr().AsSlice())
		sum := uint32(0)
		for i := 0; i < len(header); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(header[i:]))
		}
		sum = sum&0xffff + sum>>16
		binary.BigEndian.PutUint16(header[10:], ^uint16(sum+sum>>16))
	} else {
		network, any = "ip6:ipv6-icmp", "::"
		m = icmp.Message{Type: ipv6.ICMPTypeDestinationUnreachable, Code: 4}
		header = make([]byte, 40)
		header[0], header[5], header[6], header[7] = 0x60, 8, udp, 64
		copy(header[8:], src.Addr().AsSlice())
		copy(header[24:], dst.Addr().AsSlice())
	}
	header = binary.BigEndian.AppendUint16(header, src.Port())
	header = binary.BigEndian.AppendUint16(header, dst.Port())
	header = binary.BigEndian.AppendUint16(header, 8)
	m.Body = &icmp.DstUnreach{Data: append(header, 0, 0)}
	b, err := m.Marshal(nil)
	if err != nil {
		return err
	}
	return from.Do(func() error {
		conn, err := icmp.ListenPacket(network, any)
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.WriteTo(b, &net.IPAddr{IP: dst.Addr().AsSlice()})
		return err
	})
}

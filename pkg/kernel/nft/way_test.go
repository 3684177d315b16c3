package nft_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// narrowWay makes a client, and a pod that is none, behind a way that is narrower than the
// router's link: 1400 bytes fit.
func (l *lab) narrowWay() (client, other map[dataplane.Family]netip.Addr) {
	l.t.Helper()
	far := netnstest.New(l.t)
	l.server.IP(l.t, "link", "add", "far", "mtu", "1400", "type", "veth", "peer", "name", "eth0", "mtu", "1400", "netns", far.Path)
	l.server.IP(l.t, "link", "set", "far", "up")
	far.IP(l.t, "link", "set", "eth0", "up")
	l.run(l.server, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	client, other = map[dataplane.Family]netip.Addr{}, map[dataplane.Family]netip.Addr{}
	for _, f := range families {
		client[f], other[f] = addr(f, 5, 1), addr(f, 5, 2)
		l.address(l.server, "far", addr(f, 5, 254), 24)
		l.router.IP(l.t, "route", "add", netip.PrefixFrom(addr(f, 5, 0), map[dataplane.Family]int{4: 24, 6: 64}[f]).Masked().String(), "via", addr(f, 9, 2).String())
		l.rules.Clients = append(l.rules.Clients, ruleset.GatewayClient{Addr: client[f], Link: 99})
	}
	return client, other
}

// sender is a socket of the router from FoU's port, whose packets mustn't be divided.
func (l *lab) sender(to netip.Addr) *net.UDPConn {
	l.t.Helper()
	var conn *net.UDPConn
	testkit.Check(l.t, l.router.Do(func() (err error) {
		conn, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 5555)))
		return err
	}))
	l.t.Cleanup(func() { conn.Close() })
	level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
	if to.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
	}
	sc := testkit.Must(conn.SyscallConn())(l.t)
	testkit.Check(l.t, sc.Control(func(fd uintptr) {
		testkit.Check(l.t, unix.SetsockoptInt(int(fd), level, option, unix.IP_PMTUDISC_DO))
	}))
	return conn
}

// The router hears what is said about its tunnels' packets, and about nobody else's.
func TestRouterLearnsTheWayToClients(t *testing.T) {
	l := newLab(t)
	client, other := l.narrowWay()
	l.sync(dataplane.Result{Added: 1})
	for _, f := range families {
		conn := l.sender(client[f])
		testkit.Eventually(t, timeout, fmt.Sprintf("%s: the router knows that 1440 bytes don't fit", f), func() error {
			if _, err := conn.Write(make([]byte, 1440)); !errors.Is(err, unix.EMSGSIZE) {
				return fmt.Errorf("write: %w", err)
			}
			return nil
		})
		// The socket may have to tell of an earlier error first.
		testkit.Eventually(t, timeout, fmt.Sprintf("%s: what fits is sent", f), func() error {
			_, err := conn.Write(make([]byte, 1400-l.headers(f)))
			return err
		})

		stranger := l.sender(other[f])
		l.dropped(ruleset.Invalid, f, func() error {
			_, err := stranger.Write(make([]byte, 1440))
			return err
		})
		if _, err := stranger.Write(make([]byte, 1440)); err != nil {
			t.Errorf("%s: the router believes what is said about a packet that was for no client: %v", f, err)
		}
	}
}

// headers is the size of those of UDP in IP.
func (l *lab) headers(f dataplane.Family) int {
	return map[dataplane.Family]int{dataplane.IPv4: 28, dataplane.IPv6: 48}[f]
}

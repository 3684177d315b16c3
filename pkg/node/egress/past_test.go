package egress

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// bound are the ways in which a socket, without any right, chooses the link that it sends by.
var bound = []struct {
	name    string
	ipv4    bool // too
	control func(fd, link int) error
	message bool // the link is said with each datagram
}{
	{"SO_BINDTODEVICE", true, func(fd, _ int) error { return unix.BindToDevice(fd, "eth0") }, false},
	{"IPV6_UNICAST_IF", false, func(fd, link int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_IF, int(networkOrder(uint32(link))))
	}, false},
	{"IPV6_PKTINFO", false, nil, true},
}

func networkOrder(n uint32) uint32 {
	return n>>24 | n>>8&0xff00 | n<<8&0xff0000 | n<<24
}

// send sends a datagram to an address by eth0, in one of the ways.
func (p *pod) send(way int, to netip.Addr) error {
	p.t.Helper()
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if bound[way].control == nil {
			return nil
		}
		return errors.Join(raw.Control(func(fd uintptr) { err = bound[way].control(int(fd), p.eth0) }), err)
	}}
	network := map[bool]string{true: "udp4", false: "udp6"}[to.Is4()]
	var conn net.PacketConn
	testkit.Check(p.t, p.ns.Do(func() (err error) {
		conn, err = config.ListenPacket(p.t.Context(), network, ":0")
		return err
	}))
	defer conn.Close()
	target := net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 7000))
	if bound[way].message {
		_, err := ipv6.NewPacketConn(conn).WriteTo([]byte("x"), &ipv6.ControlMessage{IfIndex: p.eth0}, target)
		return err
	}
	_, err := conn.WriteTo([]byte("x"), target)
	return err
}

// outside gives what eth0 leads to a namespace of its own, which has addresses, and takes part as a
// host that answers each question of ARP (proxy_arp, as behind Calico).
func (p *pod) outside(addrs ...string) *netnstest.NS {
	p.t.Helper()
	out := netnstest.New(p.t)
	p.ns.IP(p.t, "link", "set", "outside", "netns", out.Path)
	for _, args := range []string{"link set lo up", "link set outside up", "addr add 169.254.1.1/32 dev outside", "addr add fe80::1/64 dev outside nodad"} {
		out.IP(p.t, strings.Fields(args)...)
	}
	testkit.Must(out.Run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv4.conf.outside.proxy_arp=1", "net.ipv4.neigh.outside.proxy_delay=0",
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.outside.rp_filter=0"))(p.t)
	for _, a := range addrs {
		out.IP(p.t, "addr", "add", a, "dev", "lo")
	}
	for _, args := range []string{"link set lo up", "link set eth0 up", "route replace 169.254.1.1 dev eth0", "route replace default via 169.254.1.1 dev eth0", "-6 route replace default via fe80::1 dev eth0"} {
		p.ns.IP(p.t, strings.Fields(args)...)
	}
	return out
}

// No socket sends to a destination past the tunnel, whether the tunnel is there or not.
func TestBoundSockets(t *testing.T) {
	p := newPod(t)
	ends := map[string]string{"192.0.2.1": "a destination", "2001:db8::1": "a destination", "198.51.100.1": "elsewhere", "2001:db8:1::1": "elsewhere"}
	out := p.outside("192.0.2.1", "2001:db8::1", "198.51.100.1", "2001:db8:1::1")
	var ear net.PacketConn
	testkit.Check(t, out.Do(func() (err error) {
		ear, err = new(net.ListenConfig).ListenPacket(t.Context(), "udp", ":7000")
		return err
	}))
	defer ear.Close()
	// The first packet waits for the neighbour.
	arrives := func(way int, to netip.Addr) error {
		return errors.Join(p.send(way, to), ear.SetReadDeadline(time.Now().Add(testkit.Timeout(100*time.Millisecond))), func() error {
			_, _, err := ear.ReadFrom(make([]byte, 10))
			return err
		}())
	}
	for _, service := range []int{1, 0} {
		p.mustUse(gateway("net/a", service, "192.0.2.0/24", "2001:db8::/64"))
		for dst, kind := range ends {
			to := netip.MustParseAddr(dst)
			for way, b := range bound {
				if to.Is4() && !b.ipv4 {
					continue
				}
				name := fmt.Sprintf("%s to %s, Service %d", b.name, dst, service)
				if kind == "elsewhere" {
					testkit.Eventually(t, 3*time.Second, name+" arrives", func() error { return arrives(way, to) })
					continue
				}
				if err := p.send(way, to); !errors.Is(err, unix.EPERM) {
					t.Errorf("%s: %v", name, err)
				}
			}
		}
	}
	// Nothing else holds them back.
	testkit.Must(p.ns.Run("nft", "delete", "table", "inet", "coil"))(t)
	for dst := range ends {
		to := netip.MustParseAddr(dst)
		for way, b := range bound {
			if b.ipv4 || to.Is6() {
				testkit.Eventually(t, 3*time.Second, b.name+" to "+dst+" arrives without the table", func() error { return arrives(way, to) })
			}
		}
	}
	if out := p.mustUse(gateway("net/a", 0, "192.0.2.0/24", "2001:db8::/64")); out.Others != 1 {
		t.Errorf("the table isn't counted as repaired: %+v", out)
	}
	if err := p.send(0, netip.MustParseAddr("2001:db8::1")); !errors.Is(err, unix.EPERM) {
		t.Errorf("with the table restored: %v", err)
	}
	p.mustUse()
	if tables := testkit.Must(p.ns.Run("nft", "list", "ruleset"))(t); tables != "" {
		t.Errorf("without Egresses there is\n%s", tables)
	}
}

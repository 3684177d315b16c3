package clientnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/clientnet/clientnettest"
	"github.com/coil-net/coil/pkg/testkit"
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
	p.T.Helper()
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if bound[way].control == nil {
			return nil
		}
		return errors.Join(raw.Control(func(fd uintptr) { err = bound[way].control(int(fd), p.Eth0) }), err)
	}}
	network := map[bool]string{true: "udp4", false: "udp6"}[to.Is4()]
	var conn net.PacketConn
	testkit.Check(p.T, p.NS.Do(func() (err error) {
		conn, err = config.ListenPacket(p.T.Context(), network, ":0")
		return err
	}))
	defer conn.Close()
	target := net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 7000))
	if bound[way].message {
		_, err := ipv6.NewPacketConn(conn).WriteTo([]byte("x"), &ipv6.ControlMessage{IfIndex: p.Eth0}, target)
		return err
	}
	_, err := conn.WriteTo([]byte("x"), target)
	return err
}

// No socket sends to a destination past the tunnel, whether the tunnel is there or not.
func TestBoundSockets(t *testing.T) {
	p := newPod(t)
	ends := map[string]string{"192.0.2.1": "a destination", "2001:db8::1": "a destination", "198.51.100.1": "elsewhere", "2001:db8:1::1": "elsewhere"}
	out := p.Outside("192.0.2.1", "2001:db8::1", "198.51.100.1", "2001:db8:1::1")
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
		p.mustUse(clientnettest.Gateway("net/a", service, "192.0.2.0/24", "2001:db8::/64"))
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
	testkit.Must(p.NS.Run("nft", "delete", "table", "inet", "coil"))(t)
	for dst := range ends {
		to := netip.MustParseAddr(dst)
		for way, b := range bound {
			if b.ipv4 || to.Is6() {
				testkit.Eventually(t, 3*time.Second, b.name+" to "+dst+" arrives without the table", func() error { return arrives(way, to) })
			}
		}
	}
	if out := p.mustUse(clientnettest.Gateway("net/a", 0, "192.0.2.0/24", "2001:db8::/64")); out.Others != 1 {
		t.Errorf("the table isn't counted as repaired: %+v", out)
	}
	if err := p.send(0, netip.MustParseAddr("2001:db8::1")); !errors.Is(err, unix.EPERM) {
		t.Errorf("with the table restored: %v", err)
	}
	p.mustUse()
	if tables := testkit.Must(p.NS.Run("nft", "list", "ruleset"))(t); tables != "" {
		t.Errorf("without Egresses there is\n%s", tables)
	}
}

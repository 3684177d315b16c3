package egress

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// quiet lets no router on the way tell that a packet is too large, until the function that
// is returned is called.
func quiet(t *testing.T) (end func()) {
	t.Helper()
	command(t, "nft", "add table inet quiet; add chain inet quiet forward { type filter hook forward priority 0; }; "+
		"add rule inet quiet forward icmp type destination-unreachable drop; add rule inet quiet forward icmpv6 type packet-too-big drop")
	return func() { command(t, "nft", "delete table inet quiet") }
}

// underlay gives all links of the fabric one MTU, and the server's another, and waits until
// the router's tunnels follow. The kernel's learned path MTUs are flushed.
func (top *topology) underlay(c *sender, mtu, server int) {
	t := top.t
	t.Helper()
	ports := []string{"router"}
	for i := range top.clients {
		ports = append(ports, fmt.Sprintf("client%d", i+1))
	}
	var all []string
	for _, p := range ports {
		all = append(all, fmt.Sprintf("link set %s mtu %d", p, mtu))
	}
	machine.Configure(t, append(all, fmt.Sprintf("link set %s mtu %d", bridge, mtu), fmt.Sprintf("link set server mtu %d", server))...)
	top.router.Configure(t, fmt.Sprintf("link set eth0 mtu %d", mtu))
	top.server.Configure(t, fmt.Sprintf("link set eth0 mtu %d", server))
	for _, cl := range []*sender{top.a, top.b} {
		cl.Configure(t, fmt.Sprintf("link set eth0 mtu %d", mtu), fmt.Sprintf("link set fou4 mtu %d", dataplane.TunnelMTU(dataplane.IPv4, mtu)),
			fmt.Sprintf("link set fou6 mtu %d", dataplane.TunnelMTU(dataplane.IPv6, mtu)))
	}
	top.forgetWays(c)
	for _, m := range c.members {
		name, want := dataplane.TunnelName(m.addr, 0), fmt.Sprintf("mtu %d", dataplane.TunnelMTU(dataplane.FamilyOf(m.addr), mtu))
		testkit.Eventually(t, 5*time.Second, "the tunnel "+name+" follows the uplink", func() error {
			if l := top.router.IP(t, "-o", "link", "show", name); !contains(l, want) {
				return errors.New(l)
			}
			return nil
		})
		if m.addr.Is6() { // which has an MTU of its own for what it routes there
			key := "net/ipv6/conf/" + name + "/mtu"
			if known := testkit.Must(sysctl.Get(top.router.NS, key))(t); "mtu "+known != want {
				t.Errorf("%s is %s, want %s", key, known, want)
			}
		}
	}
}

// forgetWays makes client and server forget what fits on their ways: that goes with a route.
func (top *topology) forgetWays(c *sender) {
	top.t.Helper()
	var commands []string
	for f, link := range map[dataplane.Family]string{dataplane.IPv4: "fou4", dataplane.IPv6: "fou6"} {
		to := of(f, server4, server6)
		commands = append(commands, fmt.Sprintf("route del %s dev %s", to, link), fmt.Sprintf("route add %s dev %s src %s", to, link, of(f, c.addr4, c.addr6)))
	}
	c.Configure(top.t, commands...)
	top.server.Configure(top.t, "route del default via 192.0.2.1", "route add default via 192.0.2.1",
		"route del default via 2001:db8::1", "route add default via 2001:db8::1")
}

// Whatever the MTU of the fabric and beyond it, TCP goes through in both directions though
// nobody tells what is too large, and datagrams that mustn't be divided learn what fits.
func testUnderlay(t *testing.T, top *topology) {
	c := top.a
	defer top.underlay(c, 1500, 1500)
	ways := []struct{ fabric, server int }{{9000, 9000}, {1450, 1450}, {9000, 1500}, {1450, 9000}, {1500, 9000}}
	for _, u := range ways[:testkit.EgressForm.Times(2, len(ways))] {
		name := fmt.Sprintf("fabric %d, server %d", u.fabric, u.server)
		top.underlay(c, u.fabric, u.server)
		for _, f := range both {
			top.datagrams(c, f, u.fabric, u.server)
		}
		top.forgetWays(c)
		end := quiet(t)
		for _, f := range both {
			if err := c.transfer(of(f, server4, server6), testkit.EgressForm.Times(mebibyte/8, mebibyte)); err != nil {
				t.Errorf("%s: TCP of %s: %v", name, f, err)
			}
		}
		end()
	}
	for _, narrow := range []bool{true, false} { // then as before
		top.detour(c, narrow)
		top.forgetWays(c)
		for _, f := range both {
			if err := c.transfer(of(f, server4, server6), mebibyte/8); err != nil {
				t.Errorf("the way to the client is narrow in the middle: %t: TCP of %s: %v", narrow, f, err)
			}
		}
	}
	top.uplink.sound()
}

// detour leads what the router sends to a client over the fabric's node, which lets only 1400
// bytes through though all links have more; or straight again.
func (top *topology) detour(c *sender, narrow bool) {
	top.t.Helper()
	verb := map[bool]string{true: "add", false: "del"}[narrow]
	for _, f := range both {
		to := of(f, c.addr4, c.addr6)
		machine.Configure(top.t, fmt.Sprintf("route %s %s dev %s mtu lock 1400", verb, to, bridge))
		top.router.Configure(top.t, fmt.Sprintf("route %s %s via %s", verb, to, fabricAddr[f]))
	}
}

// udp opens a port of an address in a namespace, from which packets are sent that mustn't be
// divided.
func udp(t *testing.T, ns *netnstest.NS, a netip.Addr, port string) net.PacketConn {
	t.Helper()
	conn := testkit.Must(ns.Lab().ListenPacket(t.Context(), "udp", at(a, port)))(t)
	t.Cleanup(func() { conn.Close() })
	level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
	if a.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
	}
	sc := testkit.Must(conn.(*net.UDPConn).SyscallConn())(t)
	testkit.Check(t, sc.Control(func(fd uintptr) {
		testkit.Check(t, unix.SetsockoptInt(int(fd), level, option, unix.IP_PMTUDISC_DO))
	}))
	return conn
}

// datagrams sends large ones both ways until the sender knows what fits, and then exactly
// that.
func (top *topology) datagrams(c *sender, f dataplane.Family, fabric, server int) {
	t, to := top.t, of(f, server4, server6)
	t.Helper()
	header := map[dataplane.Family]int{4: 28, 6: 48}[f]
	fits := min(dataplane.TunnelMTU(f, fabric), server) - header
	from := udp(t, c.NS, of(f, c.addr4, c.addr6), "0")
	target := udp(t, top.server, to, "0")
	defer from.Close()
	defer target.Close()
	arrives := func(what string, from, at net.PacketConn, to net.Addr, size int) net.Addr {
		t.Helper()
		buf := make([]byte, 10000)
		var who net.Addr
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%s, %d and %d: %s: %d bytes arrive", f, fabric, server, what, size), func() error {
			if _, err := from.WriteTo(make([]byte, size), to); err != nil {
				return err
			}
			testkit.Check(t, at.SetReadDeadline(time.Now().Add(testkit.Timeout(100*time.Millisecond))))
			n, sender, err := at.ReadFrom(buf)
			if err == nil && n != size {
				err = fmt.Errorf("%d bytes arrived", n)
			}
			who = sender
			return err
		})
		return who
	}
	learns := func(what string, from net.PacketConn, to net.Addr) {
		t.Helper()
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("%s, %d and %d: %s learns what fits", f, fabric, server, what), func() error {
			if _, err := from.WriteTo(make([]byte, fits+1), to); !errors.Is(err, unix.EMSGSIZE) {
				return fmt.Errorf("a packet that is one byte too large: %w", err)
			}
			return nil
		})
	}
	client := arrives("client", from, target, target.LocalAddr(), 1)
	learns("client", from, target.LocalAddr())
	arrives("client", from, target, target.LocalAddr(), fits)
	learns("server", target, client)
	arrives("server", target, from, client, fits)
}

// Commands of ioctl SIOCETHTOOL, linux/ethtool.h.
const (
	ethtoolTXChecksum = 0x17 // ETHTOOL_STXCSUM
	ethtoolSG         = 0x19 // ETHTOOL_SSG
	ethtoolTSO        = 0x1f // ETHTOOL_STSO
	ethtoolGSO        = 0x24 // ETHTOOL_SGSO
	ethtoolGRO        = 0x2c // ETHTOOL_SGRO
)

// offload switches features of a link on or off.
func offload(ns *netnstest.NS, link string, on bool, commands ...uint32) error {
	return ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for _, c := range commands {
			value := struct{ command, data uint32 }{c, 0}
			if on {
				value.data = 1
			}
			request := struct {
				name [unix.IFNAMSIZ]byte
				data unsafe.Pointer
				_    [16]byte
			}{data: unsafe.Pointer(&value)}
			copy(request.name[:], link)
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
				return fmt.Errorf("ethtool command %#x of %s: %w", c, link, errno)
			}
		}
		return nil
	})
}

// badChecksums counts, by where, the packets that were dropped for their checksum.
func (top *topology) badChecksums() map[string]int {
	top.t.Helper()
	all := map[string]int{}
	for where, ns := range map[string]*netnstest.NS{"client": top.a.NS, "router": top.router, "server": top.server} {
		text := testkit.Must(ns.Run("cat", "/proc/net/snmp", "/proc/net/snmp6"))(top.t)
		var names []string
		found := 0
		for line := range strings.Lines(text) {
			fields := strings.Fields(line)
			switch {
			case !strings.HasSuffix(fields[0], ":"): // snmp6: one a line
				if strings.HasSuffix(fields[0], "InCsumErrors") {
					found++
					all[where] += testkit.Must(strconv.Atoi(fields[1]))(top.t)
				}
			case names == nil:
				names = fields
			default:
				for i, name := range names {
					if name == "InCsumErrors" {
						found++
						all[where] += testkit.Must(strconv.Atoi(fields[i]))(top.t)
					}
				}
				names = nil
			}
		}
		if found < 5 { // ICMP, TCP and UDP; ICMPv6 and UDP over IPv6
			top.t.Fatalf("only %d counts of bad checksums in\n%s", found, text)
		}
	}
	return all
}

// Whatever the links leave to each other, packets arrive with right checksums, the outer ones
// too.
func testOffload(t *testing.T, top *topology) {
	c, uplink := top.a, top.uplink
	all := []uint32{ethtoolTXChecksum, ethtoolSG, ethtoolTSO, ethtoolGSO, ethtoolGRO}
	type link struct {
		ns   *netnstest.NS
		name string
	}
	ends := []link{{c.NS, "eth0"}, {top.router, "eth0"}, {top.server, "eth0"}, {machine, "router"}, {machine, "client1"}, {machine, "server"}}
	tunnels := []link{{c.NS, "fou4"}, {c.NS, "fou6"}}
	for _, m := range c.members {
		tunnels = append(tunnels, link{top.router, dataplane.TunnelName(m.addr, 0)})
	}
	set := func(on bool, links []link, commands ...uint32) {
		t.Helper()
		for _, l := range links {
			testkit.Check(t, offload(l.ns, l.name, on, commands...))
		}
	}
	everywhere := append(append([]link(nil), ends...), tunnels...)
	defer set(true, everywhere, all...)
	before := top.badChecksums()
	cases := []struct {
		name string
		off  func()
	}{
		{"all off", func() { set(false, everywhere, all...) }},
		{"no checksums", func() { set(false, ends, ethtoolTXChecksum) }},
		{"no TSO and GSO", func() { set(false, ends, ethtoolTSO, ethtoolGSO) }},
		{"all on", func() {}}, // as nearly everywhere
		{"tunnels without", func() { set(false, tunnels, all...) }},
		{"no GRO", func() { set(false, everywhere, ethtoolGRO) }},
	}
	for _, o := range cases[:testkit.EgressForm.Times(3, len(cases))] {
		set(true, everywhere, all...)
		o.off()
		uplink.forget()
		for _, f := range both {
			if err := c.transfer(of(f, server4, server6), testkit.EgressForm.Times(mebibyte/8, 4*mebibyte)); err != nil {
				t.Errorf("%s, %s: %v", o.name, f, err)
			}
		}
		uplink.sound()
		if bare := uplink.All(func(p netlab.Packet) bool { return isFoU(p) && p.Checksum == 0 }); len(bare) > 0 {
			t.Errorf("%s: %d packets of tunnels without a checksum, the first %s", o.name, len(bare), bare[0])
		}
		for where, n := range top.badChecksums() {
			if n != before[where] {
				t.Errorf("%s: %d packets were dropped for their checksum at the %s, %d before", o.name, n, where, before[where])
			}
		}
	}
}

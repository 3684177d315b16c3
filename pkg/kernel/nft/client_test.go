package nft_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go4.org/netipx"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Addresses of the lab, in each family: of nets, each the first.
const (
	netClient = iota + 1
	netRouter
	netDestination
	netStranger
	netOther // of the client, but not the one that it has from Coil
)

// clientLab is a client, and all that it reaches in one namespace, by eth0 and by a veth in place of a
// tunnel.
type clientLab struct {
	lab
	client, outside *netnstest.NS
	rules           ruleset.Client
	table           table[ruleset.Client]
}

func newClientLab(t *testing.T) *clientLab {
	t.Helper()
	l := &clientLab{lab: lab{t: t}, client: netnstest.New(t), outside: netnstest.New(t)}
	const inner, uplink = "02:00:00:00:00:01", "02:00:00:00:00:02"
	l.client.IP(t, "link", "add", "eth0", "address", uplink, "type", "veth", "peer", "name", "eth0", "netns", l.outside.Path)
	l.client.IP(t, "link", "add", "fou4_1", "address", inner, "type", "veth", "peer", "name", "tunnel", "netns", l.outside.Path)
	for n, links := range map[*netnstest.NS][]string{l.client: {"lo", "eth0", "fou4_1"}, l.outside: {"lo", "eth0", "tunnel"}} {
		for _, link := range links {
			n.IP(t, "link", "set", link, "up")
		}
		for _, key := range []string{"all", links[1], links[2]} {
			l.run(n, "sysctl", "-qw", "net.ipv4.conf."+key+".rp_filter=0")
		}
	}
	l.rules = ruleset.Client{Uplink: l.index(l.client, "eth0"), Port: 5555}
	for _, f := range families {
		own, destination := addr(f, netClient, 1), addr(f, netDestination, 1)
		l.address(l.client, "eth0", own, 24)
		l.address(l.client, "lo", addr(f, netOther, 1), 32)
		l.address(l.outside, "eth0", addr(f, netClient, 2), 24)
		for _, net := range []int{netRouter, netStranger} {
			l.address(l.outside, "lo", addr(f, net, 1), 32)
		}
		l.address(l.outside, "tunnel", destination, 32)
		l.client.IP(t, "route", "add", destination.String(), "dev", "fou4_1")
		l.client.IP(t, "route", "add", "default", "via", addr(f, netClient, 2).String())
		l.outside.IP(t, "route", "add", addr(f, netOther, 1).String(), "dev", "tunnel")
		l.outside.IP(t, "route", "add", own.String(), "dev", "tunnel", "metric", "2000")
		for _, a := range []netip.Addr{own, addr(f, netOther, 1)} {
			l.outside.IP(t, "neigh", "add", a.String(), "lladdr", inner, "dev", "tunnel")
		}
		l.rules.Addresses = append(l.rules.Addresses, own)
		l.rules.Peers = append(l.rules.Peers, addr(f, netRouter, 1))
		l.rules.Destinations = append(l.rules.Destinations, netipx.IPRangeFrom(destination, addr(f, netDestination, 9)))
	}
	l.table = clientTable(t, l.client.NS)
	t.Cleanup(l.table.Close)
	return l
}

// counted is what the client's table has counted as what.
func (l *clientLab) counted(name string, f dataplane.Family) uint64 {
	l.t.Helper()
	all := testkit.Must(l.table.Counters(l.t.Context()))(l.t)
	i := slices.IndexFunc(all, func(c nft.Counter) bool { return c.Name == f.Named(name) })
	if i < 0 {
		l.t.Fatalf("no counter %s of %s", name, f)
	}
	return all[i].Packets
}

// packet is one of UDP to a port, of another protocol or, with a type, of ICMP.
type packet struct {
	from     *netnstest.NS
	link     string // by which it is sent, if any
	to       *netnstest.NS
	src, dst netip.Addr
	port     uint16
	protocol int
	icmp     icmp.Type
}

// ends returns the sockets that send and receive a packet, and what it has in it.
func (p packet) ends(ctx context.Context) (sends, hears net.PacketConn, target net.Addr, body []byte, err error) {
	body = []byte("0123456789")
	network, bind, any := "udp", netip.AddrPortFrom(p.src, 0).String(), fmt.Sprintf(":%d", p.port)
	target = net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.dst, p.port))
	if p.port == 0 {
		number := p.protocol
		if p.icmp != nil {
			number = map[bool]int{true: unix.IPPROTO_ICMP, false: unix.IPPROTO_ICMPV6}[p.dst.Is4()]
			data := append([]byte{0x45}, make([]byte, 40)...)
			message := icmp.Message{Type: p.icmp, Body: &icmp.DstUnreach{Data: data}}
			if p.icmp == ipv4.ICMPTypeEchoReply || p.icmp == ipv6.ICMPTypeEchoReply {
				message.Body = &icmp.Echo{Data: data}
			}
			if body, err = message.Marshal(nil); err != nil {
				return
			}
		}
		network = fmt.Sprintf("ip%d:%d", map[bool]int{true: 4, false: 6}[p.dst.Is4()], number)
		bind, any, target = p.src.String(), "", &net.IPAddr{IP: p.dst.AsSlice()}
	} else if p.dst.Is4() {
		network = "udp4"
	}
	if err = p.to.Do(func() error {
		hears, err = new(net.ListenConfig).ListenPacket(ctx, network, any)
		return err
	}); err != nil {
		return
	}
	err = p.from.Do(func() error {
		c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			if p.link == "" {
				return nil
			}
			if control := raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), p.link) }); control != nil {
				return control
			}
			return err
		}}
		sends, err = c.ListenPacket(ctx, network, bind)
		return err
	})
	return
}

// arrives says whether a packet does; nobody waits long for one that is counted as dropped.
func (l *clientLab) arrives(p packet, dropped func() bool) bool {
	l.t.Helper()
	sends, hears, target, body, err := p.ends(l.t.Context())
	testkit.Check(l.t, err)
	defer sends.Close()
	defer hears.Close()
	// The first may be sent before neighbours are known.
	for end := time.Now().Add(testkit.Timeout(timeout)); time.Now().Before(end); {
		if _, err := sends.WriteTo(body, target); err != nil && !errors.Is(err, unix.EPERM) {
			l.t.Fatal(err)
		}
		testkit.Check(l.t, hears.SetReadDeadline(time.Now().Add(silence/10)))
		if n, from, err := hears.ReadFrom(make([]byte, 100)); err == nil && n >= len(body) && strings.Contains(from.String(), p.src.String()) {
			return true
		}
		if dropped() {
			return false
		}
	}
	return false
}

// Each packet arrives without the table; with it, those that are counted as something don't.
func TestClient(t *testing.T) {
	l := newClientLab(t)
	type guarded struct {
		name, counter string
		packet
	}
	var all []guarded
	for _, f := range families {
		in := func(name, counter, link string, src, dst int, p packet) {
			p.from, p.to, p.link, p.src, p.dst = l.outside, l.client, link, addr(f, src, 1), addr(f, dst, 1)
			all = append(all, guarded{name, counter, p})
		}
		out := func(name, counter, link string, dst int) {
			all = append(all, guarded{name, counter, packet{from: l.client, to: l.outside, link: link, src: addr(f, netClient, 1), dst: addr(f, dst, 1), port: 7000}})
		}
		tunnels, unreachable, reply := []int{unix.IPPROTO_IPIP}, icmp.Type(ipv4.ICMPTypeDestinationUnreachable), icmp.Type(ipv4.ICMPTypeEchoReply)
		refusals := []icmp.Type{unreachable, ipv4.ICMPTypeTimeExceeded, ipv4.ICMPTypeParameterProblem}
		if f == dataplane.IPv6 {
			tunnels, unreachable, reply = []int{unix.IPPROTO_IPIP, unix.IPPROTO_IPV6}, ipv6.ICMPTypeDestinationUnreachable, ipv6.ICMPTypeEchoReply
			refusals = []icmp.Type{unreachable, ipv6.ICMPTypePacketTooBig, ipv6.ICMPTypeTimeExceeded, ipv6.ICMPTypeParameterProblem}
		}
		in("FoU of a stranger", ruleset.NonRouter, "eth0", netStranger, netClient, packet{port: 5555})
		in("FoU of a destination", ruleset.NonRouter, "eth0", netDestination, netClient, packet{port: 5555})
		in("FoU of a router", "", "eth0", netRouter, netClient, packet{port: 5555})
		for _, number := range tunnels {
			in("a tunnel of a stranger", ruleset.NonRouter, "eth0", netStranger, netClient, packet{protocol: number})
			in("a tunnel of a router", "", "eth0", netRouter, netClient, packet{protocol: number})
		}
		in("UDP of a stranger", "", "eth0", netStranger, netClient, packet{port: 7000})
		in("FoU of a router, tunnelled", ruleset.ForgedSource, "tunnel", netRouter, netClient, packet{port: 5555})
		in("tunnelled from a destination", "", "tunnel", netDestination, netClient, packet{port: 7000})
		in("tunnelled from a stranger", ruleset.ForgedSource, "tunnel", netStranger, netClient, packet{port: 7000})
		in("tunnelled to another address", ruleset.ForgedSource, "tunnel", netDestination, netOther, packet{port: 7000})
		for _, kind := range refusals {
			in(fmt.Sprint("tunnelled ", kind, " of who is on the way"), "", "tunnel", netStranger, netClient, packet{icmp: kind})
		}
		in("tunnelled error to another address", ruleset.ForgedSource, "tunnel", netStranger, netOther, packet{icmp: unreachable})
		in("a router lives", "", "tunnel", netRouter, netClient, packet{icmp: reply})
		in("a stranger lives", ruleset.ForgedSource, "tunnel", netStranger, netClient, packet{icmp: reply})
		out("bound to the uplink, to a destination", ruleset.PastTunnel, "eth0", netDestination)
		out("bound to the uplink, to a stranger", "", "eth0", netStranger)
		out("to a destination", "", "", netDestination)
	}
	for _, table := range []bool{false, true} {
		if table {
			testkit.Must(l.table.Sync(t.Context(), l.rules))(t)
		}
		for _, c := range all {
			f := dataplane.FamilyOf(c.dst)
			t.Run(fmt.Sprint("table ", table, " ", f, " ", c.name), func(t *testing.T) {
				lost := c.counter != "" && table
				var before uint64
				if lost {
					before = l.counted(c.counter, f)
				}
				dropped := func() bool { return lost && l.counted(c.counter, f) > before }
				if got := l.arrives(c.packet, dropped); got == lost {
					t.Errorf("arrives: %t", got)
				}
				if lost && !dropped() {
					t.Errorf("not counted as %s", c.counter)
				}
			})
		}
	}
}

// Packets that the client forwards, for a virtual machine in it, don't leave past the tunnels either.
func TestClientForwards(t *testing.T) {
	l := newClientLab(t)
	machine := netnstest.New(t)
	machine.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "tap0", "netns", l.client.Path)
	machine.IP(t, "link", "set", "eth0", "up")
	l.client.IP(t, "link", "set", "tap0", "up")
	l.run(l.client, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.tap0.rp_filter=0")
	for _, table := range []bool{false, true} {
		if table {
			testkit.Must(l.table.Sync(t.Context(), l.rules))(t)
		}
		for _, f := range families {
			family := map[dataplane.Family]string{4: "-4", 6: "-6"}[f]
			if !table {
				l.address(machine, "eth0", addr(f, 7, 2), 24)
				l.address(l.client, "tap0", addr(f, 7, 1), 24)
				machine.IP(t, "route", "add", "default", "via", addr(f, 7, 1).String())
				l.client.IP(t, family, "rule", "add", "iif", "tap0", "lookup", "99", "pref", "100")
				l.client.IP(t, family, "route", "add", "default", "via", addr(f, netClient, 2).String(), "table", "99")
			}
			for net, lost := range map[int]bool{netStranger: false, netDestination: table} {
				dropped := func() bool { return lost && l.counted(ruleset.PastTunnel, f) > 0 }
				p := packet{from: machine, to: l.outside, src: addr(f, 7, 2), dst: addr(f, net, 1), port: 7000}
				if got := l.arrives(p, dropped); got == lost {
					t.Errorf("table %t: what is forwarded to %s arrives: %t", table, p.dst, got)
				}
			}
		}
	}
}

// A neighbour that is in a destination finds the client.
func TestClientHasNeighbours(t *testing.T) {
	l := newClientLab(t)
	near := addr(dataplane.IPv6, netClient, 2)
	l.rules.Destinations = append(l.rules.Destinations, netipx.IPRangeFrom(near, near))
	testkit.Must(l.table.Sync(t.Context(), l.rules))(t)
	own := addr(dataplane.IPv6, netClient, 1)
	l.outside.IP(t, "route", "del", own.String(), "dev", "tunnel")
	if err := l.outside.Ping(own, silence); err == nil {
		t.Errorf("the answer to %s isn't held back", near)
	}
	testkit.Eventually(t, timeout, "the neighbour knows the client", func() error {
		if found := l.outside.IP(t, "neigh", "show", own.String(), "dev", "eth0"); !strings.Contains(found, "lladdr 02:00:00:00:00:02") {
			return fmt.Errorf("it has %q", found)
		}
		return nil
	})
}

package masquerade

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// timeout is for what arrives, silence for what must not.
var (
	timeout = testkit.Timeout(3 * time.Second)
	silence = testkit.Timeout(100 * time.Millisecond)
)

// lab is a node with two routers of different Egresses, each with a client, whose tunnel is a veth; and a server outside, which knows a way
// to the node alone.
type lab struct {
	t            *testing.T
	server, node *netnstest.NS
	routers      []*netnstest.NS
	clients      []*netnstest.NS
	handle       *rtnl.Handle
	wanted       []Router
	// leaks are what the server gets from others than the node.
	leaks *netlab.Capture
}

// addr is an address of one of the lab's networks: 0 is the server's, 1 and 2 are the routers'; those of clients have 10 more.
func addr(f dataplane.Family, network, host int) netip.Addr {
	if f == dataplane.IPv4 {
		return netip.AddrFrom4([4]byte{10, 0, byte(network), byte(host)})
	}
	return netip.MustParseAddr(fmt.Sprintf("2001:db8:%d::%d", network, host))
}

func single(a netip.Addr) string { return netip.PrefixFrom(a, a.BitLen()).String() }

func newLab(t *testing.T) *lab {
	l := &lab{t: t, server: netnstest.New(t), node: netnstest.New(t)}
	testkit.Check(t, l.node.Lab().Forward(), undetected(l.server), undetected(l.node))
	l.node.Configure(t, "link add uplink type veth peer name eth0 netns "+l.server.Path, "link set uplink up",
		"rule add priority 2000 table 116", "-6 rule add priority 2000 table 116")
	l.server.Configure(t, "link set eth0 up")
	for _, f := range families {
		l.address(l.node, "uplink", addr(f, 0, 1))
		l.address(l.server, "eth0", addr(f, 0, 2))
	}
	l.handle = testkit.Must(rtnl.New(l.node.NS))(t)
	t.Cleanup(l.handle.Close)
	for n := range 2 {
		l.addRouter(n + 1)
	}
	l.leaks = testkit.Must(l.server.Lab().NewCapture("eth0", func(p netlab.Packet) bool {
		neighbours := p.Dst.IsMulticast() || p.Src.Is6() && p.Src.IsLinkLocalUnicast()
		return !p.Out && !neighbours && p.Src != addr(dataplane.FamilyOf(p.Src), 0, 1)
	}))(t)
	t.Cleanup(func() { l.leaks.Close() })
	return l
}

// undetected lets links that are made later be used at once: their link-local addresses aren't checked for duplicates.
func undetected(n *netnstest.NS) error { return n.Lab().Sysctl("ipv6/conf/default/accept_dad=0") }

func isTransit(a netip.Addr) bool {
	_, is := dataplane.TransitNumber(a)
	return is
}

// address gives a link an address in a network of 24 or 64 bits.
func (l *lab) address(n *netnstest.NS, link string, a netip.Addr) {
	l.t.Helper()
	bits := map[dataplane.Family]int{dataplane.IPv4: 24, dataplane.IPv6: 64}[dataplane.FamilyOf(a)]
	n.Configure(l.t, netlab.AddAddr(netip.PrefixFrom(a, bits), link))
}

// addRouter makes a router and its client. Out of a tunnel comes no neighbour discovery.
func (l *lab) addRouter(n int) {
	t := l.t
	router, client := netnstest.New(t), netnstest.New(t)
	testkit.Check(t, router.Lab().Forward(), undetected(router), undetected(client))
	link := fmt.Sprint("r", n)
	const inside, outside = "02:00:00:00:01:01", "02:00:00:00:02:01"
	l.node.Configure(t, fmt.Sprintf("link add %s type veth peer name eth0 netns %s", link, router.Path), "link set "+link+" up")
	router.Configure(t, "link set eth0 up", "link add tunnel address "+outside+" type veth peer name eth0 address "+inside+" netns "+client.Path, "link set tunnel up")
	client.Configure(t, "link set eth0 up")
	at := Router{Netns: store.Netns{Path: router.Path, Inode: router.Inode()}}
	at.Link = testkit.Must(l.handle.IndexByName(link))(t)
	for _, f := range families {
		own, of := addr(f, n, 2), addr(f, 10+n, 1)
		at.Address = ipam.AddressOf(append(at.Address.Addrs(), own)...)
		l.address(l.node, link, addr(f, n, 1))
		l.address(router, "eth0", own)
		gateway := map[dataplane.Family]string{dataplane.IPv4: "169.254.1.1", dataplane.IPv6: "fe80::1"}[f]
		l.node.Configure(t, fmt.Sprintf("route add %s dev %s table 116", single(own), link))
		router.Configure(t, fmt.Sprintf("route add default via %s", addr(f, n, 1)), fmt.Sprintf("route add %s dev tunnel", single(of)),
			fmt.Sprintf("neigh add %s lladdr %s dev tunnel", of, inside))
		client.Configure(t, netlab.AddAddr(netip.PrefixFrom(of, of.BitLen()), "eth0"), fmt.Sprintf("neigh add %s lladdr %s dev eth0", gateway, outside),
			fmt.Sprintf("route add default via %s dev eth0 onlink", gateway))
	}
	l.routers, l.clients, l.wanted = append(l.routers, router), append(l.clients, client), append(l.wanted, at)
}

// start begins a life of the program.
func (l *lab) start() *Keeper {
	l.t.Helper()
	table := testkit.Must(nft.New(l.node.NS, dataplane.NftTableMasquerade))(l.t)
	l.t.Cleanup(table.Close)
	return New(Config{Handle: l.handle, Table: table, PodTable: dataplane.TablePods})
}

func (l *lab) sync(k *Keeper, want Result) {
	l.t.Helper()
	if got := testkit.Must(k.Sync(l.t.Context(), l.wanted))(l.t); got != want {
		l.t.Errorf("Sync found %+v, want %+v", got, want)
	}
}

// transits returns the transit addresses that a router finds on lo.
func (l *lab) transits(n int) (all []netip.Addr) {
	l.t.Helper()
	h := testkit.Must(rtnl.New(l.routers[n].NS))(l.t)
	defer h.Close()
	for _, a := range testkit.Must(h.Addrs(l.t.Context()))(l.t) {
		if a.Link == loopback && isTransit(a.Prefix.Addr()) {
			all = append(all, a.Prefix.Addr())
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// route makes each router translate its client to the addresses that it finds, or to its own ones if the Egress doesn't use the node's any more.
func (l *lab) route() { l.routeBy(true) }

func (l *lab) routeBy(node bool) {
	l.t.Helper()
	for n, router := range l.routers {
		h := testkit.Must(rtnl.New(router.NS))(l.t)
		g := ruleset.Gateway{
			MTU: 1500, Port: dataplane.FouPort, Addresses: l.wanted[n].Address.Addrs(), Transits: l.transits(n), Floating: &ruleset.GatewayFloating{},
			Uplink:       testkit.Must(h.IndexByName("eth0"))(l.t),
			Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		}
		tunnel := testkit.Must(h.IndexByName("tunnel"))(l.t)
		h.Close()
		for _, a := range l.transits(n) {
			client := addr(dataplane.FamilyOf(a), 11+n, 1)
			g.Clients = append(g.Clients, ruleset.GatewayClient{Addr: client, Link: tunnel})
			g.Floating.Addresses = append(g.Floating.Addresses, a)
			g.Floating.Sources = append(g.Floating.Sources, ruleset.GatewaySource{Client: client, Address: a})
		}
		if !node {
			g.Floating = nil
		}
		table := testkit.Must(nft.New(router.NS, dataplane.NftTable))(l.t)
		testkit.Must(table.Sync(l.t.Context(), g.Ruleset()))(l.t)
		table.Close()
	}
}

// talk is a flow of UDP to the server.
type talk struct {
	hears net.PacketConn
	asks  net.Conn
}

// talk opens one from an address of a namespace; an invalid address is any.
func (l *lab) talk(ns *netnstest.NS, from netip.AddrPort, f dataplane.Family) talk {
	l.t.Helper()
	hears := testkit.Must(l.server.Lab().ListenPacket(l.t.Context(), "udp", netip.AddrPortFrom(addr(f, 0, 2), 0).String()))(l.t)
	l.t.Cleanup(func() { hears.Close() })
	var asks net.Conn
	testkit.Check(l.t, ns.Do(func() (err error) {
		d := net.Dialer{}
		if from.IsValid() {
			d.LocalAddr = net.UDPAddrFromAddrPort(from)
		}
		asks, err = d.DialContext(l.t.Context(), "udp", hears.LocalAddr().String())
		return err
	}))
	l.t.Cleanup(func() { asks.Close() })
	return talk{hears, asks}
}

// ask sends a question, and returns by which source it was seen; an error if there is none within a time.
func (k talk) ask(within time.Duration) (netip.Addr, error) {
	if _, err := k.asks.Write([]byte("question")); err != nil {
		return netip.Addr{}, err
	}
	if err := k.hears.SetReadDeadline(time.Now().Add(within)); err != nil {
		return netip.Addr{}, err
	}
	_, from, err := k.hears.ReadFrom(make([]byte, 16))
	if err != nil {
		return netip.Addr{}, err
	}
	return from.(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}

// answered is ask with an answer, which must arrive.
func (k talk) answered() (netip.Addr, error) {
	if _, err := k.asks.Write([]byte("question")); err != nil {
		return netip.Addr{}, err
	}
	if err := k.hears.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return netip.Addr{}, err
	}
	_, from, err := k.hears.ReadFrom(make([]byte, 16))
	if err != nil {
		return netip.Addr{}, err
	}
	if _, err = k.hears.WriteTo([]byte("answer"), from); err != nil {
		return netip.Addr{}, err
	}
	if err := k.asks.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return netip.Addr{}, err
	}
	_, err = k.asks.Read(make([]byte, 16))
	return from.(*net.UDPAddr).AddrPort().Addr().Unmap(), err
}

// none fails if the server got something that the node hadn't translated.
func (l *lab) none(when string) {
	l.t.Helper()
	if got := l.leaks.Take(); len(got) > 0 {
		l.t.Errorf("%s: the server got %v", when, got)
	}
}

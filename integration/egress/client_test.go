package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	gosync "sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Destinations of the Egress; at the first addresses are servers that answer by the tunnel, the
// second ones answer, and call, by the client's link.
var (
	servers = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	callers = []netip.Addr{netip.MustParseAddr("192.0.2.129"), netip.MustParseAddr("2001:db8:8000::1")}
)

// network is a client, and what it reaches by its link: a router end that is made by hand, and the
// servers behind it.
type network struct {
	t            *testing.T
	pod, outside *netnstest.NS
	kernel       *clientnet.Network
	client       client.Client
	eth0         int
	sniffer      *sniffer
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{t: t, pod: netnstest.New(t), outside: netnstest.New(t)}
	n.sniffer = sniff(t, n.pod)
	n.outside.IP(t, "link", "add", "p0", "type", "veth", "peer", "name", "eth0", "netns", n.pod.Path)
	// As Coil wires a pod, but for rp_filter, which is strict on many hosts.
	n.pod.Configure(t, "link set eth0 up", "addr add 10.64.0.5/32 dev eth0", "addr add fd64::5/128 dev eth0 nodad",
		"route add 169.254.1.1 dev eth0", "route add default via 169.254.1.1 dev eth0", "-6 route add default via fe80::1 dev eth0")
	testkit.Check(t, n.pod.Lab().RPFilter(1, "eth0"), n.outside.Lab().RPFilter(0, "p0"))
	n.outside.Configure(t, "link set p0 addrgenmode none", "link set p0 up", "addr add 169.254.1.1/32 dev p0", "addr add fe80::1/64 dev p0 nodad",
		"route add 10.64.0.5 dev p0", "-6 route add fd64::5 dev p0",
		"addr add 10.64.9.9/32 dev lo", "addr add fd64::99/128 dev lo nodad", "addr add 10.64.8.8/32 dev lo", "addr add fd64::88/128 dev lo nodad")
	n.client = client.Client{
		Address: ipam.Address{IPv4: netip.MustParseAddr("10.64.0.5"), IPv6: netip.MustParseAddr("fd64::5")},
		Link:    "eth0", Port: 5555, Protocol: dataplane.ProtocolNode,
	}
	routerEnd(t, n.outside, n.client.Address, routerOwn)
	_, h := handleOf(t, n.pod)
	var err error
	if n.eth0, err = h.IndexByName("eth0"); err != nil {
		t.Fatal(err)
	}
	n.kernel = clientnet.New(dataplane.ProtocolNode, clientnet.FoU{}, nil)
	return n
}

// routerEnd makes by hand, in a namespace that reaches a client, what a router has: the addresses of
// two Services, which take what the client sends, and a tunnel back from the router's own address,
// as a router that chooses its source ports has it. The servers are there, too.
func routerEnd(t *testing.T, ns *netnstest.NS, client, own ipam.Address) {
	t.Helper()
	var commands []string
	for _, service := range []int{1, 2} {
		commands = append(commands, fmt.Sprintf("addr add 10.96.0.%d/32 dev lo", service*50), fmt.Sprintf("addr add fd00:10:96::%d/128 dev lo nodad", service*50))
	}
	ns.Configure(t, append(commands,
		"addr add 192.0.2.1/32 dev lo", "addr add 2001:db8::1/128 dev lo nodad", "addr add 192.0.2.129/32 dev lo", "addr add 2001:db8:8000::1/128 dev lo nodad",
		"addr add 100.64.0.1/32 dev lo",
		"fou add port 5555 ipproto 4", "-6 fou add port 5555 ipproto 41",
		"link add in4 type ipip external", "link set in4 up", "link add in6 type ip6tnl external", "link set in6 up",
		fmt.Sprintf("link add out4 type ipip local %s remote %s ttl 225 encap fou encap-sport auto encap-dport 5555", own.IPv4, client.IPv4),
		fmt.Sprintf("link add out6 type ip6tnl mode ip6ip6 local %s remote %s hoplimit 225 encaplimit none encap fou encap-sport auto encap-dport 5555", own.IPv6, client.IPv6),
		"link set out4 up mtu 1472", "link set out6 up mtu 1452",
		fmt.Sprintf("route add %s dev out4 table 99", client.IPv4), fmt.Sprintf("-6 route add %s dev out6 table 99", client.IPv6),
		"rule add from 192.0.2.1 lookup 99", "-6 rule add from 2001:db8::1 lookup 99",
	)...)
}

// routerOwn are the addresses of the router, stranger are those of who is none.
var (
	routerOwn = ipam.Address{IPv4: netip.MustParseAddr("10.64.9.9"), IPv6: netip.MustParseAddr("fd64::99")}
	stranger  = ipam.Address{IPv4: netip.MustParseAddr("10.64.8.8"), IPv6: netip.MustParseAddr("fd64::88")}
)

// gateway is an Egress by the nth Service, with a router; 0 is none.
func gatewayOf(service int) client.Egress {
	e := client.Egress{Name: "net/gw", Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}}
	if service > 0 {
		e.Peers = ipam.Address{IPv4: netip.AddrFrom4([4]byte{10, 96, 0, byte(service * 50)}), IPv6: netip.MustParseAddr(fmt.Sprintf("fd00:10:96::%d", service*50))}
		for _, a := range routerOwn.Addrs() {
			e.Routers = append(e.Routers, client.Router{Addr: a, State: client.RouterLive})
		}
	}
	return e
}

func (n *network) use(egresses ...client.Egress) clientnet.Outcome {
	n.t.Helper()
	c := n.client
	c.Egresses = egresses
	out, err := n.kernel.Client(n.t.Context(), store.Netns{Path: n.pod.Path, Inode: n.pod.Inode()}, c)
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// reached wants answers of the servers, or none.
func (n *network) reached(what string, want bool) {
	n.t.Helper()
	for _, s := range servers {
		if want {
			testkit.Eventually(n.t, 5*time.Second, what+": "+s.String()+" answers", func() error { return n.pod.Ping(s, testkit.Timeout(time.Second)) })
		} else if err := n.pod.Ping(s, 300*time.Millisecond); err == nil {
			n.t.Errorf("%s: %s answers", what, s)
		}
	}
}

// closed wants that nothing to a destination has left by eth0 but in the tunnel, and returns what
// has left in there.
func (n *network) closed(what string) (tunnelled map[sent]int) {
	n.t.Helper()
	all := n.sniffer.take(func(k sent) bool { return k.link == n.eth0 })
	tunnelled = map[sent]int{}
	for k, count := range all {
		for _, d := range gatewayOf(0).Destinations {
			if d.Contains(k.dst) {
				n.t.Errorf("%s: %d packets to %s left by eth0", what, count, k.dst)
			}
		}
		if k.dport == 5555 {
			tunnelled[k] = count
		}
	}
	return tunnelled
}

// flood sends to all servers until the test ends, to half of them by eth0; what can't be sent isn't. A change
// takes ten times as long where processors are emulated: a packet in ten milliseconds meets it as one in each
// does elsewhere, and leaves the processors to what changes.
func (n *network) flood() {
	var all gosync.WaitGroup
	ctx, cancel := context.WithCancel(n.t.Context())
	for i, s := range slices.Concat(servers, callers, servers, callers) {
		bind := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
			if i < len(servers)+len(callers) {
				return nil
			}
			return errors.Join(raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "eth0") }), err)
		}}
		conn := testkit.Must(netns.In(n.pod.NS, func() (net.PacketConn, error) { return bind.ListenPacket(ctx, "udp", ":0") }))(n.t)
		all.Go(func() {
			defer conn.Close()
			pause := time.NewTicker(time.Duration(testkit.EgressForm.Times(10, 2)) * time.Millisecond)
			defer pause.Stop()
			for ctx.Err() == nil {
				_, _ = conn.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(s, 9)))
				<-pause.C
			}
		})
	}
	n.t.Cleanup(func() { cancel(); all.Wait() })
}

// From ADD through every change of an Egress, nothing leaves by another way than the tunnel, and
// what is sent there arrives and is answered.
func testClient(t *testing.T) {
	n := newNetwork(t)
	n.reached("before", false)
	n.sniffer.take(func(sent) bool { return false })

	auto := gatewayOf(1)
	auto.SourcePortAuto = true
	first := n.use(gatewayOf(1))
	n.flood()
	n.reached("by the first Service", true)
	for k := range n.closed("at first") {
		if k.sport != 5555 || k.dst != first.State.Tunnels[0].Remote && k.dst != first.State.Tunnels[1].Remote {
			t.Errorf("a tunnel sends from port %d to %s", k.sport, k.dst)
		}
	}
	n.forged()
	if again := n.use(gatewayOf(1)); again.Rules.Changed() || again.Routes.Changed() || again.Tunnels.Changed() || again.Others != 0 {
		t.Errorf("the second time it changed %+v", again)
	}
	before := n.pod.IP(t, "-o", "link", "show", "type", "ipip")
	if out := n.use(auto); out.Tunnels != (dataplane.Result{Replaced: 2}) {
		t.Errorf("another source port: %+v", out.Tunnels)
	}
	if after := n.pod.IP(t, "-o", "link", "show", "type", "ipip"); after != before {
		t.Errorf("a source port isn't changed in place:\n%s\n%s", before, after)
	}
	n.sniffer.take(func(sent) bool { return false })
	n.reached("source port chosen by the kernel", true)
	ports := map[uint16]bool{}
	testkit.Eventually(t, 5*time.Second, "flows are sent from several ports", func() error {
		for k := range n.closed("source port") {
			ports[k.sport] = true
		}
		if len(ports) < 4 {
			return fmt.Errorf("they are sent from ports %v", ports)
		}
		return nil
	})
	if ports[5555] {
		t.Errorf("flows are sent from ports %v", ports)
	}

	if out := n.use(gatewayOf(2)); out.Tunnels != (dataplane.Result{Added: 2, Deleted: 2}) {
		t.Errorf("another Service: %+v", out.Tunnels)
	}
	n.reached("by the other Service", true)
	n.closed("another Service")
	split := gatewayOf(2)
	split.Destinations = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/25"), netip.MustParsePrefix("192.0.2.128/25"), netip.MustParsePrefix("2001:db8::/33"), netip.MustParsePrefix("2001:db8:8000::/33")}
	n.use(split)
	n.reached("destinations divided", true)
	everything := gatewayOf(1)
	everything.Destinations = append(everything.Destinations, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0"))
	everything.InCluster = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}
	n.use(everything)
	n.reached("everything", true)
	if err := n.pod.Ping(netip.MustParseAddr("100.64.0.1"), testkit.Timeout(time.Second)); err != nil {
		t.Errorf("in the cluster: %v", err)
	}
	if in := n.sniffer.take(func(k sent) bool { return k.link == n.eth0 && k.dst == netip.MustParseAddr("100.64.0.1") }); len(in) == 0 {
		t.Error("a packet to the cluster's range took the tunnel")
	}
	n.use(everything, gatewayOf(2))
	n.reached("two Egresses", true)
	n.closed("two Egresses")

	n.use(gatewayOf(0))
	n.reached("no Service", false)
	if sent := n.closed("no Service"); len(sent) > 0 {
		// Packets of before the tunnels' removal may be among them.
		if sent := n.closed("no Service"); len(sent) > 0 {
			t.Errorf("tunnels send without a Service: %v", sent)
		}
	}
	n.use(gatewayOf(1))
	n.reached("the Service is back", true)
	// A path that somebody destroys is closed until it is restored.
	n.pod.IP(t, "link", "del", dataplane.TunnelName(gatewayOf(1).Peers.IPv4, 0))
	n.pod.IP(t, "link", "set", dataplane.ReceiverIPv6, "down")
	n.reached("destroyed", false)
	n.use(gatewayOf(1))
	n.reached("restored", true)
	n.closed("restored")

	n.use()
	if out := testkit.Must(n.pod.Run("nft", "list", "ruleset"))(t); out != "" {
		t.Errorf("left is, in nft:\n%s", out)
	}
	for _, args := range []string{"fou show", "-6 fou show", "rule", "-6 rule", "-o link", "route show table all"} {
		out := n.pod.IP(t, strings.Fields(args)...)
		if strings.Contains(out, "5555") || strings.Contains(out, "proto 30") || strings.Contains(out, "coil_") || strings.Contains(out, "fou4_") || strings.Contains(out, "fou6_") {
			t.Errorf("left is, in ip %s:\n%s", args, out)
		}
	}
}

// Sockets that are connected follow when their destination becomes that of an Egress: a tunnel that
// comes doesn't make IPv6 look their routes up again, unlike links of other kinds.
func testClientConnected(t *testing.T) {
	elsewhere := func(service int) client.Egress {
		e := gatewayOf(service)
		e.Name, e.Destinations = "net/elsewhere", []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db9::/32")}
		return e
	}
	cases := []struct {
		name  string
		after []client.Egress
	}{
		{"another Egress", []client.Egress{elsewhere(1), gatewayOf(2)}},
		{"another Egress at the same Service", []client.Egress{elsewhere(1), gatewayOf(1)}},
		{"another Egress, not available", []client.Egress{elsewhere(1), gatewayOf(0)}},
	}
	if brief(t) {
		cases = cases[:1]
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			n := newNetwork(t)
			n.use(elsewhere(1))
			var conns []net.Conn
			for _, s := range servers {
				conn := testkit.Must(n.pod.Lab().Dial(t.Context(), "udp", netip.AddrPortFrom(s, 9).String()))(t)
				defer conn.Close()
				conns = append(conns, conn)
				testkit.Eventually(t, 5*time.Second, "packets to "+s.String()+" leave by eth0 before", func() error {
					_, _ = conn.Write([]byte("before")) // an error may be what ICMP said about the one before
					if len(n.sniffer.take(func(k sent) bool { return k.link == n.eth0 && k.dst == s })) == 0 {
						return errors.New("none has left")
					}
					return nil
				})
			}
			n.use(c.after...)
			// It would drop what routes let out.
			testkit.Must(n.pod.Run("nft", "delete", "table", "inet", dataplane.NftTable))(t)
			n.sniffer.take(func(sent) bool { return false })
			for range 20 {
				for _, conn := range conns {
					_, _ = conn.Write([]byte("after"))
				}
			}
			n.reached(c.name, len(c.after[1].Peers.Addrs()) > 0) // what was sent before is seen, too
			n.closed(c.name)
		})
	}
}

// 1 MiB in both directions, by packets of the greatest size.
func testClientTransfer(t *testing.T) {
	n := newNetwork(t)
	n.use(gatewayOf(1))
	n.pod.IP(t, "link", "set", "eth0", "mtu", "1400")
	n.outside.IP(t, "link", "set", "p0", "mtu", "1400")
	out := n.use(gatewayOf(1)) // the tunnels follow
	if out.Tunnels.Replaced != 2 {
		t.Errorf("with another MTU of eth0: %+v", out.Tunnels)
	}
	for i, s := range servers {
		for j, from := range []*netnstest.NS{n.pod} {
			got, err := transfer(t, from, n.outside, netip.AddrPortFrom(s, uint16(7000+10*i+j)), netip.Addr{}, 1<<20)
			if err != nil || got != 1<<20 {
				t.Errorf("%d bytes to and from %s: %v", got, s, err)
			}
		}
	}
	n.closed("transfer")
}

// Connections that come in by eth0 are answered there, those that the client opens take the tunnel.
func testClientOriginating(t *testing.T) {
	n := newNetwork(t)
	marked := gatewayOf(1)
	marked.OriginatingOnly = true
	// A narrower Egress without it, for part of the callers' range.
	other := gatewayOf(2)
	other.Name, other.Destinations = "net/other", []netip.Prefix{netip.MustParsePrefix("192.0.2.192/26")}
	toCallers := func() map[sent]int {
		return n.sniffer.take(func(k sent) bool { return k.link == n.eth0 && (k.dst == callers[0] || k.dst == callers[1]) })
	}
	n.outside.IP(t, "addr", "add", "192.0.2.200/32", "dev", "lo")
	for i, c := range []struct {
		name     string
		egresses []client.Egress
		direct   bool
	}{
		{"all by the tunnel", []client.Egress{gatewayOf(1), other}, false},
		{"originating only", []client.Egress{marked, other}, true},
		{"originating only ends", []client.Egress{gatewayOf(1)}, false},
	} {
		n.use(c.egresses...)
		toCallers()
		for j, caller := range callers {
			own := []netip.Addr{n.client.Address.IPv4, n.client.Address.IPv6}[j]
			got, err := transfer(t, n.outside, n.pod, netip.AddrPortFrom(own, uint16(8000+10*i+j)), caller, 1<<16)
			if err != nil || got != 1<<16 {
				t.Errorf("%s: %d bytes to and from %s: %v", c.name, got, caller, err)
			}
			if direct := len(toCallers()) > 0; direct != c.direct {
				t.Errorf("%s: %s is answered by eth0: %t", c.name, caller, direct)
			}
		}
		if c.direct {
			got, err := transfer(t, n.outside, n.pod, netip.AddrPortFrom(n.client.Address.IPv4, uint16(8005+10*i)), netip.MustParseAddr("192.0.2.200"), 1<<16)
			if err != nil || got != 1<<16 {
				t.Errorf("%s: %d bytes to and from the other Egress: %v", c.name, got, err)
			}
			if left := n.sniffer.take(func(k sent) bool { return k.link == n.eth0 && k.dst == netip.MustParseAddr("192.0.2.200") }); len(left) > 0 {
				t.Errorf("the other Egress is bypassed: %v", left)
			}
		}
		n.reached(c.name, true)
		n.closed(c.name)
	}
}

// transfer connects to an address and echoes so many bytes; it returns how many came back.
func transfer(t *testing.T, from, to *netnstest.NS, at netip.AddrPort, by netip.Addr, size int) (int, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(20*time.Second))
	defer cancel()
	l, err := to.Lab().Listen(ctx, "tcp", at.String())
	if err != nil {
		return 0, err
	}
	defer l.Close()
	go netlab.Serve(l, func(c net.Conn) { _, _ = io.Copy(c, c) }) // the other end tells
	var d net.Dialer
	if by.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(by, 0))
	}
	c, err := netns.In(from.NS, func() (net.Conn, error) { return d.DialContext(ctx, "tcp", at.String()) })
	if err != nil {
		return 0, err
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return 0, err
	}
	go func() {
		_, _ = c.Write(make([]byte, size)) // what doesn't arrive doesn't come back
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	n, err := io.Copy(io.Discard, c)
	return int(n), err
}

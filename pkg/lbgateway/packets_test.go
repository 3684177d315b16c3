package lbgateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// network is a gateway machine between a client and pods. The pods 10.1.0.1, fd01::1 and on answer at the ports of scene.endpoints.
type network struct {
	*scene
	client *netlab.NS
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{newScene(t), netnstest.New(t).Lab()}
	n.spec(func(s *v2.LoadBalancerGatewaySpec) { s.Endpoints = v2.EndpointsPod })
	pods, machine := netnstest.New(t).Lab(), n.machine.Lab()
	testkit.Check(t, machine.Forward(),
		machine.IP(t.Context(), "link add outside type veth peer name eth0 netns "+n.client.Path(), "link add inside type veth peer name eth0 netns "+pods.Path(), "link set outside up", "link set inside up",
			"addr add 192.0.2.1/24 dev outside", "addr add 2001:db8:2::1/64 dev outside nodad", "addr add 10.1.0.254/24 dev inside", "addr add fd01::fe/64 dev inside nodad",
			"route add local 198.51.100.0/24 dev lo", "-6 route add local 2001:db8::/64 dev lo"),
		n.client.IP(t.Context(), "link set eth0 up", "addr add 192.0.2.2/24 dev eth0", "addr add 2001:db8:2::2/64 dev eth0 nodad", "route add default via 192.0.2.1", "-6 route add default via 2001:db8:2::1"),
		pods.IP(t.Context(), "link set eth0 up"))
	for i := 1; i <= 3; i++ {
		for _, a := range []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.1.0.%d/24", i)), netip.MustParsePrefix(fmt.Sprintf("fd01::%d/64", i))} {
			testkit.Check(t, pods.IP(t.Context(), fmt.Sprintf("addr add %s dev eth0 nodad", a)))
			n.pod(pods, a.Addr())
		}
	}
	return n
}

// pod answers each line of a connection, and each datagram, with its address.
func (n *network) pod(ns *netlab.NS, a netip.Addr) {
	l := testkit.Must(ns.Listen(n.t.Context(), "tcp", netip.AddrPortFrom(a, 8080).String()))(n.t)
	go netlab.Serve(l, func(c net.Conn) {
		for r := bufio.NewReader(c); ; {
			if _, err := r.ReadString('\n'); err != nil {
				return
			}
			fmt.Fprintln(c, a)
		}
	})
	p := testkit.Must(ns.ListenPacket(n.t.Context(), "udp", netip.AddrPortFrom(a, 5353).String()))(n.t)
	go func() {
		for b := make([]byte, 100); ; {
			_, from, err := p.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = fmt.Fprintln(writer{p, from}, a) // the client may have gone
		}
	}()
	n.t.Cleanup(func() { testkit.Check(n.t, l.Close(), p.Close()) })
}

// writer sends datagrams.
type writer struct {
	net.PacketConn
	to net.Addr
}

func (w writer) Write(b []byte) (int, error) { return w.WriteTo(b, w.to) }

// ports are those of the scene's Services, by network.
var ports = map[string]uint16{"tcp": 80, "udp": 53}

// open connects to an address.
func (n *network) open(network, address string) (*session, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Second)
	defer cancel()
	c, err := n.client.Dial(ctx, network, netip.AddrPortFrom(netip.MustParseAddr(address), ports[network]).String())
	if err != nil {
		return nil, err
	}
	n.t.Cleanup(func() { c.Close() })
	return &session{c, bufio.NewReader(c)}, nil
}

// session is a connection, or a socket of UDP.
type session struct {
	net.Conn
	r *bufio.Reader
}

// ask returns the address of the pod that answers.
func (s *session) ask(within time.Duration) (string, error) {
	if err := s.SetDeadline(time.Now().Add(within)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(s, "who?"); err != nil {
		return "", err
	}
	text, err := s.r.ReadString('\n')
	return strings.TrimSpace(text), err
}

// reaches waits until new connections lead to a pod; none is for those that are refused.
func (n *network) reaches(when, network, address, want string) {
	n.t.Helper()
	n.await(when, func() error {
		s, err := n.open(network, address)
		got := ""
		if err == nil {
			got, err = s.ask(200 * time.Millisecond)
		}
		if want == "" && errors.Is(err, unix.ECONNREFUSED) || err == nil && got == want {
			return nil
		}
		return fmt.Errorf("%s to %s leads to %q, want %q: %w", network, address, got, want, err)
	})
}

// Scenario 26: clients of a Service without endpoints are refused, and served with its first one.
func TestScenario26NoEndpoints(t *testing.T) {
	n := newNetwork(t)
	n.service("a", nil)
	n.block(1, "a", "a")
	for network := range ports {
		for address, pod := range map[string]string{"198.51.100.1": "10.1.0.1", "2001:db8::1": "fd01::1"} {
			n.endpoints("a", 0)
			n.reaches("without endpoints", network, address, "")
			n.endpoints("a", 0, pod)
			n.reaches("with the first one", network, address, pod)
			n.endpoints("a", 0)
			n.reaches("without the last one", network, address, "")
		}
	}
}

// Scenario 27: an endpoint is removed. A socket of UDP that went there goes to another one; connections to endpoints that stay are untouched by any number of changes.
func TestScenario27EndpointRemoved(t *testing.T) {
	n := newNetwork(t)
	n.service("a", nil)
	n.endpoints("a", 0, "10.1.0.1")
	n.block(1, "a", "a")
	for network := range ports {
		n.reaches("at first", network, "198.51.100.1", "10.1.0.1")
	}
	stays := testkit.Must(n.open("tcp", "198.51.100.1"))(t)
	moves := testkit.Must(n.open("udp", "198.51.100.1"))(t)
	for _, s := range []*session{stays, moves} {
		if got, err := s.ask(patience); got != "10.1.0.1" {
			t.Fatalf("%q, %v", got, err)
		}
	}
	for i := range testkit.LBForm.Times(30, 1000) {
		n.endpoints("a", 0, "10.1.0.1", fmt.Sprint("10.1.0.", 2+i%2))
		n.DeliverAll()
		if got, err := stays.ask(patience); got != "10.1.0.1" {
			t.Fatalf("after %d changes: %q, %v", i, got, err)
		}
		if got, err := moves.ask(patience); got != "10.1.0.1" {
			t.Fatalf("after %d changes the socket of UDP goes to %q, %v", i, got, err)
		}
	}
	n.service("b", nil) // whose connection stays, while all endpoints of the other one go
	n.endpoints("b", 0, "10.1.0.3")
	n.block(2, "b", "")
	n.reaches("another Service", "tcp", "198.51.100.2", "10.1.0.3")
	other := testkit.Must(n.open("tcp", "198.51.100.2"))(t)
	n.endpoints("a", 0, "10.1.0.2")
	n.await("the socket of UDP goes to the other endpoint", func() error {
		if got, err := moves.ask(200 * time.Millisecond); got != "10.1.0.2" {
			return fmt.Errorf("%q, %w", got, err)
		}
		return nil
	})
	n.reaches("a new connection", "tcp", "198.51.100.1", "10.1.0.2")
	if got, err := other.ask(patience); got != "10.1.0.3" {
		t.Errorf("the connection to another Service: %q, %v", got, err)
	}
}

// Scenario 31: the gateway's table comes back when others take it away, and tables of others stay as they are.
func TestScenario31OthersChangeTables(t *testing.T) {
	n := newNetwork(t)
	n.service("a", nil)
	n.endpoints("a", 0, "10.1.0.1")
	n.block(1, "a", "")
	n.reaches("at first", "tcp", "198.51.100.1", "10.1.0.1")
	watch := testkit.Must(n.table.Watch())(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- watch.Run(ctx, 100*time.Millisecond, n.Touched) }()
	defer func() {
		cancel()
		testkit.Check(t, <-done, watch.Close())
	}()
	nft := func(commands string) string {
		t.Helper()
		return testkit.Must(n.machine.Run("nft", commands))(t)
	}
	others := "add table inet other; add set inet other s { type ipv4_addr; elements = { 192.0.2.7 }; }; add chain inet other c { type filter hook forward priority -5; policy accept; }; add rule inet other c ip saddr @s drop"
	nft(others)
	before := nft("list table inet other")
	stays := testkit.Must(n.open("tcp", "198.51.100.1"))(t)
	for _, takes := range []string{"delete table inet coil_lb", "flush table inet coil_lb", "flush ruleset", "flush ruleset; " + others} {
		nft(takes)
		n.settled(takes)
		n.reaches(takes, "tcp", "198.51.100.1", "10.1.0.1")
		if got, err := stays.ask(patience); got != "10.1.0.1" {
			t.Errorf("%s: the connection from before: %q, %v", takes, got, err)
		}
		if tables := nft("list tables"); strings.Contains(tables, "other") == (takes == "flush ruleset") {
			t.Errorf("%s: there are %s", takes, tables)
		}
	}
	n.endpoints("a", 0, "10.1.0.2")
	n.reaches("with another endpoint", "tcp", "198.51.100.1", "10.1.0.2")
	if after := nft("list table inet other"); after != before {
		t.Errorf("the table of others was\n%s\nand is\n%s", before, after)
	}
}

// Scenario 32: the gateway has one bit of the mark of connections, and none of that of packets. Bits of others stay.
func TestScenario32Marks(t *testing.T) {
	n := newNetwork(t)
	n.service("a", nil)
	n.endpoints("a", 0, "10.1.0.1", "fd01::1")
	n.block(1, "a", "a")
	n.settled("at first") // without endpoints the machine itself would refuse connections
	testkit.Must(n.machine.Run("nft", `add table inet other; add chain inet other in { type filter hook prerouting priority -150; }; add chain inet other out { type filter hook postrouting priority 150; }
		add rule inet other in ct state new ct mark set 0x1234; add rule inet other in meta mark set 0x77
		add rule inet other out meta l4proto { tcp, udp } meta mark 0x77 counter comment "as it was"; add rule inet other out meta l4proto { tcp, udp } meta mark != 0x77 counter comment "another one"`))(t)
	const bit, others = 0x00400000, 0x1234
	for network := range ports {
		for address, pod := range map[string]string{"198.51.100.1": "10.1.0.1", "2001:db8::1": "fd01::1"} {
			n.reaches("at first", network, address, pod)
			out := testkit.Must(n.machine.Run("sh", "-c", "conntrack -L -f "+map[bool]string{true: "ipv4", false: "ipv6"}[!strings.Contains(address, ":")]+" -p "+network+" 2>/dev/null"))(t)
			if !strings.Contains(out, " dst="+address) {
				t.Errorf("%s to %s isn't among %s", network, address, out)
			}
			for line := range strings.Lines(out) {
				if strings.Contains(line, " dst="+address+" ") && strings.Contains(line, " src="+pod+" ") && !strings.Contains(line, fmt.Sprintf(" mark=%d ", bit|others)) {
					t.Errorf("the mark isn't %d: %s", bit|others, line)
				}
			}
		}
	}
	out := testkit.Must(n.machine.Run("nft", "list chain inet other out"))(t)
	if !strings.Contains(out, `packets 0 bytes 0 comment "another one"`) || strings.Contains(out, `packets 0 bytes 0 comment "as it was"`) {
		t.Errorf("packets have other marks: %s", out)
	}
}

// Scenario 33: a Service of IPv6 alone, and one of both families.
func TestScenario33Families(t *testing.T) {
	n := newNetwork(t)
	n.service("six", nil)
	n.endpoints("six", 0, "fd01::2")
	n.block(1, "six", "six")
	b := fakeapi.Find[*v2.AddressBlock](n.s, blockResource, "dmz-1")
	b.IPv4 = nil
	n.s.Put(blockResource, b)
	n.service("both", nil)
	n.endpoints("both", 0, "10.1.0.3")
	n.endpoints("both", 1, "fd01::3")
	n.block(2, "both", "both")
	for network := range ports {
		n.reaches("of IPv6 alone", network, "2001:db8::1", "fd01::2")
		n.reaches("of both", network, "2001:db8::2", "fd01::3")
		n.reaches("of both", network, "198.51.100.2", "10.1.0.3")
	}
	for _, a := range n.guarded() {
		if a == netip.MustParseAddr("198.51.100.1") {
			t.Error("an address that the Service of IPv6 alone hasn't is guarded")
		}
	}
	if out, err := n.machine.Run("nft", "list", "map", "inet", "coil_lb", "endpoints_ipv4"); err != nil || strings.Contains(out, "198.51.100.1 ") {
		t.Errorf("the Service of IPv6 alone has IPv4: %s, %v", out, err)
	}
}

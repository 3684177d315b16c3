package nft_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// balancer is a client, a gateway machine with an address of Services, and a host with endpoints. The client reaches the address by the gateway, and so
// does the host the client.
type balancer struct {
	*lab
	client, gateway, host *netnstest.NS
	table                 *nft.Table
	want                  ruleset.LoadBalancer
}

// netService is the network of the Services' addresses.
const netService = 7

func newBalancer(t *testing.T) *balancer {
	t.Helper()
	b := &balancer{lab: &lab{t: t}, client: netnstest.New(t), gateway: netnstest.New(t), host: netnstest.New(t)}
	for _, n := range []*netnstest.NS{b.client, b.gateway, b.host} {
		b.run(n, "sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
		n.IP(t, "link", "set", "lo", "up")
	}
	b.run(b.gateway, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	for name, n := range map[string]*netnstest.NS{"outside": b.client, "inside": b.host} {
		b.gateway.IP(t, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", n.Path)
		b.gateway.IP(t, "link", "set", name, "up")
		n.IP(t, "link", "set", "eth0", "up")
	}
	for _, f := range families {
		b.address(b.gateway, "outside", addr(f, 1, 1), 24)
		b.address(b.gateway, "inside", addr(f, 9, 1), 24)
		b.address(b.gateway, "lo", addr(f, netService, 1), 32)
		for host := 2; host < 5; host++ {
			b.address(b.client, "eth0", addr(f, 1, host), 24)
			b.address(b.host, "eth0", addr(f, 9, host), 24)
		}
		b.client.IP(t, "route", "add", "default", "via", addr(f, 1, 1).String())
		b.host.IP(t, "route", "add", "default", "via", addr(f, 9, 1).String())
		b.want.Addresses = append(b.want.Addresses, addr(f, netService, 1))
	}
	b.table = open(t, b.gateway.NS, dataplane.NftTableLB)
	return b
}

// frontend adds a port of a Service.
func (b *balancer) frontend(f dataplane.Family, protocol uint8, port uint16, endpoints ...netip.AddrPort) *ruleset.Frontend {
	b.want.Frontends = append(b.want.Frontends, ruleset.Frontend{
		Address: addr(f, netService, 1), Port: ruleset.Port{Protocol: protocol, Port: port}, Endpoints: endpoints,
	})
	return &b.want.Frontends[len(b.want.Frontends)-1]
}

// make makes the table as wanted.
func (b *balancer) make() dataplane.Result {
	b.t.Helper()
	for _, at := range b.want.Frontends {
		b.want.LoadBalancerShape = b.want.With(at)
	}
	return testkit.Must(b.table.Sync(b.t.Context(), b.want.Ruleset()))(b.t)
}

// endpoint serves TCP and UDP at an address of the host. It answers with its own address and that of the client, and goes on answering in a connection.
func (b *balancer) endpoint(f dataplane.Family, host int, port uint16) netip.AddrPort {
	b.t.Helper()
	at := netip.AddrPortFrom(addr(f, 9, host), port)
	b.serve(b.host, at)
	return at
}

func (b *balancer) serve(n *netnstest.NS, at netip.AddrPort) {
	b.t.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	testkit.Check(b.t, n.Do(func() (err error) {
		if tcp, err = net.Listen("tcp", at.String()); err == nil {
			udp, err = net.ListenPacket("udp", at.String())
		}
		return err
	}))
	b.t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				fmt.Fprintf(conn, "%s %s\n", conn.LocalAddr(), conn.RemoteAddr())
				_, _ = io.Copy(conn, conn)
			}()
		}
	}()
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(fmt.Appendf(nil, "%s %s\n", at, from), from)
		}
	}()
}

// ask opens a connection from an address of the client, and returns the endpoint and the client that the endpoint sees.
func (b *balancer) ask(network string, from netip.Addr, to netip.AddrPort, wait time.Duration) (endpoint, client netip.AddrPort, err error) {
	conn, err := b.dial(network, from, to, wait)
	if err != nil {
		return endpoint, client, err
	}
	defer conn.Close()
	return answer(network, conn, wait)
}

func (b *balancer) dial(network string, from netip.Addr, to netip.AddrPort, wait time.Duration) (conn net.Conn, err error) {
	d := net.Dialer{Timeout: wait}
	switch network {
	case "tcp":
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	case "udp":
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	err = errors.Join(b.client.Do(func() (err error) {
		conn, err = d.DialContext(b.t.Context(), network, to.String())
		return err
	}), err)
	return conn, err
}

// answer is what an endpoint answers in a connection.
func answer(network string, conn net.Conn, wait time.Duration) (endpoint, client netip.AddrPort, err error) {
	if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
		return endpoint, client, err
	}
	if network == "udp" {
		if _, err := conn.Write([]byte("who")); err != nil {
			return endpoint, client, err
		}
	}
	buf := make([]byte, 200)
	n, err := conn.Read(buf)
	if err != nil {
		return endpoint, client, err
	}
	words := strings.Fields(string(buf[:n]))
	return netip.MustParseAddrPort(words[0]), netip.MustParseAddrPort(words[1]), nil
}

// each runs a test for both families, with a balancer of its own.
func eachBalancer(t *testing.T, do func(b *balancer, f dataplane.Family, at netip.Addr, client netip.Addr)) {
	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) {
			do(newBalancer(t), f, addr(f, netService, 1), addr(f, 1, 2))
		})
	}
}

// The whole of a gateway machine's ruleset, whose frontends have three endpoints at most.
func TestLoadBalancerRuleset(t *testing.T) {
	b := newBalancer(t)
	for _, f := range families {
		b.frontend(f, unix.IPPROTO_TCP, 80, netip.AddrPortFrom(addr(f, 9, 2), 8080), netip.AddrPortFrom(addr(f, 9, 3), 8081))
		b.frontend(f, unix.IPPROTO_UDP, 53)
		b.frontend(f, unix.IPPROTO_SCTP, 36412, netip.AddrPortFrom(addr(f, 9, 2), 36412)).Sources = prefixRanges(addr(f, 1, 0), 24)
		b.frontend(f, unix.IPPROTO_TCP, 443, netip.AddrPortFrom(addr(f, 9, 2), 8443)).Affinity = 3 * time.Hour
	}
	b.want.LoadBalancerShape = ruleset.LoadBalancerShape{Most: 2, Affinities: []time.Duration{3 * time.Hour}, Masquerade: true}
	testkit.Must(b.table.Sync(t.Context(), b.want.Ruleset()))(t)
	testkit.Check(t, b.table.Check(t.Context(), b.want.Ruleset()))
	golden(t, b.gateway, dataplane.NftTableLB, "loadbalancer")
	// A table that is opened anew reads the same.
	if out := testkit.Must(open(t, b.gateway.NS, dataplane.NftTableLB).Sync(t.Context(), b.want.Ruleset()))(t); out.Changed() {
		t.Errorf("another Sync did %+v", out)
	}
}

// Connections are spread over endpoints of different ports; TCP and UDP of one port lead to endpoints of their own.
func TestConnectionsAreSpread(t *testing.T) {
	eachBalancer(t, func(b *balancer, f dataplane.Family, at, client netip.Addr) {
		endpoints := []netip.AddrPort{b.endpoint(f, 2, 8080), b.endpoint(f, 3, 8081), b.endpoint(f, 4, 8082)}
		other := b.endpoint(f, 2, 5353)
		b.frontend(f, unix.IPPROTO_TCP, 80, endpoints...)
		b.frontend(f, unix.IPPROTO_UDP, 80, other)
		b.make()
		seen := map[netip.AddrPort]int{}
		for range 60 {
			endpoint, from, err := b.ask("tcp", client, netip.AddrPortFrom(at, 80), timeout)
			if err != nil {
				b.t.Fatal(err)
			}
			seen[endpoint]++
			if from.Addr() != client {
				b.t.Fatalf("the endpoint sees %s", from)
			}
		}
		for _, e := range endpoints {
			if n := seen[e]; n < 5 || n > 40 { // 20 of 60 with a standard deviation of 3.7
				b.t.Errorf("%s got %d of 60 connections: %v", e, n, seen)
			}
		}
		if endpoint, _, err := b.ask("udp", client, netip.AddrPortFrom(at, 80), timeout); err != nil || endpoint != other {
			b.t.Errorf("UDP leads to %s, %v", endpoint, err)
		}
	})
}

// With Masquerade the endpoint sees the gateway, whose marks have no other bit. The gateway itself reaches Services, too.
func TestScenario23Masquerade(t *testing.T) {
	eachBalancer(t, func(b *balancer, f dataplane.Family, at, client netip.Addr) {
		b.frontend(f, unix.IPPROTO_TCP, 80, b.endpoint(f, 2, 8080))
		b.want.Masquerade = true
		b.run(b.gateway, "nft", "add table inet other; add chain inet other c { type filter hook prerouting priority -140; }; add rule inet other c ct state new ct mark set 0x11")
		b.make()
		conn := testkit.Must(b.dial("tcp", client, netip.AddrPortFrom(at, 80), timeout))(b.t)
		defer conn.Close()
		_, from, err := answer("tcp", conn, timeout)
		if err != nil || from.Addr() != addr(f, 9, 1) {
			b.t.Errorf("the endpoint sees %s, %v", from, err)
		}
		if out := b.run(b.gateway, "cat", "/proc/net/nf_conntrack"); !strings.Contains(out, fmt.Sprint("mark=", 0x11|dataplane.MarkBalanced)) {
			b.t.Errorf("the mark of the connection isn't that of another table and its own: %s", out)
		}
		var own net.Conn
		testkit.Check(b.t, b.gateway.Do(func() (err error) {
			own, err = net.DialTimeout("tcp", netip.AddrPortFrom(at, 80).String(), timeout)
			return err
		}))
		own.Close()
	})
}

// Where there is no endpoint clients are refused at once; at other ports their packets get lost, or are refused, and reach nothing of the machine.
func TestScenario26Refused(t *testing.T) {
	eachBalancer(t, func(b *balancer, f dataplane.Family, at, client netip.Addr) {
		b.serve(b.gateway, netip.AddrPortFrom(at, 22)) // sshd
		for _, p := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			b.frontend(f, p, 80)
		}
		b.make()
		refused := func(port uint16) {
			b.t.Helper()
			for _, network := range []string{"tcp", "udp"} {
				if _, _, err := b.ask(network, client, netip.AddrPortFrom(at, port), timeout); !errors.Is(err, unix.ECONNREFUSED) {
					b.t.Errorf("%s %d: %v, want that it is refused", network, port, err)
				}
			}
		}
		refused(80)
		for _, network := range []string{"tcp", "udp"} {
			if _, _, err := b.ask(network, client, netip.AddrPortFrom(at, 22), silence); !isTimeout(err) {
				b.t.Errorf("%s 22 before: %v, want silence", network, err)
			}
		}
		testkit.Check(b.t, b.client.Ping(at, timeout))
		b.want.Refuse = true
		b.make()
		refused(22)
		refused(80)
		// The machine's own addresses stay as they are.
		b.serve(b.gateway, netip.AddrPortFrom(addr(f, 1, 1), 22))
		if _, _, err := b.ask("tcp", client, netip.AddrPortFrom(addr(f, 1, 1), 22), timeout); err != nil {
			b.t.Errorf("the machine's own address: %v", err)
		}
	})
}

func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}

// Clients that a Service doesn't let in get no answer, and a change meets new connections alone.
func TestScenario24SourceRanges(t *testing.T) {
	eachBalancer(t, func(b *balancer, f dataplane.Family, at, client netip.Addr) {
		web := b.frontend(f, unix.IPPROTO_TCP, 80, b.endpoint(f, 2, 8080))
		b.make()
		other := addr(f, 1, 3)
		before := testkit.Must(b.dial("tcp", other, netip.AddrPortFrom(at, 80), timeout))(b.t)
		defer before.Close()
		if _, _, err := answer("tcp", before, timeout); err != nil {
			b.t.Fatal(err)
		}
		was := *web
		web.Sources = only(client)
		testkit.Check(b.t, b.table.Change(b.t.Context(), ruleset.Change(&was, web)...))
		if _, _, err := b.ask("tcp", client, netip.AddrPortFrom(at, 80), timeout); err != nil {
			b.t.Errorf("a client that is let in: %v", err)
		}
		if _, _, err := b.ask("tcp", other, netip.AddrPortFrom(at, 80), silence); !isTimeout(err) {
			b.t.Errorf("another client: %v, want silence", err)
		}
		testkit.Check(b.t, lives(before))
		is := *web
		web.Sources = nil
		testkit.Check(b.t, b.table.Change(b.t.Context(), ruleset.Change(&is, web)...))
		if _, _, err := b.ask("tcp", other, netip.AddrPortFrom(at, 80), timeout); err != nil {
			b.t.Errorf("when all are let in: %v", err)
		}
	})
}

// A client with an affinity gets the same endpoint again, while others get others.
func TestScenario29Affinity(t *testing.T) {
	eachBalancer(t, func(b *balancer, f dataplane.Family, at, client netip.Addr) {
		const n = 8
		var endpoints []netip.AddrPort
		for i := range uint16(n) {
			endpoints = append(endpoints, b.endpoint(f, 2, 8080+i))
		}
		web := b.frontend(f, unix.IPPROTO_TCP, 80, endpoints...)
		web.Affinity = 2 * time.Second
		b.make()
		first, _, err := b.ask("tcp", client, netip.AddrPortFrom(at, 80), timeout)
		if err != nil {
			b.t.Fatal(err)
		}
		again := func(when string) {
			b.t.Helper()
			for range 20 {
				if e, _, err := b.ask("tcp", client, netip.AddrPortFrom(at, 80), timeout); err != nil || e != first {
					b.t.Fatalf("%s the client gets %s, %v, want %s", when, e, err, first)
				}
			}
		}
		again("at first")
		// Longer than the time, since each connection begins it anew.
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
			again("after a while")
		}
		// Other endpoints that go don't matter.
		was := *web
		web.Endpoints = nil
		for _, e := range endpoints {
			if e == first || len(web.Endpoints) == 0 && e != endpoints[0] {
				web.Endpoints = append(web.Endpoints, e)
			}
		}
		testkit.Check(b.t, b.table.Change(b.t.Context(), ruleset.Change(&was, web)...))
		again("with fewer endpoints")
		clients := map[netip.AddrPort]bool{first: true}
		for host := 3; host < 5; host++ {
			e, _, err := b.ask("tcp", addr(f, 1, host), netip.AddrPortFrom(at, 80), timeout)
			if err != nil {
				b.t.Fatal(err)
			}
			clients[e] = true
		}
		b.t.Logf("three clients have %d endpoints", len(clients))
		elements := testkit.Must(b.table.Expiring(b.t.Context(), ruleset.Sticky(f)))(b.t)
		if len(elements) != 3 {
			b.t.Errorf("%d clients are remembered, want 3", len(elements))
		}
	})
}

// Changes of endpoints disturb no connection to those that stay, and after all of them the table is what Sync makes.
func TestChangesDisturbNoConnection(t *testing.T) {
	eachBalancer(t, func(b *balancer, f dataplane.Family, at, client netip.Addr) {
		stays := b.endpoint(f, 2, 8080)
		web := b.frontend(f, unix.IPPROTO_TCP, 80, stays)
		b.make()
		conn := testkit.Must(b.dial("tcp", client, netip.AddrPortFrom(at, 80), timeout))(b.t)
		defer conn.Close()
		if e, _, err := answer("tcp", conn, timeout); err != nil || e != stays {
			b.t.Fatalf("%s, %v", e, err)
		}
		ctx, stop := context.WithCancel(b.t.Context())
		var all sync.WaitGroup
		var sent int
		all.Go(func() {
			for ; ctx.Err() == nil; sent++ {
				if err := lives(conn); err != nil {
					b.t.Errorf("after %d bytes: %v", sent, err)
					return
				}
			}
		})
		for i := range testkit.LBForm.Times(70, 1000) {
			was := *web
			web.Endpoints = []netip.AddrPort{stays}
			for j := range i % 7 {
				web.Endpoints = append([]netip.AddrPort{netip.AddrPortFrom(addr(f, 9, 3), uint16(1000+i*j))}, web.Endpoints...)
			}
			testkit.Check(b.t, b.table.Change(b.t.Context(), ruleset.Change(&was, web)...))
		}
		stop()
		all.Wait()
		if sent == 0 {
			b.t.Error("nothing was sent meanwhile")
		}
		testkit.Check(b.t, b.table.Check(b.t.Context(), b.want.Ruleset()))
		fresh := open(b.t, b.gateway.NS, dataplane.NftTableLB)
		if out := testkit.Must(fresh.Sync(b.t.Context(), b.want.Ruleset()))(b.t); out.Changed() {
			b.t.Errorf("Sync did %+v afterwards", out)
		}
		// What somebody else has changed isn't relied on.
		b.run(b.gateway, "nft", "flush map inet coil_lb choose_"+strings.ToLower(f.String()))
		was := *web
		web.Endpoints = []netip.AddrPort{stays, stays}
		if err := b.table.Change(b.t.Context(), ruleset.Change(&was, web)...); !errors.Is(err, nft.ErrUnknown) {
			b.t.Errorf("after somebody's change: %v", err)
		}
		if out := b.make(); out.Added < 2 || out.Replaced > 0 {
			b.t.Errorf("Sync did %+v, want that it adds the map's element and an endpoint", out)
		}
		testkit.Check(b.t, b.table.Check(b.t.Context(), b.want.Ruleset()), lives(conn))
	})
}

// prefixRanges is a range of one prefix.
func prefixRanges(a netip.Addr, bits int) []netipx.IPRange {
	return []netipx.IPRange{netipx.RangeOfPrefix(netip.PrefixFrom(a, bits).Masked())}
}

// only is a range of one address.
func only(a netip.Addr) []netipx.IPRange { return []netipx.IPRange{single(a)} }

// Nftables that can't be asked are an error, also before the table is known.
func TestTableThatCannotBeAsked(t *testing.T) {
	table := open(t, netnstest.New(t).NS, dataplane.NftTableLB)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := table.Sync(ctx, many(1, 1).Ruleset()); !errors.Is(err, context.Canceled) {
		t.Errorf("Sync: %v", err)
	}
	if err := table.Check(ctx, many(1, 1).Ruleset()); !errors.Is(err, context.Canceled) {
		t.Errorf("Check: %v", err)
	}
}

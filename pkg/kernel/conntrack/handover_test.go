package conntrack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// moved is an address by which clients are known to a server: first at router a, then at router b.
type moved struct {
	t                    *testing.T
	client, server, a, b *netnstest.NS
}

// Addresses of a lab of one family.
type family struct{ client, server, float string }

var (
	ipv4 = family{"10.0.0.9", "192.0.2.1", "192.0.2.200"}
	ipv6 = family{"fd00::9", "2001:db8::1", "2001:db8::200"}
)

func newMoved(t *testing.T) *moved {
	t.Helper()
	m := &moved{t, netnstest.New(t), netnstest.New(t), netnstest.New(t), netnstest.New(t)}
	// The links of both routers to the server are ports of its bridge.
	m.server.Configure(t, netlab.AddBridge("br0", netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8::1/64"))...)
	m.client.Configure(t, "link add br0 type bridge mcast_snooping 0", "link set br0 up", "addr add 10.0.0.9/24 dev br0", "addr add fd00::9/64 dev br0 nodad")
	for i, r := range []*netnstest.NS{m.a, m.b} {
		n := fmt.Sprint(i + 2)
		m.server.Configure(t, "link add r"+n+" type veth peer name out netns "+r.Path, "link set r"+n+" master br0 up")
		m.client.Configure(t, "link add r"+n+" type veth peer name in netns "+r.Path, "link set r"+n+" master br0 up")
		r.Configure(t, "link set in up", "link set out up",
			"addr add 10.0.0."+n+"/24 dev in", "addr add fd00::"+n+"/64 dev in nodad",
			"addr add 192.0.2."+n+"/24 dev out", "addr add 2001:db8::"+n+"/64 dev out nodad")
		testkit.Check(t, r.Lab().Forward())
		for _, rules := range []string{
			"add table inet t", "add chain inet t nat { type nat hook postrouting priority srcnat; }",
			"add rule inet t nat oifname out ip saddr 10.0.0.9 snat to 192.0.2.200",
			"add rule inet t nat oifname out ip6 saddr fd00::9 snat to 2001:db8::200",
		} {
			if _, err := r.Run("nft", strings.Fields(rules)...); err != nil {
				t.Fatal(err)
			}
		}
		// A packet in the middle of a connection makes no flow.
		testkit.Check(t, r.Lab().Sysctl("netfilter/nf_conntrack_tcp_loose=0"))
	}
	m.to("2")
	return m
}

// to makes a router the client's and the address's.
func (m *moved) to(n string) {
	m.t.Helper()
	m.client.Configure(m.t, "route replace 192.0.2.0/24 via 10.0.0."+n, "-6 route replace 2001:db8::/64 via fd00::"+n)
	m.server.Configure(m.t, "route replace 192.0.2.200 via 192.0.2."+n, "-6 route replace 2001:db8::200 via 2001:db8::"+n)
}

// serve answers each line of each connection by the source that it is known by, until the test is over.
func (m *moved) serve(f family) (tcp, udp string) {
	m.t.Helper()
	l := testkit.Must(m.server.Lab().Listen(m.t.Context(), "tcp", net.JoinHostPort(f.server, "0")))(m.t)
	p := testkit.Must(m.server.Lab().ListenPacket(m.t.Context(), "udp", net.JoinHostPort(f.server, "0")))(m.t)
	m.t.Cleanup(func() { l.Close(); p.Close() })
	go netlab.Serve(l, func(c net.Conn) {
		b := make([]byte, 1)
		for {
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			if _, err := fmt.Fprintf(c, "%-64s", c.RemoteAddr()); err != nil {
				return
			}
		}
	})
	go func() {
		b := make([]byte, 1)
		for {
			_, from, err := p.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = p.WriteTo(fmt.Appendf(nil, "%-64s", from), from)
		}
	}()
	return l.Addr().String(), p.LocalAddr().String()
}

// ask returns by which source the server knows the connection. Datagrams may be lost while neighbours are found.
func ask(c net.Conn, within time.Duration) (string, error) {
	b := make([]byte, 64)
	for end := time.Now().Add(within); ; {
		if _, err := c.Write([]byte{1}); err != nil {
			return "", err
		}
		if err := c.SetReadDeadline(time.Now().Add(min(within, time.Second))); err != nil {
			return "", err
		}
		_, err := io.ReadFull(c, b)
		if err == nil {
			return strings.TrimSpace(string(b)), nil
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(end) {
			return "", err
		}
	}
}

// Connections whose flows are copied live on at the other router, with the port by which the server knows them. One that isn't copied doesn't.
func TestFlowsMove(t *testing.T) {
	for name, f := range map[string]family{"IPv4": ipv4, "IPv6": ipv6} {
		t.Run(name, func(t *testing.T) {
			m := newMoved(t)
			tcp, udp := m.serve(f)
			conns := map[string]net.Conn{}
			known := map[string]string{}
			for conn, to := range map[string][2]string{"left": {"tcp", tcp}, "tcp": {"tcp", tcp}, "udp": {"udp", udp}} {
				testkit.Eventually(t, 20*time.Second, "a connection through the first router", func() error {
					ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(3*time.Second))
					defer cancel()
					c, err := m.client.Lab().Dial(ctx, to[0], to[1])
					if err == nil {
						conns[conn] = c
						t.Cleanup(func() { c.Close() })
						known[conn], err = ask(c, testkit.Timeout(5*time.Second))
					}
					return err
				})
				if !strings.HasPrefix(strings.Trim(known[conn], "["), f.float) {
					t.Fatalf("%s is known as %s", conn, known[conn])
				}
			}
			from, to := table(t, m.a), table(t, m.b)
			var flows []Flow
			testkit.Eventually(t, 10*time.Second, "three flows", func() error {
				if _, err := ask(conns["udp"], testkit.Timeout(5*time.Second)); err != nil { // one of UDP is ASSURED after two seconds
					return err
				}
				flows = nil
				err := from.Translated(t.Context(), []netip.Addr{netip.MustParseAddr(f.float)}, func(f Flow) { flows = append(flows, f) })
				if err == nil && len(flows) != 3 {
					err = fmt.Errorf("%v", flows)
				}
				return err
			})
			left := testkit.Must(netip.ParseAddrPort(conns["left"].LocalAddr().String()))(t)
			flows = slices.DeleteFunc(flows, func(f Flow) bool { return f.Src == left })
			if n, err := to.Insert(t.Context(), flows); n != 2 || err != nil {
				t.Fatalf("%d flows of %v are inserted, %v", n, flows, err)
			}
			if n, err := to.Insert(t.Context(), flows); n != 0 || err != nil {
				t.Errorf("again: %d, %v", n, err)
			}
			var copied []Flow
			testkit.Check(t, to.Translated(t.Context(), []netip.Addr{netip.MustParseAddr(f.float)}, func(f Flow) { copied = append(copied, f) }))
			for i := range flows {
				flows[i].Timeout = 0
			}
			for i, c := range copied {
				copied[i].Timeout, copied[i].TCP.FlagsOrig, copied[i].TCP.FlagsReply = 0, c.TCP.FlagsOrig&^tcpBeLiberal, c.TCP.FlagsReply&^tcpBeLiberal
				if !slices.Contains(flows, copied[i]) {
					t.Errorf("%+v is none of %+v", copied[i], flows)
				}
			}
			m.to("3")
			for _, conn := range []string{"tcp", "udp"} {
				if got, err := ask(conns[conn], testkit.Timeout(10*time.Second)); err != nil || got != known[conn] {
					t.Errorf("%s was known as %s, and is as %s, %v", conn, known[conn], got, err)
				}
			}
			if got, err := ask(conns["left"], testkit.Timeout(2*time.Second)); err == nil {
				t.Errorf("a connection whose flow wasn't copied lives on, known as %s", got)
			}
		})
	}
}

// Echoes are copied with their identifiers.
func TestEchoesMove(t *testing.T) {
	for _, f := range []family{ipv4, ipv6} {
		m := newMoved(t)
		testkit.Eventually(t, 20*time.Second, "a ping", func() error { return m.client.Ping(netip.MustParseAddr(f.server), testkit.Timeout(time.Second)) })
		from, to := table(t, m.a), table(t, m.b)
		var flows, copied []Flow
		float := []netip.Addr{netip.MustParseAddr(f.float)}
		testkit.Check(t, from.Translated(t.Context(), float, func(f Flow) { flows = append(flows, f) }))
		if len(flows) == 0 || flows[0].Translated.Port() == 0 || flows[0].Src.Addr().String() != f.client {
			t.Fatalf("flows %v", flows)
		}
		if n, err := to.Insert(t.Context(), flows); n != len(flows) || err != nil {
			t.Errorf("%d flows of %v are inserted, %v", n, flows, err)
		}
		testkit.Check(t, to.Translated(t.Context(), float, func(f Flow) { copied = append(copied, f) }))
		for _, all := range [][]Flow{flows, copied} {
			for i := range all {
				all[i].Timeout = 0
			}
			slices.SortFunc(all, func(a, b Flow) int { return strings.Compare(a.String(), b.String()) })
		}
		if !slices.Equal(flows, copied) {
			t.Errorf("copied are %v, want %v", copied, flows)
		}
	}
}

// A flow that is there is changed by what became of it elsewhere; one that isn't stays away.
func TestUpdate(t *testing.T) {
	for name, f := range map[string]family{"IPv4": ipv4, "IPv6": ipv6} {
		t.Run(name, func(t *testing.T) {
			m := newMoved(t)
			to := table(t, m.b)
			at := func(a string, port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), port) }
			tcp := Flow{Protocol: unix.IPPROTO_TCP, Src: at(f.client, 1), Dst: at(f.server, 443), Translated: at(f.float, 7), Timeout: 1000, TCP: TCP{State: 3}}
			udp := Flow{Protocol: unix.IPPROTO_UDP, Src: at(f.client, 1), Dst: at(f.server, 53), Translated: at(f.float, 7), Timeout: 1000}
			other := tcp
			other.Src = at(f.client, 2)
			if n, err := to.Insert(t.Context(), []Flow{tcp, udp}); n != 2 || err != nil {
				t.Fatalf("%d flows are inserted, %v", n, err)
			}
			tcp.TCP.State, tcp.Timeout, udp.Timeout = 7, 100, 50
			if n, err := to.Update(t.Context(), []Flow{other, tcp, udp}); n != 2 || err != nil {
				t.Errorf("%d flows are changed, %v, want 2", n, err)
			}
			var have []string
			testkit.Check(t, to.Translated(t.Context(), []netip.Addr{netip.MustParseAddr(f.float)}, func(f Flow) {
				have = append(have, fmt.Sprintf("%s state %d %t", f, f.TCP.State, f.Timeout <= 100))
			}))
			slices.Sort(have)
			want := []string{fmt.Sprintf("%s state 7 true", tcp), fmt.Sprintf("%s state 0 true", udp)}
			if !slices.Equal(have, want) {
				t.Errorf("flows %q, want %q", have, want)
			}
		})
	}
}

// Flows that can't be are refused as a whole.
func TestInsertRefuses(t *testing.T) {
	c := table(t, netnstest.New(t))
	good := Flow{Protocol: unix.IPPROTO_UDP, Src: netip.MustParseAddrPort("10.0.0.9:1"), Dst: netip.MustParseAddrPort("192.0.2.1:53"),
		Translated: netip.MustParseAddrPort("192.0.2.200:1"), Timeout: 60}
	for name, spoil := range map[string]func(*Flow){
		"mixed families":  func(f *Flow) { f.Translated = netip.MustParseAddrPort("[2001:db8::200]:1") },
		"no source":       func(f *Flow) { f.Src = netip.AddrPort{} },
		"a mapped source": func(f *Flow) { f.Src = netip.MustParseAddrPort("[::ffff:10.0.0.9]:1") },
		"another echo":    func(f *Flow) { f.Protocol = unix.IPPROTO_ICMPV6 },
		"SCTP":            func(f *Flow) { f.Protocol = unix.IPPROTO_SCTP },
	} {
		bad := good
		spoil(&bad)
		if n, err := c.Insert(t.Context(), []Flow{good, bad}); n != 0 || err == nil {
			t.Errorf("%s: %d inserted, %v", name, n, err)
		}
	}
	if n, err := c.Insert(t.Context(), []Flow{good}); n != 1 || err != nil {
		t.Errorf("%d inserted, %v", n, err)
	}
}

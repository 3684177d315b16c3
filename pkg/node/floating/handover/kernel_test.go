package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// lab is a client that sends by two routers, one at a time, to a server that knows it by the world's address. The routers have the
// rules of an Egress's; in place of tunnels there are links.
type lab struct {
	*world
	client, server, ra, rb *netnstest.NS
}

// at is the router of a node.
func (l *lab) at(node string) *netnstest.NS {
	return map[string]*netnstest.NS{"a": l.ra, "b": l.rb}[node]
}

func newLab(t *testing.T) *lab {
	l := &lab{newWorld(t), netnstest.New(t), netnstest.New(t), netnstest.New(t), netnstest.New(t)}
	l.server.Configure(t, netlab.AddBridge("br0", netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8:1::1/64"))...)
	l.client.Configure(t, "link add br0 type bridge mcast_snooping 0", "link set br0 address 02:00:00:00:00:09 up", "addr add 10.0.0.9/24 dev br0", "addr add fd00::9/64 dev br0 nodad",
		"neigh add fd00::2 lladdr 02:00:00:00:00:02 dev br0", "neigh add fd00::3 lladdr 02:00:00:00:00:03 dev br0")
	for i, r := range []*netnstest.NS{l.ra, l.rb} {
		n := fmt.Sprint(i + 2)
		l.server.Configure(t, "link add r"+n+" type veth peer name out netns "+r.Path, "link set r"+n+" master br0 up")
		l.client.Configure(t, "link add r"+n+" type veth peer name in netns "+r.Path, "link set r"+n+" master br0 up")
		// Rules of routers let nothing in from clients by which these could be found.
		r.Configure(t, "link set in address 02:00:00:00:00:0"+n+" up", "link set out up", "neigh add fd00::9 lladdr 02:00:00:00:00:09 dev in",
			"addr add 10.0.0."+n+"/24 dev in", "addr add fd00::"+n+"/64 dev in nodad",
			"addr add 192.0.2."+n+"/24 dev out", "addr add 2001:db8:1::"+n+"/64 dev out nodad")
		testkit.Check(t, r.Lab().Forward(), l.rules(r, i+2, true),
			// A packet in the middle of a connection makes no flow. The second is as coild sets it in routers.
			r.Lab().Sysctl("netfilter/nf_conntrack_tcp_loose=0", "netfilter/nf_conntrack_tcp_be_liberal=1"))
	}
	for _, ns := range []*netnstest.NS{l.client, l.server} {
		for _, rule := range [][]string{
			{"add", "table", "inet", "t"}, {"add", "counter", "inet", "t", "resets"}, {"add", "counter", "inet", "t", "others"},
			{"add", "chain", "inet", "t", "in", "{ type filter hook input priority 0; }"}, {"add", "chain", "inet", "t", "out", "{ type filter hook output priority 0; }"},
			{"add", "rule", "inet", "t", "in", "tcp flags rst counter name resets"}, {"add", "rule", "inet", "t", "out", "tcp flags rst counter name resets"},
			{"add", "rule", "inet", "t", "in", "tcp dport 7-9 ip saddr != 198.51.100.7 counter name others"},
			{"add", "rule", "inet", "t", "in", "tcp dport 7-9 ip6 saddr != 2001:db8::7 counter name others"},
		} {
			testkit.Must(ns.Run("nft", rule...))(t)
		}
	}
	for _, n := range []*fakeNode{l.a, l.b} {
		node := n.cfg.Node
		n.set(func() {
			n.cfg.Open = func(context.Context, types.UID) (Flows, error) { return conntrack.New(l.at(node).NS) }
			n.limits = defaults
		})
	}
	for _, router := range []int{3, 2} {
		l.placeAt(router)
		l.clientTo(router)
		for _, to := range []string{"192.0.2.1", "2001:db8:1::1"} {
			testkit.Eventually(t, 20*time.Second, "the server answers", func() error {
				return l.client.Ping(netip.MustParseAddr(to), testkit.Timeout(time.Second))
			})
		}
	}
	return l
}

// rules are those of a router of an Egress, whose address ends in n, and that has the floating address or may have it.
func (l *lab) rules(r *netnstest.NS, n int, has bool) error {
	index := func(link string) int {
		i, err := netIndex(r, link)
		testkit.Check(l.t, err)
		return i
	}
	client4, client6 := netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::9")
	a := l.address("p-0", "a")
	g := ruleset.Gateway{
		Uplink: index("out"), MTU: 1500, Port: dataplane.FouPort,
		Addresses:    []netip.Addr{netip.MustParseAddr(fmt.Sprintf("192.0.2.%d", n)), netip.MustParseAddr(fmt.Sprintf("2001:db8:1::%d", n))},
		Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8:1::/64")},
		Clients:      []ruleset.GatewayClient{{Addr: client4, Link: index("in")}, {Addr: client6, Link: index("in")}},
		Floating: &ruleset.GatewayFloating{
			Addresses: a.Addrs(), Sources: []ruleset.GatewaySource{{Client: client4, Address: a.IPv4}, {Client: client6, Address: a.IPv6}},
		},
	}
	if !has {
		g.Floating.Sources = nil
	}
	table, err := nft.New(r.NS, dataplane.NftTable)
	if err != nil {
		return err
	}
	defer table.Close()
	_, err = table.Sync(l.t.Context(), g.Ruleset())
	return err
}

func netIndex(ns *netnstest.NS, link string) (int, error) {
	out, err := ns.Run("ip", "-o", "link", "show", "dev", link)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(regexp.MustCompile(`^\d+`).FindString(out))
}

// placeAt makes a router the one that has the address, and clientTo the one to which the client sends.
func (l *lab) placeAt(n int) {
	l.t.Helper()
	l.server.Configure(l.t, fmt.Sprintf("route replace 198.51.100.7 via 192.0.2.%d", n), fmt.Sprintf("-6 route replace 2001:db8::7 via 2001:db8:1::%d", n))
}

func (l *lab) clientTo(n int) {
	l.t.Helper()
	l.client.Configure(l.t, fmt.Sprintf("route replace 192.0.2.0/24 via 10.0.0.%d", n), fmt.Sprintf("-6 route replace 2001:db8:1::/64 via fd00::%d", n))
}

// counter is what the client or the server has counted of packets.
func (l *lab) counter(ns *netnstest.NS, name string) string {
	l.t.Helper()
	out := testkit.Must(ns.Run("nft", "list", "counter", "inet", "t", name))(l.t)
	return regexp.MustCompile(`packets \d+`).FindString(out)
}

// living are connections that the server, or the client, writes to again and again.
type living struct {
	ends chan error
	mu   sync.Mutex
	// got counts what the client of each connection has read. writers are the ends that write.
	got     []*atomic.Int64
	writers []net.Conn
	all     []net.Conn
}

func (v *living) add(c net.Conn, writes bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.all = append(v.all, c)
	if writes {
		v.writers = append(v.writers, c)
	}
}

// opens opens n connections of each family to a port of the server. Half of them the server alone writes to, in the others the client asks.
func (l *lab) opens(n, port int) *living {
	l.t.Helper()
	v := &living{ends: make(chan error, 4*n)}
	for _, host := range []string{"192.0.2.1", "2001:db8:1::1"} {
		at := net.JoinHostPort(host, strconv.Itoa(port))
		listener := testkit.Must(l.server.Lab().Listen(l.t.Context(), "tcp", at))(l.t)
		l.t.Cleanup(func() { _ = listener.Close() })
		go netlab.Serve(listener, func(c net.Conn) {
			b := make([]byte, 1)
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			v.add(c, b[0] == 'p')
			for {
				if _, err := c.Write(b); err != nil {
					v.ends <- fmt.Errorf("the server's end: %w", err)
					return
				}
				if _, err := io.ReadFull(c, b); err != nil {
					v.ends <- fmt.Errorf("the server's end: %w", err)
					return
				}
			}
		})
		testkit.Check(l.t, l.client.NS.Do(func() error {
			for i := range n {
				// The first packets wait until neighbours are found.
				c, err := (&net.Dialer{Timeout: testkit.Timeout(10 * time.Second)}).Dial("tcp", at)
				if err != nil {
					return err
				}
				got := &atomic.Int64{}
				v.got = append(v.got, got)
				v.add(c, i%2 == 1)
				if _, err := c.Write([]byte{"pa"[i%2]}); err != nil {
					return err
				}
				go func() {
					b := make([]byte, 64)
					for {
						n, err := c.Read(b)
						got.Add(int64(n))
						if err != nil {
							v.ends <- fmt.Errorf("the client's end: %w", err)
							return
						}
					}
				}()
			}
			return nil
		}))
	}
	l.t.Cleanup(v.close)
	return v
}

// close closes the connections.
func (v *living) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, c := range v.all {
		_ = c.Close()
	}
}

// write writes a byte by each connection, from the end that writes.
func (v *living) write() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	var errs []error
	for _, c := range v.writers {
		_, err := c.Write([]byte{1})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// lives waits until all connections have passed something that is written from now on.
func (l *lab) lives(v *living, what string) {
	l.t.Helper()
	began := time.Now()
	before := make([]int64, len(v.got))
	for i, got := range v.got {
		before[i] = got.Load()
	}
	testkit.Check(l.t, v.write())
	testkit.Eventually(l.t, 30*time.Second, "all connections pass something "+what, func() error {
		silent := 0
		for i, got := range v.got {
			if got.Load() == before[i] {
				silent++
			}
		}
		if silent > 0 {
			return fmt.Errorf("%d of %d don't", silent, len(v.got))
		}
		return nil
	})
	l.t.Logf("%s: all have passed something after %s", what, time.Since(began))
}

// Thousands of connections go on while their address moves, first the place and then the client: none is reset, and none has another source.
func TestConnectionsLiveOn(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	v := l.opens(2500, 7)
	l.lives(v, "at the first router")
	a := l.address("p-0", "a")

	moved, move := context.WithCancel(t.Context())
	began := time.Now()
	l.a.Move(moved, a, "b")
	t.Logf("%d connections were copied in %s", len(v.got), time.Since(began))
	l.placeAt(3)
	l.change("p-0", func(f *v2.Floating) { f.Holding.Holder, f.Holding.PodUID, f.MovingTo = "b", "pod of b", "" })
	move()
	l.lives(v, "while the client sends to the first router, and the second one has the address")
	l.clientTo(3)
	l.lives(v, "at the second router")
	l.lives(v, "later")
	select {
	case err := <-v.ends:
		t.Error(err)
	default:
	}
	for name, ns := range map[string]*netnstest.NS{"client": l.client, "server": l.server} {
		for _, counter := range []string{"resets", "others"} {
			if got := l.counter(ns, counter); got != "packets 0" {
				t.Errorf("the %s has seen %s: %s", name, counter, got)
			}
		}
	}
	l.a.counted(t, sent, "done", 1)
	l.b.counted(t, received, "done", 1)
}

// Connections that aren't copied end, by a reset of nobody but their own ends, and have no other source.
func TestConnectionsThatAreNotCopied(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	v := l.opens(20, 7)
	l.lives(v, "at the first router")
	l.a.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, errors.New("no way") }
	l.a.Move(t.Context(), l.address("p-0", "a"), "b")
	l.a.counted(t, sent, "failed", 1)
	l.placeAt(3)
	l.clientTo(3)
	testkit.Check(t, v.write())
	// New ones are opened as ever: what came before them has arrived, or was dropped.
	c := testkit.Must(l.client.Lab().Dial(t.Context(), "tcp", "192.0.2.1:7"))(t)
	defer c.Close()
	testkit.Must(c.Write([]byte{'a'}))(t)
	testkit.Must(io.ReadFull(c, make([]byte, 1)))(t)
	if got := l.counter(l.server, "others"); got != "packets 0" {
		t.Errorf("the server has seen other sources: %s", got)
	}
}

// The time that an address waits for 50,000 connections.
func TestManyConnections(t *testing.T) {
	testkit.Need(t, testkit.Netns)
	l := newLab(t)
	a := l.address("p-0", "a")
	const n = 50000
	var flows []conntrack.Flow
	for i := range n {
		f := flow(a, i)
		f.Protocol, f.TCP, f.Timeout = unix.IPPROTO_UDP, conntrack.TCP{}, 3600
		flows = append(flows, f)
	}
	ta, tb := testkit.Must(conntrack.New(l.ra.NS))(t), testkit.Must(conntrack.New(l.rb.NS))(t)
	t.Cleanup(ta.Close)
	t.Cleanup(tb.Close)
	if got, err := ta.Insert(t.Context(), flows); got != n || err != nil {
		t.Fatalf("%d are inserted, %v", got, err)
	}
	began := time.Now()
	l.a.Move(t.Context(), a, "b")
	took := time.Since(began)
	t.Logf("%d connections are copied in %s", n, took)
	count := 0
	testkit.Check(t, tb.Translated(t.Context(), a.Addrs(), func(f conntrack.Flow) {
		if f.Protocol == unix.IPPROTO_UDP { // and no ping
			count++
		}
	}))
	if count != n {
		t.Errorf("%d connections are copied, want %d", count, n)
	}
}

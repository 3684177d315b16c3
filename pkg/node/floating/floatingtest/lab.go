package floatingtest

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
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Lab is a client that sends by two routers, one at a time, to a server that knows it by the world's address. The routers have the
// rules of an Egress's; in place of tunnels there are links.
type Lab struct {
	*World
	Client, Server, RA, RB *netnstest.NS
}

// At is the router of a node.
func (l *Lab) At(node string) *netnstest.NS {
	return map[string]*netnstest.NS{"a": l.RA, "b": l.RB}[node]
}

// NewLab makes the nodes of a world use tables of the kernel.
func NewLab(w *World) *Lab {
	t := w.T
	l := &Lab{w, netnstest.New(t), netnstest.New(t), netnstest.New(t), netnstest.New(t)}
	l.Server.Configure(t, netlab.AddBridge("br0", netip.MustParsePrefix("192.0.2.1/24"), netip.MustParsePrefix("2001:db8:1::1/64"))...)
	l.Client.Configure(t, "link add br0 type bridge mcast_snooping 0", "link set br0 address 02:00:00:00:00:09 up", "addr add 10.0.0.9/24 dev br0", "addr add fd00::9/64 dev br0 nodad",
		"neigh add fd00::2 lladdr 02:00:00:00:00:02 dev br0", "neigh add fd00::3 lladdr 02:00:00:00:00:03 dev br0")
	for i, r := range []*netnstest.NS{l.RA, l.RB} {
		n := fmt.Sprint(i + 2)
		l.Server.Configure(t, "link add r"+n+" type veth peer name out netns "+r.Path, "link set r"+n+" master br0 up")
		l.Client.Configure(t, "link add r"+n+" type veth peer name in netns "+r.Path, "link set r"+n+" master br0 up")
		// Rules of routers let nothing in from clients by which these could be found.
		r.Configure(t, "link set in address 02:00:00:00:00:0"+n+" up", "link set out up", "neigh add fd00::9 lladdr 02:00:00:00:00:09 dev in",
			"addr add 10.0.0."+n+"/24 dev in", "addr add fd00::"+n+"/64 dev in nodad",
			"addr add 192.0.2."+n+"/24 dev out", "addr add 2001:db8:1::"+n+"/64 dev out nodad")
		testkit.Check(t, r.Lab().Forward(), l.Rules(r, i+2, true),
			// A packet in the middle of a connection makes no flow. The second is as coild sets it in routers.
			r.Lab().Sysctl("netfilter/nf_conntrack_tcp_loose=0", "netfilter/nf_conntrack_tcp_be_liberal=1"))
	}
	// Connections of the port 9 are closed on purpose: with a word that nobody has read that makes a reset.
	for _, ns := range []*netnstest.NS{l.Client, l.Server} {
		for _, rule := range [][]string{
			{"add", "table", "inet", "t"}, {"add", "counter", "inet", "t", "resets"}, {"add", "counter", "inet", "t", "others"}, {"add", "set", "inet", "t", "ended", "{ type inet_service . inet_service . tcp_flag; flags dynamic; }"},
			{"add", "chain", "inet", "t", "in", "{ type filter hook input priority 0; }"}, {"add", "chain", "inet", "t", "out", "{ type filter hook output priority 0; }"},
			{"add", "rule", "inet", "t", "in", "tcp flags rst add @ended { tcp sport . tcp dport . tcp flags }"}, {"add", "rule", "inet", "t", "out", "tcp flags rst add @ended { tcp sport . tcp dport . tcp flags }"},
			{"add", "rule", "inet", "t", "in", "tcp dport 7-9 ip saddr != 198.51.100.7 counter name others"},
			{"add", "rule", "inet", "t", "in", "tcp dport 7-9 ip6 saddr != 2001:db8::7 counter name others"},
			// nft(8) makes one comparison of "tcp sport != 9 tcp dport != 9", which is true unless both are.
			{"add", "chain", "inet", "t", "count"}, {"add", "rule", "inet", "t", "in", "tcp flags rst jump count"}, {"add", "rule", "inet", "t", "out", "tcp flags rst jump count"},
			{"add", "rule", "inet", "t", "count", "tcp sport 9 return"}, {"add", "rule", "inet", "t", "count", "tcp dport 9 return"}, {"add", "rule", "inet", "t", "count", "counter name resets"},
		} {
			testkit.Must(ns.Run("nft", rule...))(t)
		}
	}
	for _, n := range []*Node{l.A, l.B} {
		n.OpenBy(func(context.Context, types.UID) (tables.Table, error) { return conntrack.New(l.At(n.Name).NS) })
	}
	for _, router := range []int{3, 2} {
		l.PlaceAt(router)
		l.ClientTo(router)
		for _, to := range []string{"192.0.2.1", "2001:db8:1::1"} {
			testkit.Eventually(t, 20*time.Second, "the server answers", func() error {
				return l.Client.Ping(netip.MustParseAddr(to), testkit.Timeout(time.Second))
			})
		}
	}
	return l
}

// Rules are those of a router of an Egress, whose address ends in n, and that has the floating address or may have it.
func (l *Lab) Rules(r *netnstest.NS, n int, has bool) error {
	index := func(link string) int {
		i, err := netIndex(r, link)
		testkit.Check(l.T, err)
		return i
	}
	client4, client6 := netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("fd00::9")
	a := l.Address("p-0", "a")
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
	_, err = table.Sync(l.T.Context(), g.Ruleset())
	return err
}

func netIndex(ns *netnstest.NS, link string) (int, error) {
	out, err := ns.Run("ip", "-o", "link", "show", "dev", link)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(regexp.MustCompile(`^\d+`).FindString(out))
}

// PlaceAt makes a router the one that has the address.
func (l *Lab) PlaceAt(n int) {
	l.T.Helper()
	l.Server.Configure(l.T, fmt.Sprintf("route replace 198.51.100.7 via 192.0.2.%d", n), fmt.Sprintf("-6 route replace 2001:db8::7 via 2001:db8:1::%d", n))
}

// ClientTo makes a router the one to which the client sends.
func (l *Lab) ClientTo(n int) {
	l.T.Helper()
	l.Client.Configure(l.T, fmt.Sprintf("route replace 192.0.2.0/24 via 10.0.0.%d", n), fmt.Sprintf("-6 route replace 2001:db8:1::/64 via fd00::%d", n))
}

// Counter is what the client or the server has counted of packets.
func (l *Lab) Counter(ns *netnstest.NS, name string) string {
	l.T.Helper()
	out := testkit.Must(ns.Run("nft", "list", "counter", "inet", "t", name))(l.T)
	return regexp.MustCompile(`packets \d+`).FindString(out)
}

// Living are connections that the server, or the client, writes to again and again.
type Living struct {
	// Ends are the errors of those that have ended.
	Ends chan error
	mu   sync.Mutex
	// got counts what the client of each connection has read. writers are the ends that write.
	got     []*atomic.Int64
	writers []net.Conn
	all     []net.Conn
}

func (v *Living) add(c net.Conn, writes bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.all = append(v.all, c)
	if writes {
		v.writers = append(v.writers, c)
	}
}

// Opens opens n connections of each family to a port of the server. Half of them the server alone writes to, in the others the client asks.
func (l *Lab) Opens(n, port int) *Living {
	l.T.Helper()
	v := &Living{Ends: make(chan error, 4*n)}
	for _, host := range []string{"192.0.2.1", "2001:db8:1::1"} {
		at := net.JoinHostPort(host, strconv.Itoa(port))
		listener := testkit.Must(l.Server.Lab().Listen(l.T.Context(), "tcp", at))(l.T)
		l.T.Cleanup(func() { _ = listener.Close() })
		go netlab.Serve(listener, func(c net.Conn) {
			b := make([]byte, 1)
			if _, err := io.ReadFull(c, b); err != nil {
				return
			}
			v.add(c, b[0] == 'p')
			for {
				if _, err := c.Write(b); err != nil {
					v.Ends <- fmt.Errorf("the server's end: %w", err)
					return
				}
				if _, err := io.ReadFull(c, b); err != nil {
					v.Ends <- fmt.Errorf("the server's end: %w", err)
					return
				}
			}
		})
		testkit.Check(l.T, l.Client.NS.Do(func() error {
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
							v.Ends <- fmt.Errorf("the client's end: %w", err)
							return
						}
					}
				}()
			}
			return nil
		}))
	}
	l.T.Cleanup(v.Close)
	return v
}

// Close closes the connections.
func (v *Living) Close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, c := range v.all {
		_ = c.Close()
	}
}

// Write writes a byte by each connection, from the end that writes.
func (v *Living) Write() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	var errs []error
	for _, c := range v.writers {
		_, err := c.Write([]byte{1})
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Lives waits until all connections have passed something that is written from now on.
func (l *Lab) Lives(v *Living, what string) {
	l.T.Helper()
	began := time.Now()
	before := make([]int64, len(v.got))
	for i, got := range v.got {
		before[i] = got.Load()
	}
	testkit.Check(l.T, v.Write())
	testkit.Eventually(l.T, 30*time.Second, "all connections pass something "+what, func() error {
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
	l.T.Logf("%s: all have passed something after %s", what, time.Since(began))
}

// Len is how many they are.
func (v *Living) Len() int { return len(v.got) }

// Quiet says that none has ended, and that neither end has seen a reset or another source.
func (l *Lab) Quiet(all ...*Living) {
	l.T.Helper()
	for _, v := range all {
		select {
		case err := <-v.Ends:
			l.T.Error(err)
		default:
		}
	}
	for name, ns := range map[string]*netnstest.NS{"client": l.Client, "server": l.Server} {
		for _, counter := range []string{"resets", "others"} {
			if got := l.Counter(ns, counter); got != "packets 0" {
				ports, _ := ns.Run("nft", "list", "set", "inet", "t", "ended")
				l.T.Errorf("the %s has seen %s: %s; ports of all resets: %s", name, counter, got, ports)
			}
		}
	}
}

package nft_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// timeout is for what arrives, silence for what must not.
var (
	timeout = testkit.Timeout(3 * time.Second)
	silence = testkit.Timeout(300 * time.Millisecond)
)

// lab is a router between a server and two clients, whose tunnels are veths here: nftables
// sees what comes out of a tunnel.
type lab struct {
	t              *testing.T
	router, server *netnstest.NS
	clients        []*netnstest.NS
	rules          ruleset.Gateway
	table[ruleset.Gateway]
}

// addr is an address in IPv4 or IPv6.
func addr(f dataplane.Family, net, host int) netip.Addr {
	if f == dataplane.IPv4 {
		return netip.AddrFrom4([4]byte{10, byte(net), 0, byte(host)})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd00:%d::%d", net, host))
}

var families = []dataplane.Family{dataplane.IPv4, dataplane.IPv6}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t, router: netnstest.New(t), server: netnstest.New(t)}
	for _, key := range []string{"ipv4.ip_forward", "ipv6.conf.all.forwarding"} {
		l.run(l.router, "sysctl", "-qw", "net."+key+"=1")
	}
	for _, n := range []*netnstest.NS{l.router, l.server} {
		// Neighbour discovery for a packet from an address of lo is sent from the link-local address,
		// and not at all while that one is checked for duplicates, for up to two seconds.
		l.run(n, "sysctl", "-qw", "net.ipv6.conf.default.accept_dad=0")
	}
	path := func(n *netnstest.NS) string { return n.Path }
	l.router.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", path(l.server))
	l.rules = ruleset.Gateway{Uplink: l.index(l.router, "eth0"), MTU: 1500, Port: 5555}
	for _, f := range families {
		l.address(l.router, "eth0", addr(f, 9, 1), 24)
		l.address(l.server, "eth0", addr(f, 9, 2), 24)
		// Elsewhere is behind the server, too, and the server knows the way to clients.
		l.address(l.server, "lo", addr(f, 8, 1), 32)
		l.rules.Addresses = append(l.rules.Addresses, addr(f, 9, 1))
		l.rules.Destinations = append(l.rules.Destinations, netip.PrefixFrom(addr(f, 9, 0), map[dataplane.Family]int{4: 24, 6: 64}[f]).Masked())
	}
	for _, n := range []*netnstest.NS{l.router, l.server} {
		n.IP(t, "link", "set", "lo", "up")
		n.IP(t, "link", "set", "eth0", "up")
	}
	for _, f := range families {
		l.server.IP(t, "route", "add", netip.PrefixFrom(addr(f, 1, 0), 16).Masked().String(), "via", addr(f, 9, 1).String())
		l.router.IP(t, "route", "add", addr(f, 8, 1).String(), "via", addr(f, 9, 2).String())
	}
	for i := range 2 {
		l.addClient(i + 1)
	}
	for _, n := range []*netnstest.NS{l.router, l.server} {
		// The kernel makes the address when it notices that the other side is up, at most once a second.
		testkit.Eventually(t, 10*time.Second, "eth0 has a link-local address", func() (err error) {
			if out := n.IP(t, "-6", "address", "show", "dev", "eth0", "scope", "link"); !strings.Contains(out, "fe80::") {
				err = fmt.Errorf("it has %q", out)
			}
			return err
		})
	}
	l.table = gatewayTable(t, l.router.NS)
	t.Cleanup(l.Close)
	return l
}

// addClient connects a client whose gateway is known to it, and it to the router: out of a
// tunnel comes no neighbour discovery.
func (l *lab) addClient(i int) {
	t := l.t
	c := netnstest.New(t)
	name, inside, outside := fmt.Sprintf("fou4_%d", i), fmt.Sprintf("02:00:00:00:01:%02x", i), fmt.Sprintf("02:00:00:00:02:%02x", i)
	l.router.IP(t, "link", "add", name, "address", outside, "type", "veth", "peer", "name", "eth0", "address", inside, "netns", c.Path)
	l.router.IP(t, "link", "set", name, "up")
	c.IP(t, "link", "set", "eth0", "up")
	c.IP(t, "link", "set", "lo", "up")
	for _, f := range families {
		gateway := map[dataplane.Family]string{4: "169.254.1.1", 6: "fe80::1"}[f]
		l.address(c, "eth0", addr(f, 1, i), 32)
		l.router.IP(t, "route", "add", addr(f, 1, i).String(), "dev", name)
		l.router.IP(t, "neigh", "add", addr(f, 1, i).String(), "lladdr", inside, "dev", name)
		c.IP(t, "neigh", "add", gateway, "lladdr", outside, "dev", "eth0")
		c.IP(t, "route", "add", "default", "via", gateway, "dev", "eth0", "onlink")
		l.rules.Clients = append(l.rules.Clients, ruleset.GatewayClient{Addr: addr(f, 1, i), Link: l.index(l.router, name)})
	}
	l.clients = append(l.clients, c)
}

// address gives a link an address; bits of 32 are a single one in both families.
func (l *lab) address(n *netnstest.NS, link string, a netip.Addr, bits int) {
	l.t.Helper()
	args := []string{"address", "add", "", "dev", link}
	switch {
	case a.Is4():
		args[2] = fmt.Sprintf("%s/%d", a, bits)
	case bits == 32:
		args = append(args, "nodad")
		args[2] = a.String() + "/128"
	default:
		args = append(args, "nodad")
		args[2] = a.String() + "/64"
	}
	n.IP(l.t, args...)
}

func (l *lab) index(n *netnstest.NS, link string) int {
	l.t.Helper()
	var i *net.Interface
	testkit.Check(l.t, n.Do(func() (err error) {
		i, err = net.InterfaceByName(link)
		return err
	}))
	return i.Index
}

func (l *lab) run(n *netnstest.NS, name string, args ...string) string {
	l.t.Helper()
	return testkit.Must(n.Run(name, args...))(l.t)
}

func (l *lab) sync(want dataplane.Result) {
	l.t.Helper()
	if got := testkit.Must(l.Sync(l.t.Context(), l.rules))(l.t); got != want {
		l.t.Fatalf("Sync did %+v, want %+v", got, want)
	}
}

// count is the packets that a counter has.
func (l *lab) count(name string, f dataplane.Family) uint64 {
	l.t.Helper()
	for _, c := range testkit.Must(l.Counters(l.t.Context()))(l.t) {
		if c.Name == f.Named(name) {
			return c.Packets
		}
	}
	l.t.Fatalf("no counter %s of %s", name, f)
	return 0
}

// ruleset is the whole ruleset of the router, without what counters have counted. Its objects are in order:
// one that is made again is the last in the kernel.
func (l *lab) ruleset() string {
	objects := strings.Split(l.run(l.router, "nft", "--stateless", "list", "ruleset"), "\n\t}\n")
	for i, o := range objects {
		objects[i] = strings.Trim(o, "\n")
	}
	slices.Sort(objects)
	return strings.Join(objects, "\n\t}\n")
}

func TestGateway(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	for _, f := range families {
		server, client := addr(f, 9, 2), l.clients[0]
		for _, c := range []struct {
			name    string
			try     func() error
			counter string
		}{
			{"a client sends as another", func() error {
				l.address(client, "eth0", addr(f, 1, 2), 32)
				defer client.IP(t, "address", "del", addr(f, 1, 2).String(), "dev", "eth0")
				_, err := client.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", addr(f, 1, 2).String(), server.String())
				return err
			}, ruleset.ForgedSource},
			{"a client sends as nobody", func() error {
				l.address(client, "eth0", addr(f, 7, 7), 32)
				defer client.IP(t, "address", "del", addr(f, 7, 7).String(), "dev", "eth0")
				_, err := client.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", addr(f, 7, 7).String(), server.String())
				return err
			}, ruleset.ForgedSource},
			{"a client sends elsewhere", func() error { return client.Ping(addr(f, 8, 1), silence) }, ruleset.NotADestination},
			{"the server opens a connection to a client", func() error { return l.server.Ping(addr(f, 1, 1), silence) }, ruleset.Unsolicited},
			{"the router sends by an address that isn't its own", func() error {
				l.address(l.router, "lo", addr(f, 6, 6), 32)
				_, err := l.router.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", addr(f, 6, 6).String(), server.String())
				return err
			}, ruleset.ForeignSource},
			{"the server sends FoU", func() error {
				l.run(l.server, "bash", "-c", fmt.Sprintf("echo forged > /dev/udp/%s/5555", addr(f, 9, 1)))
				return errors.New("nobody answers UDP")
			}, ruleset.NonClient},
			{"the server sends the router a datagram", func() error {
				tracked := func() string { return l.run(l.router, "cat", "/proc/sys/net/netfilter/nf_conntrack_count") }
				before := tracked()
				l.run(l.server, "bash", "-c", fmt.Sprintf("echo forged > /dev/udp/%s/30000", addr(f, 9, 1)))
				testkit.Eventually(t, timeout, "the datagram is counted", func() error {
					if l.count(ruleset.Unsolicited, f) == 0 {
						return errors.New("not yet")
					}
					return nil
				})
				if now := tracked(); now != before {
					t.Errorf("%s connections are tracked, %s before: a client can't have the port", now, before)
				}
				return errors.New("nobody answers")
			}, ruleset.Unsolicited},
		} {
			t.Run(fmt.Sprint(f, " ", c.name), func(t *testing.T) {
				before := l.count(c.counter, f)
				if err := c.try(); err == nil {
					t.Error("it went through")
				}
				if l.count(c.counter, f) == before {
					t.Errorf("%s wasn't counted", c.counter)
				}
			})
		}
		t.Run(fmt.Sprint(f, " masqueraded"), func(t *testing.T) {
			before := l.count(ruleset.Masqueraded, f)
			if got := testkit.Must(client.SourceOf(l.server, server, timeout))(t); got != addr(f, 9, 1) {
				t.Errorf("the server sees %s, want %s", got, addr(f, 9, 1))
			}
			if l.count(ruleset.Masqueraded, f) == before {
				t.Error("it wasn't counted")
			}
		})
		t.Run(fmt.Sprint(f, " the router's own"), func(t *testing.T) {
			before := l.count(ruleset.Masqueraded, f)
			testkit.Check(t, l.router.Ping(server, timeout), l.server.Ping(addr(f, 9, 1), timeout))
			if got := l.count(ruleset.Masqueraded, f); got != before {
				t.Errorf("%d packets of the router's own are counted as its clients'", got-before)
			}
		})
	}
}

func TestGatewaySync(t *testing.T) {
	l := newLab(t)
	l.run(l.router, "nft", "add table inet other; add chain inet other c { type filter hook forward priority 5; }; add rule inet other c counter")
	l.sync(dataplane.Result{Added: 1})
	want := l.ruleset()
	l.sync(dataplane.Result{})
	for _, damage := range []string{
		"delete table inet coil",
		"flush chain inet coil forward",
		"flush ruleset; add table inet other; add chain inet other c { type filter hook forward priority 5; }; add rule inet other c counter",
		"add chain inet coil mine",
		"add rule inet coil forward accept",
		"insert rule inet coil own accept",
		"add chain inet coil nat { policy drop; }",
		"add set inet coil mine { type ipv4_addr; }",
		"add counter inet coil mine",
		"delete element inet coil clients_ipv4 { 10.1.0.2 }",
		"add element inet coil peers_ipv4 { fou4_1 . 10.1.0.9 }",
		"flush set inet coil " + regexp.MustCompile("destinations_ipv6_[0-9a-f]+").FindString(want),
	} {
		t.Run(damage, func(t *testing.T) {
			testkit.Check(t, l.clients[0].Ping(addr(dataplane.IPv4, 9, 2), timeout))
			counted := l.count(ruleset.Masqueraded, dataplane.IPv4)
			l.run(l.router, "nft", damage)
			if got := testkit.Must(l.Sync(t.Context(), l.rules))(t); !got.Changed() {
				t.Error("nothing was done")
			}
			if got := l.ruleset(); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
			l.sync(dataplane.Result{})
			if got := l.count(ruleset.Masqueraded, dataplane.IPv4); got < counted && !strings.Contains(damage, "delete") && !strings.Contains(damage, "flush ruleset") {
				t.Errorf("%d packets are counted, %d were before", got, counted)
			}
		})
	}
}

func TestGatewayFollows(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	all := l.rules
	server := addr(dataplane.IPv4, 9, 2)

	l.rules.Clients = l.rules.Clients[2:]
	l.sync(dataplane.Result{Deleted: 4}) // an address and a pair, of two families
	if err := l.clients[0].Ping(server, silence); err == nil {
		t.Error("who isn't a client any more gets through")
	}
	testkit.Check(t, l.clients[1].Ping(server, timeout))
	l.rules.Clients = all.Clients
	l.sync(dataplane.Result{Added: 4})
	testkit.Check(t, l.clients[0].Ping(server, timeout))

	l.rules.Destinations = []netip.Prefix{
		netip.MustParsePrefix("10.8.0.0/16"), netip.MustParsePrefix("10.9.0.0/16"), netip.MustParsePrefix("10.9.0.0/24"),
		netip.MustParsePrefix("::/0"), netip.MustParsePrefix("fd00:9::/64"),
	}
	l.sync(dataplane.Result{Replaced: 1})
	l.sync(dataplane.Result{})
	testkit.Check(t, l.clients[0].Ping(server, timeout), l.clients[0].Ping(addr(dataplane.IPv4, 8, 1), timeout), l.clients[0].Ping(addr(dataplane.IPv6, 8, 1), timeout))
	l.rules.Destinations = nil
	l.sync(dataplane.Result{Replaced: 1})
	if err := l.clients[0].Ping(server, silence); err == nil {
		t.Error("there is no destination, and it gets through")
	}
}

// A change that others make to their tables costs a look at Coil's, and no more.
func TestGatewayBesideOthers(t *testing.T) {
	l := newLab(t)
	touched := func(want bool) {
		t.Helper()
		if got := testkit.Must(l.Touched(t.Context()))(t); got != want {
			t.Errorf("touched is %t", got)
		}
	}
	touched(true) // nothing is known
	l.sync(dataplane.Result{Added: 1})
	touched(false)
	for _, other := range []string{"add table inet other", "add chain inet other c", "delete table inet other"} {
		l.run(l.router, "nft", other)
		touched(true)
		l.sync(dataplane.Result{})
		touched(false)
		l.sync(dataplane.Result{})
	}
	l.run(l.router, "nft", "delete element inet coil clients_ipv4 { 10.1.0.2 }; add table inet other")
	l.sync(dataplane.Result{Added: 1})
}

// Probes of the node find an answer though no more connections can be tracked, because they
// aren't; whatever else is asked, and by whoever else, is.
func TestProbesAreNotTracked(t *testing.T) {
	l := newLab(t)
	l.rules.HealthPort = 8081
	for _, f := range families {
		l.rules.Probers = append(l.rules.Probers, addr(f, 9, 2))
	}
	l.sync(dataplane.Result{Added: 1})
	ask := func(to netip.AddrPort, from netip.Addr) (tracked bool) {
		t.Helper()
		var listener net.Listener
		testkit.Check(t, l.router.Do(func() (err error) {
			listener, err = net.Listen("tcp", to.String())
			return err
		}))
		defer listener.Close()
		before := l.run(l.router, "sysctl", "-n", "net.netfilter.nf_conntrack_count")
		testkit.Check(t, l.server.Do(func() error {
			dialer := net.Dialer{Timeout: timeout, LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
			conn, err := dialer.Dial("tcp", to.String())
			if err == nil {
				defer conn.Close()
			}
			return err
		}))
		return l.run(l.router, "sysctl", "-n", "net.netfilter.nf_conntrack_count") != before
	}
	for _, f := range families {
		own := addr(f, 9, 1)
		for _, c := range []struct {
			name    string
			to      netip.AddrPort
			from    netip.Addr
			tracked bool
		}{
			{"a probe", netip.AddrPortFrom(own, 8081), addr(f, 9, 2), false},
			{"another port", netip.AddrPortFrom(own, 8080), addr(f, 9, 2), true},
			{"from elsewhere", netip.AddrPortFrom(own, 8081), addr(f, 8, 1), true},
		} {
			if tracked := ask(c.to, c.from); tracked != c.tracked {
				t.Errorf("%s, %s: tracked is %t", f, c.name, tracked)
			}
		}
	}
}

// Clients may ask whether the router lives, whatever its destinations are, and nothing else.
func TestRouterAnswersClients(t *testing.T) {
	for name, destinations := range map[string][]string{
		"elsewhere": {"10.8.0.1/32", "fd00:8::1/128"}, "everything": {"0.0.0.0/0", "::/0"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			l.rules.Destinations = nil
			for _, d := range destinations {
				l.rules.Destinations = append(l.rules.Destinations, netip.MustParsePrefix(d))
			}
			l.sync(dataplane.Result{Added: 1})
			testAnswers(t, l)
		})
	}
}

// A table that is full refuses what isn't tracked yet, answers too.
func testAnswers(t *testing.T, l *lab) {
	l.run(l.router, "nft", `add table inet seen; add chain inet seen sends { type filter hook output priority filter; }
		add rule inet seen sends icmp type echo-reply ct state untracked counter
		add rule inet seen sends icmpv6 type echo-reply ct state untracked counter`)
	defer l.run(l.router, "nft", "delete table inet seen")
	for _, f := range families {
		own, client := addr(f, 9, 1), l.clients[0]
		before := l.run(l.router, "sysctl", "-n", "net.netfilter.nf_conntrack_count")
		testkit.Check(t, client.Ping(own, timeout))
		if after := l.run(l.router, "sysctl", "-n", "net.netfilter.nf_conntrack_count"); after != before {
			t.Errorf("%s: tracked are %s connections, not %s", f, after, before)
		}
		got := strings.Count(l.run(l.router, "nft", "list", "table", "inet", "seen"), "echo-reply ct state untracked counter packets 1 ")
		if want := 1 + slices.Index(families, f); got != want {
			t.Errorf("%s: the answers of %d families are not tracked, want %d", f, got, want)
		}
		l.address(client, "eth0", addr(f, 1, 2), 32)
		forged := l.count(ruleset.ForgedSource, f)
		if _, err := client.Run("busybox", "ping", "-c", "1", "-W", "1", "-I", addr(f, 1, 2).String(), own.String()); err == nil || l.count(ruleset.ForgedSource, f) == forged {
			t.Errorf("%s: a client asks as another: %v", f, err)
		}
		client.IP(t, "address", "del", addr(f, 1, 2).String(), "dev", "eth0")
		elsewhere := l.count(ruleset.NotADestination, f)
		l.run(client, "bash", "-c", fmt.Sprintf("echo x > /dev/udp/%s/9", own))
		if l.count(ruleset.NotADestination, f) != elsewhere+1 {
			t.Errorf("%s: a client reaches a port of the router", f)
		}
	}
}

// A client that doesn't know the MTU of its tunnel gets segments that fit it.
func TestSegmentsFit(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	for _, f := range families {
		server := addr(f, 9, 2)
		var listener net.Listener
		testkit.Check(t, l.server.Do(func() (err error) {
			listener, err = net.Listen("tcp", netip.AddrPortFrom(server, 0).String())
			return err
		}))
		defer listener.Close()
		testkit.Check(t, listener.(*net.TCPListener).SetDeadline(time.Now().Add(timeout)))
		accepted := make(chan int, 1)
		go func() {
			size := 0
			if conn, err := listener.Accept(); err == nil {
				raw, err := conn.(*net.TCPConn).SyscallConn()
				if err == nil {
					_ = raw.Control(func(fd uintptr) { size, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) })
				}
				conn.Close()
			}
			accepted <- size
		}()
		testkit.Check(t, l.clients[0].Do(func() error {
			conn, err := net.DialTimeout("tcp", listener.Addr().String(), timeout)
			if err == nil {
				conn.Close()
			}
			return err
		}))
		const timestamps = 12
		want := dataplane.TunnelMTU(f, 1500) - map[dataplane.Family]int{4: 40, 6: 60}[f] - timestamps
		if got := <-accepted; got != want {
			t.Errorf("%s: the server sends segments of %d bytes, want %d", f, got, want)
		}
	}
}

package masquerade

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// leaves requires that the clients of both routers reach the server, with the node's address.
func (l *lab) leaves(when string) {
	l.t.Helper()
	for n, c := range l.clients {
		for _, f := range families {
			got, err := l.talk(c, netip.AddrPort{}, f).answered()
			if err != nil || got != addr(f, 0, 1) {
				l.t.Errorf("%s: the client of router %d is seen as %s, %v, want %s", when, n, got, err, addr(f, 0, 1))
			}
		}
	}
}

// Clients of two routers leave by the node's address, in both families. What a router sends itself keeps its address: FoU, and all else.
func TestClientsLeaveByTheNodesAddress(t *testing.T) {
	l := newLab(t)
	k := l.start()
	for n, c := range l.clients {
		l.route()
		if got := l.transits(n); len(got) > 0 {
			t.Errorf("router %d has %v before the node is ready", n, got)
		}
		if err := c.Ping(addr(dataplane.IPv4, 0, 2), silence); err == nil {
			t.Errorf("a client of router %d reaches the server before the node is ready", n)
		}
	}
	l.sync(k, Result{Routers: 2})
	l.sync(k, Result{Routers: 2})
	l.route()
	l.leaves("at first")
	for _, f := range families {
		for _, c := range l.clients {
			testkit.Check(t, c.Ping(addr(f, 0, 2), timeout))
		}
	}
	l.none("what clients send")
	for n, r := range l.routers {
		for _, f := range families {
			own := addr(f, n+1, 2)
			for _, from := range []netip.AddrPort{{}, netip.AddrPortFrom(own, dataplane.FouPort)} {
				got, err := l.talk(r, from, f).ask(timeout)
				if err != nil || got != own {
					t.Errorf("the server sees router %d as %s, %v, want %s", n, got, err, own)
				}
			}
		}
	}
}

// The node may check by which link answers come (rp_filter), as most do.
func TestReversePath(t *testing.T) {
	l := newLab(t)
	l.sync(l.start(), Result{Routers: 2})
	l.route()
	for _, mode := range []int{1, 2} {
		testkit.Check(t, l.node.Lab().RPFilter(mode, "uplink", "r1", "r2"))
		l.leaves(fmt.Sprintf("with rp_filter %d", mode))
	}
	l.none("with rp_filter")
}

// Chains of others that translate sources come too late, and marks of others stay.
func TestChainsOfOthers(t *testing.T) {
	l := newLab(t)
	testkit.Must(l.node.Run("nft", `
add table inet others
add counter inet others marked
add chain inet others early { type filter hook prerouting priority mangle; }
add rule inet others early meta mark set 0x4000
add chain inet others forward { type filter hook forward priority 0; }
add rule inet others forward ip daddr 10.0.0.2 meta mark != 0x4000 counter name marked drop
add chain inet others postrouting { type nat hook postrouting priority 100; }
add rule inet others postrouting oifname uplink meta mark & 0x4000 == 0x4000 meta nfproto ipv4 snat ip to 10.0.0.77
add rule inet others postrouting oifname uplink meta mark & 0x4000 == 0x4000 meta nfproto ipv6 snat ip6 to 2001:db8:0::77
add rule inet others postrouting oifname uplink masquerade fully-random`))(t)
	l.sync(l.start(), Result{Routers: 2})
	l.route()
	l.leaves("with chains of others")
	l.none("with chains of others")
	out := testkit.Must(l.node.Run("nft", "list", "counter", "inet", "others", "marked"))(t)
	if !strings.Contains(out, "packets 0 ") {
		t.Errorf("others saw another mark: %s", out)
	}
}

// Errors find their client: of a packet that doesn't fit the node's way, and of one that nobody takes.
func TestErrorsReachClients(t *testing.T) {
	l := newLab(t)
	l.node.Configure(t, "link set uplink mtu 1400")
	l.server.Configure(t, "link set eth0 mtu 1400")
	l.sync(l.start(), Result{Routers: 2})
	l.route()
	for _, f := range families {
		k := l.talk(l.clients[1], netip.AddrPort{}, f)
		level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
		if f == dataplane.IPv6 {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
		}
		sc := testkit.Must(k.asks.(*net.UDPConn).SyscallConn())(t)
		testkit.Check(t, sc.Control(func(fd uintptr) { testkit.Check(t, unix.SetsockoptInt(int(fd), level, option, unix.IP_PMTUDISC_DO)) }))
		testkit.Eventually(t, timeout, fmt.Sprintf("%s: the client knows that 1440 bytes don't fit", f), func() error {
			if _, err := k.asks.Write(make([]byte, 1440)); !errors.Is(err, unix.EMSGSIZE) {
				return fmt.Errorf("write: %w", err)
			}
			return nil
		})
		k = l.talk(l.clients[0], netip.AddrPort{}, f)
		testkit.Check(t, k.hears.Close())
		testkit.Eventually(t, timeout, fmt.Sprintf("%s: the client knows that nobody listens", f), func() error {
			if _, err := k.asks.Write([]byte("question")); !errors.Is(err, unix.ECONNREFUSED) {
				return fmt.Errorf("write: %w", err)
			}
			return nil
		})
	}
	l.none("errors")
}

// Without one of the objects nothing leaves untranslated, new connections as little as those that are open. All come back, and open
// connections go on.
func TestClosedAndHealed(t *testing.T) {
	l := newLab(t)
	k := l.start()
	l.sync(k, Result{Routers: 2})
	l.route()
	open := map[dataplane.Family]talk{}
	for _, f := range families {
		open[f] = l.talk(l.clients[0], netip.AddrPort{}, f)
		testkit.Must(open[f].answered())(t)
	}
	for name, c := range map[string]struct {
		destroy  func()
		closed   bool
		repaired int
	}{
		"table":  {func() { testkit.Must(l.node.Run("nft", "flush", "ruleset"))(l.t) }, true, 1},
		"chains": {func() { testkit.Must(l.node.Run("nft", "flush", "table", "inet", dataplane.NftTableMasquerade))(l.t) }, true, 1},
		"nat": {func() {
			testkit.Must(l.node.Run("nft", "flush", "chain", "inet", dataplane.NftTableMasquerade, "nat"))(t)
		}, false, 1},
		"routes": {func() { l.node.Configure(l.t, "route flush table 116 proto 33", "-6 route flush table 116 proto 33") }, false, 4},
		"lo": {func() {
			l.routers[0].Configure(l.t, "addr flush dev lo scope link", "-6 addr flush dev lo scope global")
		}, false, 2},
	} {
		t.Run(name, func(t *testing.T) {
			l.t = t
			c.destroy()
			for _, f := range families {
				for what, k := range map[string]talk{"an open": open[f], "a new": l.talk(l.clients[0], netip.AddrPort{}, f)} {
					if got, err := k.ask(silence); err == nil && (c.closed || got != addr(f, 0, 1)) {
						t.Errorf("%s: %s connection is seen as %s", f, what, got)
					}
				}
			}
			l.none("without it")
			if got := testkit.Must(k.Sync(t.Context(), l.wanted))(t); got.Repaired != c.repaired {
				t.Errorf("Sync found %+v, want %d repaired", got, c.repaired)
			}
			l.leaves("with it again")
			for _, f := range families {
				if got, err := open[f].answered(); err != nil || got != addr(f, 0, 1) {
					t.Errorf("%s: the open connection is seen as %s, %v", f, got, err)
				}
			}
			l.sync(k, Result{Routers: 2})
			l.none("with it again")
		})
	}
}

// Packets of no connection, which nobody translates, don't leave; nor do those of a pod that pretends to be a router's client.
func TestUntranslatedDontLeave(t *testing.T) {
	l := newLab(t)
	l.sync(l.start(), Result{Routers: 2})
	testkit.Must(l.node.Run("nft", `
add table inet others
add chain inet others c { type filter hook prerouting priority raw; }
add rule inet others c iifname r1 notrack`))(t)
	for _, f := range families {
		for n, r := range l.routers {
			mine, others := transitOf(l.transits(n), f), transitOf(l.transits(1-n), f)
			if n == 0 {
				if got, err := l.talk(r, netip.AddrPortFrom(mine, 0), f).ask(silence); err == nil {
					t.Errorf("%s: a packet that isn't tracked left as %s", f, got)
				}
			}
			r.Configure(t, netlab.AddAddr(netip.PrefixFrom(others, others.BitLen()), "lo"))
			if got, err := l.talk(r, netip.AddrPortFrom(others, 0), f).ask(silence); err == nil {
				t.Errorf("%s: a packet from the other router's address left as %s", f, got)
			}
		}
	}
	l.none("untranslated")
	out := testkit.Must(l.node.Run("nft", "list", "counters"))(t)
	if strings.Contains(out, "packets 0 ") {
		t.Errorf("what wasn't translated isn't counted:\n%s", out)
	}
}

func transitOf(all []netip.Addr, f dataplane.Family) netip.Addr {
	a := ipam.AddressOf(all...)
	if f == dataplane.IPv4 {
		return a.IPv4
	}
	return a.IPv6
}

// Another life of the program finds all as it should be, and gives nobody another address. A router that isn't one any more keeps its address as
// long as its link is there, for connections that have it.
func TestLives(t *testing.T) {
	l := newLab(t)
	l.sync(l.start(), Result{Routers: 2})
	l.route()
	before := [][]netip.Addr{l.transits(0), l.transits(1)}
	if len(before[0]) != 2 || len(before[1]) != 2 || before[0][0] == before[1][0] {
		t.Fatalf("the routers have %v", before)
	}
	open := l.talk(l.clients[1], netip.AddrPort{}, dataplane.IPv4)
	testkit.Must(open.answered())(t)

	k := l.start()
	l.sync(k, Result{Routers: 2})
	all := l.wanted
	l.wanted = all[:1]
	k = l.start()
	l.sync(k, Result{Routers: 2})
	l.sync(k, Result{Routers: 2})
	testkit.Must(open.answered())(t)
	l.wanted = all
	k = l.start()
	l.sync(k, Result{Routers: 2})
	if d := cmp.Diff(before, [][]netip.Addr{l.transits(0), l.transits(1)}, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("addresses changed (-before +after):\n%s", d)
	}
	l.leaves("in another life")
	l.none("in another life")
}

// When an Egress doesn't use the nodes' addresses any more, its open connections go on with them, and without the node's table none leaves.
func TestOpenConnectionsStay(t *testing.T) {
	l := newLab(t)
	l.sync(l.start(), Result{Routers: 2})
	l.route()
	for _, f := range families {
		open := l.talk(l.clients[0], netip.AddrPort{}, f)
		testkit.Must(open.answered())(t)
		l.routeBy(false)
		if got, err := open.answered(); err != nil || got != addr(f, 0, 1) {
			t.Errorf("%s: the open connection is seen as %s, %v", f, got, err)
		}
		if got, err := l.talk(l.clients[0], netip.AddrPort{}, f).ask(timeout); err != nil || got != addr(f, 1, 2) {
			t.Errorf("%s: a new connection is seen as %s, %v, want the router's address", f, got, err)
		}
		l.leaks.Take()
		testkit.Must(l.node.Run("nft", "flush", "ruleset"))(t)
		if got, err := open.ask(silence); err == nil {
			t.Errorf("%s: without the table the open connection is seen as %s", f, got)
		}
		l.none("without the table")
		l.sync(l.start(), Result{Routers: 2, Repaired: 1})
		testkit.Must(open.answered())(t)
		l.route()
	}
}

// With a router's link its objects go, and with the last one's all.
func TestRoutersGo(t *testing.T) {
	l := newLab(t)
	k := l.start()
	l.sync(k, Result{Routers: 2})
	l.node.Configure(t, "link del r1")
	l.wanted = l.wanted[1:]
	l.sync(k, Result{Routers: 1})
	l.routers, l.clients = l.routers[1:], l.clients[1:]
	if got := l.transits(0); len(got) != 2 {
		t.Errorf("the other router has %v", got)
	}
	l.node.Configure(t, "link del r2")
	l.wanted = nil
	l.sync(k, Result{})
	for what, args := range map[string][]string{
		"nftables": {"nft", "list", "ruleset"},
		"routes":   {"ip", "route", "list", "table", "116", "proto", "33"}, "routes of IPv6": {"ip", "-6", "route", "list", "table", "116", "proto", "33"},
	} {
		if out := testkit.Must(l.node.Run(args[0], args[1:]...))(t); out != "" {
			t.Errorf("of %s there are still\n%s", what, out)
		}
	}
	l.sync(k, Result{})
}

// A router whose network namespace is gone, or is another's by now, is passed over. One with a family alone has an address of that.
func TestNamespacesGo(t *testing.T) {
	l := newLab(t)
	k := l.start()
	l.wanted[0].Inode++
	l.wanted[1].Address.IPv6 = netip.Addr{}
	l.sync(k, Result{Routers: 2})
	if got := l.transits(0); len(got) > 0 {
		t.Errorf("another's namespace has %v", got)
	}
	if got := l.transits(1); len(got) != 1 || !got[0].Is4() {
		t.Errorf("a router of IPv4 has %v", got)
	}
	l.wanted[0].Path += "gone"
	l.sync(k, Result{Routers: 2})
}

// What fails for one router, whose link can't be looked up, doesn't keep the objects of the others from being made, and repaired.
func TestOneFails(t *testing.T) {
	l := newLab(t)
	k := l.start()
	broken := l.wanted[0]
	broken.Link = 0 // which the kernel refuses to look up
	l.wanted = append([]Router{broken}, l.wanted...)
	for _, want := range []Result{{Routers: 2}, {Routers: 2, Repaired: 1}} {
		if got, err := k.Sync(t.Context(), l.wanted); got != want || err == nil || !strings.Contains(err.Error(), "link 0") {
			t.Errorf("Sync found %+v, %v, want %+v and an error about the link", got, err, want)
		}
		l.wanted = l.wanted[1:]
		l.route()
		l.leaves("beside the other one")
		l.wanted = append([]Router{broken}, l.wanted...)
		testkit.Must(l.node.Run("nft", "flush", "ruleset"))(t)
	}
	l.wanted = l.wanted[1:]
	l.sync(k, Result{Routers: 2, Repaired: 1})
}

// What is missing since it couldn't be made isn't repaired when it is made at last.
func TestFirstTime(t *testing.T) {
	l := newLab(t)
	k := l.start()
	fails := func(why string) {
		t.Helper()
		if got, err := k.Sync(t.Context(), l.wanted); err == nil || got.Repaired > 0 {
			t.Errorf("Sync found %+v, %v %s", got, err, why)
		}
	}
	l.node.Configure(t, "link set r1 down")
	fails("though no route can lead by r1")
	fails("though no route can lead by r1, the second time")
	l.node.Configure(t, "link set r1 up")
	path := l.wanted[0].Path
	l.wanted[0].Path = strings.Repeat("x", unix.PathMax)
	fails("though the namespace can't be opened")
	fails("though the namespace can't be opened, the second time")
	testkit.Must(l.node.Run("nft", "flush", "ruleset"))(t)
	if got, err := k.Sync(t.Context(), l.wanted); err == nil || got.Repaired != 1 {
		t.Errorf("Sync found %+v, %v, want the table repaired", got, err)
	}
	l.wanted[0].Path = path
	l.sync(k, Result{Routers: 2})
	if got := l.transits(0); len(got) != 2 {
		t.Errorf("the router has %v", got)
	}
	l.sync(k, Result{Routers: 2})
}

// Two routers whose links have indexes that give one number have different ones.
func TestFree(t *testing.T) {
	taken := map[int]transit{}
	for _, link := range []int{5, 5 + dataplane.Transits, 5 + 2*dataplane.Transits, 6} {
		n, err := free(link, taken)
		for _, o := range taken {
			if err != nil || n == o.number || n < 1 || n > dataplane.Transits {
				t.Errorf("link %d has number %d, %v beside %v", link, n, err, taken)
			}
		}
		taken[link] = transit{number: n}
	}
	for link := range dataplane.Transits {
		taken[-link] = transit{number: link + 1}
	}
	if n, err := free(1, taken); err == nil {
		t.Errorf("number %d is free though all are taken", n)
	}
}

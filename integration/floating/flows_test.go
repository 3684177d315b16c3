package floating

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/flows"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const flowPort = 7000

// crowd is clients that send to a server outside by routers, one at a time. The routers have the rules of an Egress's; in place of tunnels
// there are links.
type crowd struct {
	*fixture
	*flows.Set
	clients []*netlab.NS
	guard   *flows.Guard
	// hosts are the server's addresses, and served what the routers' clients reach.
	hosts  []netip.Addr
	served []netip.Prefix
}

// newCrowd makes one with so many clients and a server whose number is in its addresses.
func newCrowd(f *fixture, clients int, number byte) *crowd {
	t, ctx := f.t, f.t.Context()
	server := testkit.Must(f.NewHost(ctx, number))(t)
	t.Cleanup(func() { testkit.Check(t, server.Close()) })
	c := &crowd{fixture: f}
	c.hosts = []netip.Addr{netip.AddrFrom4([4]byte{10, 255, 200, number}), netip.MustParseAddr(fmt.Sprintf("fd00:255::c8:%x", number))}
	var at []netip.AddrPort
	for _, a := range c.hosts {
		at = append(at, netip.AddrPortFrom(a, flowPort))
		c.served = append(c.served, netip.PrefixFrom(a, a.BitLen()))
	}
	c.guard = testkit.Must(flows.NewGuard(ctx, server, flowPort, f.Addrs...))(t)
	c.Set = testkit.Must(flows.Serve(ctx, server, 500*time.Millisecond, at...))(t)
	t.Cleanup(func() { testkit.Check(t, c.Set.Close()) })
	for range clients {
		ns := testkit.Must(netlab.New())(t)
		t.Cleanup(func() { testkit.Check(t, ns.Close()) })
		c.clients = append(c.clients, ns)
	}
	for i := range f.Routers {
		c.joins(i)
	}
	return c
}

// client returns a client's addresses at its link to a router, and the router's.
func client(n, router int) (own, via []netip.Addr) {
	for _, format := range []string{"172.29.%d.%d", "fd29::%x:%x"} {
		own = append(own, netip.MustParseAddr(fmt.Sprintf(format, n, 9)))
		via = append(via, netip.MustParseAddr(fmt.Sprintf(format, n, 10+router)))
	}
	return own, via
}

// joins links the router of a node with all clients, and gives it its rules.
func (c *crowd) joins(router int) {
	c.t.Helper()
	s := c.Routers[router]
	ns := testkit.Must(netlab.Open(s.Path))(c.t)
	defer ns.Close()
	g := ruleset.Gateway{
		MTU: 1500, Port: dataplane.FouPort, Destinations: c.served, Addresses: c.Ledger.Live()[s],
		Floating: &ruleset.GatewayFloating{Addresses: c.Addrs},
	}
	for n, client := range c.clients {
		c.link(client, ns, n, router)
	}
	testkit.Check(c.t, ns.Forward(), ns.Sysctl("netfilter/nf_conntrack_tcp_loose=0", "netfilter/nf_conntrack_tcp_be_liberal=1"))
	for n := range c.clients {
		own, _ := client(n, router)
		for i, a := range own {
			g.Clients = append(g.Clients, ruleset.GatewayClient{Addr: a, Link: c.index(s, fmt.Sprintf("client%d", n))})
			g.Floating.Sources = append(g.Floating.Sources, ruleset.GatewaySource{Client: a, Address: c.Addrs[i]})
		}
	}
	g.Uplink = c.index(s, "eth0")
	table := testkit.Must(nft.New(ns.NS, dataplane.NftTable))(c.t)
	defer table.Close()
	testkit.Must(table.Sync(c.t.Context(), g.Ruleset()))(c.t)
}

// link links a client with a router. The rules of routers let nothing in by which neighbours are found.
func (c *crowd) link(from, to *netlab.NS, n, router int) {
	c.t.Helper()
	here, there := fmt.Sprintf("router%d", router), fmt.Sprintf("client%d", n)
	const hereMAC, thereMAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
	mine := []string{fmt.Sprintf("link add %s address %s type veth peer name %s address %s netns %s", here, hereMAC, there, thereMAC, to.Path()), "link set " + here + " up"}
	theirs := []string{"link set " + there + " up"}
	own, via := client(n, router)
	for i := range own {
		if router == 0 {
			mine = append(mine, netlab.AddAddr(netip.PrefixFrom(own[i], own[i].BitLen()), "lo"))
		}
		mine = append(mine, fmt.Sprintf("neigh add %s lladdr %s dev %s", via[i], thereMAC, here))
		theirs = append(theirs, fmt.Sprintf("neigh add %s lladdr %s dev %s", own[i], hereMAC, there), fmt.Sprintf("route add %s dev %s", own[i], there))
	}
	testkit.Check(c.t, from.IP(c.t.Context(), mine...), to.IP(c.t.Context(), theirs...))
}

var ifindex = regexp.MustCompile(`^\d+`)

func (c *crowd) index(s *rig.Sandbox, link string) int {
	c.t.Helper()
	out := testkit.Must(s.Run(c.t.Context(), "ip", "-o", "link", "show", "dev", link))(c.t)
	return testkit.Must(strconv.Atoi(ifindex.FindString(out)))(c.t)
}

// sendBy has all clients send by the router of a node.
func (c *crowd) sendBy(router int) {
	c.t.Helper()
	for n, ns := range c.clients {
		own, via := client(n, router)
		var commands []string
		for i, host := range c.hosts {
			commands = append(commands, fmt.Sprintf("route replace %s via %s dev router%d src %s onlink", host, via[i], router, own[i]))
		}
		testkit.Check(c.t, ns.IP(c.t.Context(), commands...))
	}
}

// strict lets a node drop packets of connections that it doesn't know, as kube-proxy does.
func (c *crowd) strict(n *rig.Node) {
	c.t.Helper()
	const table = "add table inet strict; add chain inet strict forward { type filter hook forward priority 0; }; add rule inet strict forward ct state invalid drop"
	ctx := c.t.Context()
	testkit.Must(n.Run(ctx, "nft", table))(c.t)
	testkit.Must(n.Run(ctx, "sysctl", "-w", "net.netfilter.nf_conntrack_tcp_loose=0"))(c.t)
}

// fared checks how flows have fared since a moment.
func (c *crowd) fared(what string, moment time.Time) flows.Report {
	c.t.Helper()
	r := c.Since(moment)
	c.t.Logf("%s: %s", what, r)
	if len(r.Broken) > 0 {
		c.t.Errorf("%s: %d of %d flows are broken, such as %s", what, len(r.Broken), r.Flows, r.Broken[0])
	}
	if !slices.Equal(r.Sources, c.Addrs) {
		c.t.Errorf("%s: the server sees %v, want %v", what, r.Sources, c.Addrs)
	}
	testkit.Check(c.t, c.guard.Check(c.t.Context()))
	return r
}

// talked waits until all flows have delivered something from now on.
func (c *crowd) talked(what string) {
	c.t.Helper()
	now := time.Now()
	testkit.Eventually(c.t, 30*time.Second, what+": all flows talk", func() error { return c.Talked(now) })
}

// Connections live on when the address moves on purpose: none is reset, none has another source, and none notices a pause.
func TestFlowsLiveOnInMoves(t *testing.T) {
	f := newFixture(t, "living", 2)
	c := newCrowd(f, 10, 9)
	f.held(0)
	for _, n := range f.Candidates {
		c.strict(n)
	}
	c.sendBy(0)
	perClient := testkit.FloatingForm.Times(10, 250)
	for _, ns := range c.clients {
		testkit.Check(t, c.Open(t.Context(), ns, perClient))
	}
	for range testkit.FloatingForm.Times(2, 20) {
		c.talked("before")
	}
	moment := time.Now()
	testkit.Check(t, f.Place(t.Context(), f.Candidates[1].Name, 1, 0))
	f.held(1)
	t.Logf("moved after %s", time.Since(moment))
	c.talked("while clients send by the router of before")
	c.sendBy(1)
	for range 3 {
		c.talked("after")
	}
	if r := c.fared("a move", moment); r.Longer.More() > testkit.Limit(300*time.Millisecond) {
		t.Errorf("%s", r.Longer)
	}
}

package gateway

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

func clientEndpoint(pod string, addrs ...string) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{
		Addresses: addrs,
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "ns", Name: pod, UID: types.UID("uid-" + pod)},
	}
}

func clientSlice(name string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Endpoints: endpoints}
}

var (
	own4, own6  = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	dualGateway = Config{Addresses: []netip.Addr{own4, own6}, Uplink: "eth0", UplinkIndex: 2, MTU: 1500, Port: 5555}
	addrEqual   = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	prefixEqual = cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	someEgress  = &v2.Egress{Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0", "fd99::/64", "10.9.0.0/16", "10.9.0.0/16"}}}
)

func tunnelTo(remote string, sport uint16, owners string) dataplane.Tunnel {
	a := netip.MustParseAddr(remote)
	if a.Is4() {
		return dataplane.Tunnel{Local: own4, Remote: a, SourcePort: sport, Port: 5555, MTU: 1472, Alias: owners}
	}
	return dataplane.Tunnel{Local: own6, Remote: a, SourcePort: sport, Port: 5555, MTU: 1452, Alias: owners}
}

func TestNewGateway(t *testing.T) {
	pod := func(name, addr string) Pod {
		return Pod{netip.MustParseAddr(addr), "ns", name, types.UID("uid-" + name)}
	}
	terminated := clientEndpoint("x", "10.0.0.8")
	terminated.Conditions.Ready = new(bool)
	nobodys := clientEndpoint("x", "10.0.0.8")
	nobodys.TargetRef = nil
	single := dualGateway
	single.Addresses = []netip.Addr{own4}
	auto := dualGateway
	auto.SourcePortAuto = true
	autoEgress := someEgress.DeepCopy()
	autoEgress.Spec.FouSourcePortAuto = true
	for _, c := range []struct {
		name    string
		cfg     Config
		egress  *v2.Egress
		lists   []*discoveryv1.EndpointSlice
		pods    []Pod
		tunnels []dataplane.Tunnel
		skipped []string
	}{
		{"no clients", dualGateway, someEgress, nil, nil, nil, nil},
		{
			"dual stack, out of order", dualGateway, someEgress,
			[]*discoveryv1.EndpointSlice{clientSlice("6", clientEndpoint("a", "fd00::a")), clientSlice("4", clientEndpoint("b", "10.0.0.9"), clientEndpoint("a", "10.0.0.2"))},
			[]Pod{pod("a", "10.0.0.2"), pod("b", "10.0.0.9"), pod("a", "fd00::a")},
			[]dataplane.Tunnel{tunnelTo("10.0.0.2", 5555, "uid-a"), tunnelTo("10.0.0.9", 5555, "uid-b"), tunnelTo("fd00::a", 5555, "uid-a")}, nil,
		},
		{
			"a family that the router lacks", single, someEgress,
			[]*discoveryv1.EndpointSlice{clientSlice("6", clientEndpoint("a", "fd00::a")), clientSlice("4", clientEndpoint("a", "10.0.0.2"))},
			[]Pod{pod("a", "10.0.0.2")}, []dataplane.Tunnel{tunnelTo("10.0.0.2", 5555, "uid-a")}, nil,
		},
		{
			"source ports by flag", auto, someEgress, []*discoveryv1.EndpointSlice{clientSlice("4", clientEndpoint("a", "10.0.0.2"))},
			[]Pod{pod("a", "10.0.0.2")}, []dataplane.Tunnel{tunnelTo("10.0.0.2", 0, "uid-a")}, nil,
		},
		{
			"source ports by Egress", dualGateway, autoEgress, []*discoveryv1.EndpointSlice{clientSlice("4", clientEndpoint("a", "10.0.0.2"))},
			[]Pod{pod("a", "10.0.0.2")}, []dataplane.Tunnel{tunnelTo("10.0.0.2", 0, "uid-a")}, nil,
		},
		{
			"an address claimed twice, and listed twice", dualGateway, someEgress,
			[]*discoveryv1.EndpointSlice{clientSlice("1", clientEndpoint("old", "10.0.0.2")), clientSlice("2", clientEndpoint("new", "10.0.0.2"), clientEndpoint("old", "10.0.0.2"))},
			[]Pod{pod("new", "10.0.0.2"), pod("old", "10.0.0.2")}, []dataplane.Tunnel{tunnelTo("10.0.0.2", 5555, "uid-new,uid-old")}, nil,
		},
		{
			"what can't be a client", dualGateway, someEgress,
			[]*discoveryv1.EndpointSlice{clientSlice("4", terminated, nobodys, clientEndpoint("a", "10.0.0.1"), clientEndpoint("b", "nonsense"),
				clientEndpoint("c", "224.0.0.1"), clientEndpoint("d", "127.0.0.1"), clientEndpoint("e", "10.0.0.2"))},
			[]Pod{pod("e", "10.0.0.2")}, []dataplane.Tunnel{tunnelTo("10.0.0.2", 5555, "uid-e")},
			[]string{"4: 10.0.0.1", "4: 10.0.0.8", "4: 127.0.0.1", "4: 224.0.0.1", "4: nonsense"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, skipped := StateOf(c.cfg, c.egress, c.lists)
			if d := cmp.Diff(c.pods, g.Pods, addrEqual); d != "" {
				t.Errorf("pods (-want +got):\n%s", d)
			}
			if d := cmp.Diff(c.tunnels, g.Tunnels, addrEqual); d != "" {
				t.Errorf("tunnels (-want +got):\n%s", d)
			}
			if !slices.Equal(c.skipped, skipped) {
				t.Errorf("skipped %q, want %q", skipped, c.skipped)
			}
		})
	}
}

// A router forwards to where its clients take the tunnel, whatever they send into it.
func TestGatewayDestinations(t *testing.T) {
	e := someEgress.DeepCopy()
	e.Status.InClusterCIDRs = []string{"10.9.7.0/24", "100.64.0.0/16", "198.51.100.0/28", "10.96.0.0/12"}
	g, skipped := StateOf(dualGateway, e, nil)
	for text, want := range map[string]bool{
		"192.0.2.1": true, "10.9.0.1": true, "fd99::1": true, "100.65.0.1": true, "198.51.100.16": true,
		"10.8.0.1": false, "192.168.0.1": false, "172.16.0.1": false, "fd98::1": false, "2001:db8::1": false, // not asked for
		"10.9.7.1": false, "100.64.0.1": false, "198.51.100.1": false, "10.96.0.1": false, // in the cluster
		"169.254.169.254": false, "fe80::1": false, "224.0.0.1": false, "255.255.255.255": false,
	} {
		a := netip.MustParseAddr(text)
		if got := slices.ContainsFunc(g.Destinations, func(p netip.Prefix) bool { return p.Contains(a) }); got != want {
			t.Errorf("%s is a destination: %t", a, got)
		}
	}
	for i, p := range g.Destinations {
		if i > 0 && (g.Destinations[i-1].Overlaps(p) || p.Addr().Less(g.Destinations[i-1].Addr())) {
			t.Errorf("%s comes after %s", p, g.Destinations[i-1])
		}
	}
	if skipped != nil {
		t.Errorf("skipped %q", skipped)
	}
	smaller := e.DeepCopy()
	smaller.Spec.Destinations = []string{"10.9.7.128/25"}
	if g, _ := StateOf(dualGateway, smaller, nil); !slices.Equal(g.Destinations, []netip.Prefix{netip.MustParsePrefix("10.9.7.128/25")}) {
		t.Errorf("destinations that are a part of a private range of the cluster: %v", g.Destinations)
	}
	single := dualGateway
	single.Addresses = []netip.Addr{own4}
	if g, _ := StateOf(single, someEgress, nil); slices.ContainsFunc(g.Destinations, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		t.Errorf("destinations of IPv4: %v", g.Destinations)
	}
	bad := &v2.Egress{Spec: v2.EgressSpec{Destinations: []string{"10.9.0.0/33", "10.8.0.1/16"}}}
	g, skipped = StateOf(dualGateway, bad, nil)
	if !slices.Equal(g.Destinations, []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16")}) || !slices.Equal(skipped, []string{"destination 10.9.0.0/33"}) {
		t.Errorf("destinations %v, skipped %q", g.Destinations, skipped)
	}
}

// Only clients that have their tunnel have a route and may send.
func TestGatewayRoutesAndFilter(t *testing.T) {
	g, _ := StateOf(dualGateway, someEgress, []*discoveryv1.EndpointSlice{
		clientSlice("4", clientEndpoint("a", "10.0.0.2"), clientEndpoint("b", "10.0.0.3")), clientSlice("6", clientEndpoint("a", "fd00::a")),
	})
	links := map[netip.Addr]dataplane.TunnelLink{
		netip.MustParseAddr("10.0.0.3"): {Index: 7, Name: "seven"}, netip.MustParseAddr("fd00::a"): {Index: 8, Name: "eight"},
	}
	routes, rules := g.Routes(links)
	wantRoutes := []dataplane.Route{
		{Table: 118, Dst: netip.MustParsePrefix("10.0.0.3/32"), Link: 7, Scope: dataplane.LinkScope, Protocol: 30},
		{Table: 118, Dst: netip.MustParsePrefix("fd00::a/128"), Link: 8, Scope: dataplane.LinkScope, Protocol: 30},
	}
	if d := cmp.Diff(wantRoutes, routes, addrEqual, prefixEqual); d != "" {
		t.Errorf("routes (-want +got):\n%s", d)
	}
	wantRules := []dataplane.Rule{
		{Family: dataplane.IPv4, Priority: 2100, Input: "eth0", Mark: 0x200000, Mask: 0x200000, Table: 118, Protocol: 30},
		{Family: dataplane.IPv4, Priority: 2100, Input: "lo", Transport: 1, Table: 118, Protocol: 30},
		{Family: dataplane.IPv4, Priority: 2200, Mark: 0x200000, Mask: 0x200000, Table: 254, Protocol: 30},
		{Family: dataplane.IPv4, Priority: 2201, Input: "lo", Table: 254, Protocol: 30},
		{Family: dataplane.IPv4, Priority: 2202, Blackhole: true, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2100, Input: "eth0", Mark: 0x200000, Mask: 0x200000, Table: 118, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2100, Input: "lo", Transport: 58, Table: 118, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2200, Mark: 0x200000, Mask: 0x200000, Table: 254, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2201, Input: "lo", Table: 254, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2202, Blackhole: true, Protocol: 30},
	}
	if d := cmp.Diff(wantRules, rules, prefixEqual); d != "" {
		t.Errorf("rules (-want +got):\n%s", d)
	}
	wantFilter := ruleset.Gateway{
		Uplink: 2, MTU: 1500, Addresses: dualGateway.Addresses, Port: 5555, Destinations: g.Destinations, Askers: g.Askers,
		Clients:      []ruleset.GatewayClient{{Addr: netip.MustParseAddr("10.0.0.3"), Link: 7}, {Addr: netip.MustParseAddr("fd00::a"), Link: 8}},
		MaxPerClient: 16128,
	}
	if d := cmp.Diff(wantFilter, g.Filter(links), addrEqual, prefixEqual); d != "" {
		t.Errorf("filter (-want +got):\n%s", d)
	}
}

// Askers of a router are its node before anything is known of the cluster, then the cluster, too.
func TestGatewayAskers(t *testing.T) {
	cfg := dualGateway
	cfg.Probers, cfg.AlsoAskers = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
	known := someEgress.DeepCopy()
	known.Status.InClusterCIDRs = []string{"198.51.100.0/24", "2001:db8::/48", "10.0.0.0/24"}
	for _, c := range []struct {
		egress  *v2.Egress
		in, out []string
	}{
		{someEgress, []string{"192.0.2.1", "203.0.113.9", "10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.1.1", "fd00::1", "fe80::1"},
			[]string{"192.0.2.2", "198.51.100.1", "8.8.8.8", "2001:db8::1"}},
		{known, []string{"192.0.2.1", "198.51.100.1", "2001:db8::1", "10.0.0.1"}, []string{"192.0.2.2", "8.8.8.8", "2001:db8:1::1"}},
	} {
		g, _ := StateOf(cfg, c.egress, nil)
		may := func(a string) bool {
			return slices.ContainsFunc(g.Filter(nil).Askers, func(p netip.Prefix) bool { return p.Contains(netip.MustParseAddr(a)) })
		}
		for _, a := range c.in {
			if !may(a) {
				t.Errorf("%s may not ask", a)
			}
		}
		for _, a := range c.out {
			if may(a) {
				t.Errorf("%s may ask", a)
			}
		}
	}
	before, _ := StateOf(cfg, someEgress, nil)
	now, _ := StateOf(cfg, known, nil)
	if _, ok := now.Since(before); !ok || now.Equal(before) {
		t.Error("nothing has changed")
	}
}

func TestGatewaySince(t *testing.T) {
	gateway := func(cfg Config, egress *v2.Egress, addrs ...string) State {
		var endpoints []discoveryv1.Endpoint
		for _, a := range addrs {
			endpoints = append(endpoints, clientEndpoint("of "+a, a))
		}
		g, _ := StateOf(cfg, egress, []*discoveryv1.EndpointSlice{clientSlice("4", endpoints...)})
		return g
	}
	before := gateway(dualGateway, someEgress, "10.0.0.2", "10.0.0.4", "fd00::a")
	mtu, auto, elsewhere := dualGateway, someEgress.DeepCopy(), someEgress.DeepCopy()
	mtu.MTU = 1400
	auto.Spec.FouSourcePortAuto = true
	elsewhere.Spec.Destinations = []string{"0.0.0.0/1"}
	renamed := before
	renamed.Pods = slices.Clone(before.Pods)
	renamed.Pods[0].UID = "another"
	for _, c := range []struct {
		name       string
		now        State
		came, left []string
		not        bool
	}{
		{name: "the same", now: before, not: true},
		{name: "one more", now: gateway(dualGateway, someEgress, "10.0.0.2", "10.0.0.3", "10.0.0.4", "fd00::a"), came: []string{"10.0.0.3"}},
		{name: "the first is gone", now: gateway(dualGateway, someEgress, "10.0.0.4", "fd00::a"), left: []string{"10.0.0.2"}},
		{name: "others", now: gateway(dualGateway, someEgress, "10.0.0.3", "10.0.0.4", "fd00::b"), came: []string{"10.0.0.3", "fd00::b"}, left: []string{"10.0.0.2", "fd00::a"}},
		{name: "nobody", now: gateway(dualGateway, someEgress), left: []string{"10.0.0.2", "10.0.0.4", "fd00::a"}},
		{name: "another pod", now: renamed},
		{name: "destinations", now: gateway(dualGateway, elsewhere, "10.0.0.2", "10.0.0.4", "fd00::a")},
		{name: "MTU", now: gateway(mtu, someEgress, "10.0.0.2", "10.0.0.4", "fd00::a"), not: true},
		{name: "MTU without clients", now: gateway(mtu, someEgress), not: true},
		{name: "source ports", now: gateway(dualGateway, auto, "10.0.0.2", "10.0.0.3", "10.0.0.4", "fd00::a"), not: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, ok := c.now.Since(before)
			if ok == c.not {
				t.Fatalf("ok is %t", ok)
			}
			remotes := func(tunnels []dataplane.Tunnel) (out []string) {
				for _, t := range tunnels {
					out = append(out, t.Remote.String())
				}
				return out
			}
			if !slices.Equal(remotes(got.Came), c.came) || !slices.Equal(remotes(got.Left), c.left) {
				t.Errorf("%v came, %v left; want %v, %v", got.Came, got.Left, c.came, c.left)
			}
		})
	}
}

func TestGatewayInherited(t *testing.T) {
	g, _ := StateOf(dualGateway, someEgress, []*discoveryv1.EndpointSlice{
		clientSlice("4", clientEndpoint("a", "10.0.0.2"), clientEndpoint("b", "10.0.0.3"), clientEndpoint("c", "10.0.0.3"), clientEndpoint("d", "10.0.0.4")),
	})
	for _, c := range []struct {
		name, addr, alias string
		inherited         bool
	}{
		{"its own", "10.0.0.2", "uid-a", false},
		{"its own, beside one that left", "10.0.0.2", "uid-a,uid-old", false},
		{"another pod's", "10.0.0.2", "uid-old", true},
		{"of both", "10.0.0.3", "uid-b,uid-c", false},
		{"of one of both", "10.0.0.3", "uid-b", true},
		{"nobody has the address", "10.0.0.9", "uid-a", true},
		{"nobody has the address, without an alias", "10.0.0.9", "", true},
		{"without an alias", "10.0.0.4", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			addr := netip.MustParseAddr(c.addr)
			inherited := g.Inherited(map[netip.Addr]dataplane.TunnelLink{addr: {Index: 7, Name: "seven", Alias: c.alias}})
			if slices.Contains(inherited, addr) != c.inherited || len(inherited) > 1 {
				t.Errorf("inherited %v", inherited)
			}
		})
	}
}

func TestGatewayReleased(t *testing.T) {
	gateway := func(endpoints ...discoveryv1.Endpoint) State {
		g, _ := StateOf(dualGateway, someEgress, []*discoveryv1.EndpointSlice{clientSlice("4", endpoints...)})
		return g
	}
	const addr = "10.0.0.2"
	for _, c := range []struct {
		name        string
		before, now State
		released    bool
	}{
		{"nothing before", gateway(), gateway(clientEndpoint("a", addr)), false},
		{"the same", gateway(clientEndpoint("a", addr)), gateway(clientEndpoint("a", addr)), false},
		{"gone", gateway(clientEndpoint("a", addr)), gateway(clientEndpoint("a", "10.0.0.3")), true},
		{"another pod", gateway(clientEndpoint("a", addr)), gateway(clientEndpoint("b", addr)), true},
		{"another pod beside the old one", gateway(clientEndpoint("a", addr)), gateway(clientEndpoint("a", addr), clientEndpoint("b", addr)), true},
		{"the old one leaves", gateway(clientEndpoint("a", addr), clientEndpoint("b", addr)), gateway(clientEndpoint("b", addr)), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			released := c.now.Released(c.before)
			if got := slices.Contains(released, netip.MustParseAddr(addr)); got != c.released || len(released) > 1 {
				t.Errorf("released %v", released)
			}
		})
	}
}

// One address of a client takes a part of what a router has, unless the Egress says how much.
func TestMaxPerClient(t *testing.T) {
	for _, c := range []struct {
		name    string
		tracked int
		egress  *int32
		want    int
	}{
		{"ports are scarcer", 262144, nil, 16128},
		{"connections are scarcer", 65536, nil, 8192},
		{"hardly any", 4, nil, 1},
		{"not known", 0, nil, 16128},
		{"the Egress says", 65536, new(int32(40000)), 40000},
		{"the Egress says none", 65536, new(int32(0)), 0},
		{"of an older schema", 65536, new(int32(-1)), 0},
	} {
		e := someEgress.DeepCopy()
		e.Spec.MaxConnectionsPerClient = c.egress
		cfg := dualGateway
		cfg.MaxConnections = c.tracked
		g, _ := StateOf(cfg, e, nil)
		if got := g.Filter(nil).MaxPerClient; got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
		other := g
		other.MaxPerClient++
		if _, ok := other.Since(g); !ok || other.Equal(g) {
			t.Errorf("%s: another limit is no change", c.name)
		}
	}
}

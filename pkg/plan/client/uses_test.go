package client

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// policyOf is a policy of namespace ns; without destinations it has none of its own.
func policyOf(name string, failure v2.EgressFailure, destinations ...string) policy.Policy {
	p := policy.Policy{Name: types.NamespacedName{Namespace: "ns", Name: name}, OnFailure: failure}
	if len(destinations) > 0 {
		p.Destinations = prefixes.Valid(destinations)
	}
	return p
}

func TestDestinationsOfPolicies(t *testing.T) {
	for _, c := range []struct {
		what        string
		policy, has []string
		want        []string
	}{
		{what: "none of its own", has: []string{"0.0.0.0/0", "10.0.0.0/8"}, want: []string{"0.0.0.0/0", "10.0.0.0/8"}},
		{what: "one of the Egress's", policy: []string{"10.0.0.0/8"}, has: []string{"0.0.0.0/0", "10.0.0.0/8"}, want: []string{"10.0.0.0/8"}},
		{what: "inside of one", policy: []string{"10.1.0.0/16", "192.0.2.0/24"}, has: []string{"0.0.0.0/0", "10.0.0.0/8"}, want: []string{"10.1.0.0/16", "192.0.2.0/24"}},
		{what: "outside", policy: []string{"192.0.2.0/24", "2001:db8::/32"}, has: []string{"198.51.100.0/24"}, want: []string{}},
		{what: "around one", policy: []string{"198.51.0.0/16"}, has: []string{"198.51.100.0/24", "203.0.113.0/24"}, want: []string{"198.51.100.0/24"}},
		{what: "around a public one and a private one", policy: []string{"0.0.0.0/0"}, has: []string{"198.51.100.0/24", "10.0.0.0/8"}, want: []string{"198.51.100.0/24"}},
		{what: "a private one inside of a public one", policy: []string{"10.1.0.0/16", "fd00::/16", "192.0.2.0/24"}, has: []string{"0.0.0.0/0", "::/0"}, want: []string{"192.0.2.0/24"}},
		{what: "around a private one", policy: []string{"10.0.0.0/8"}, has: []string{"10.1.0.0/16", "192.0.2.0/24"}, want: []string{"10.1.0.0/16"}},
		{what: "several, and one twice", policy: []string{"198.51.100.0/25", "198.51.0.0/16", "198.51.0.0/16"}, has: []string{"198.51.100.0/24"},
			want: []string{"198.51.100.0/24", "198.51.100.0/25"}},
	} {
		e := egressOf("net/a", "4", 1, c.has...).By(policyOf("p", v2.EgressFailureClosed, c.policy...))
		got := []string{}
		for _, d := range e.Destinations {
			got = append(got, d.String())
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.what, d)
		}
		if e.Policy != "EgressPolicy ns/p" || e.Open {
			t.Errorf("%s: policy %q, open %t", c.what, e.Policy, e.Open)
		}
	}
}

// Which of several policies and annotations decides for a destination, and who is told.
func TestPrecedence(t *testing.T) {
	a, b := egressOf("net/a", "4", 1, "0.0.0.0/0"), egressOf("net/b", "4", 2, "0.0.0.0/0")
	nobody := egressOf("net/nobody", "", 3, "0.0.0.0/0")
	closed, open := v2.EgressFailureClosed, v2.EgressFailureNode
	const dst = "203.0.113.7"
	for _, c := range []struct {
		what      string
		uses      []Egress
		want      string
		conflicts string
	}{
		{"one policy", []Egress{a.By(policyOf("p", closed))}, "10.96.0.1", ""},
		{"the older policy", []Egress{b.By(policyOf("p", closed)), a.By(policyOf("q", closed))}, "10.96.0.2",
			"0.0.0.0/0: net/b of EgressPolicy ns/p, not net/a of EgressPolicy ns/q"},
		{"the smaller subnet", []Egress{b.By(policyOf("p", closed)), a.By(policyOf("q", closed, "203.0.113.0/24"))}, "10.96.0.1", ""},
		{"an annotation before policies", []Egress{b.By(policyOf("p", closed)), a}, "10.96.0.1", "0.0.0.0/0: net/a, not net/b of EgressPolicy ns/p"},
		{"the smaller subnet before an annotation", []Egress{a, b.By(policyOf("p", closed, "203.0.113.0/24"))}, "10.96.0.2", ""},
		{"two policies with one Egress", []Egress{a.By(policyOf("p", closed)), a.By(policyOf("q", closed, "203.0.113.0/24"))}, "10.96.0.1", ""},
		{"an annotation and a policy with one Egress", []Egress{a, a.By(policyOf("p", open))}, "10.96.0.1", ""},
		{"nothing forwards, closed", []Egress{nobody.By(policyOf("p", closed))}, "unreachable", ""},
		{"nothing forwards, open", []Egress{nobody.By(policyOf("p", open))}, "node", ""},
		{"nothing forwards, open inside of another", []Egress{a, nobody.By(policyOf("p", open, "203.0.113.0/24"))}, "node", ""},
		{"nothing forwards, the older is closed", []Egress{nobody.By(policyOf("p", closed)), nobody.By(policyOf("q", open))}, "unreachable", ""},
		{"open, and something forwards", []Egress{a.By(policyOf("p", open))}, "10.96.0.1", ""},
	} {
		s := StateOf(clientOfFamilies("4", c.uses...))
		if got := wayOf(s, netip.MustParseAddr(dst)); got != c.want {
			t.Errorf("%s: packets to %s go to %s, want %s", c.what, dst, got, c.want)
		}
		var conflicts []string
		for _, x := range s.Conflicts {
			conflicts = append(conflicts, fmt.Sprintf("%s: %s, not %s", x.Dst, x.Winner, x.Loser))
		}
		if got := strings.Join(conflicts, "; "); got != c.conflicts {
			t.Errorf("%s: conflicts %q, want %q", c.what, got, c.conflicts)
		}
	}
}

// Clients send to the router that has their address: two addresses of one Egress are two ways.
func TestAddressesLeadToTheirRouters(t *testing.T) {
	e := direct("net/a", "10.1.1.1 live, 10.1.1.2 draining, 10.1.1.3 dead", "0.0.0.0/0")
	for i := range e.Routers {
		e.Routers[i].Pod = types.UID(fmt.Sprint("pod", i+1))
	}
	e.Blocks, e.Block = []string{"b1", "b2", "b3", "b4"}, "b1"
	policy := func(name, block string, to ...string) Egress {
		p := policyOf(name, v2.EgressFailureClosed, to...)
		p.Block = block
		return e.By(p)
	}
	uses := []Egress{
		e.At("pod1"), policy("p", "b2", "203.0.113.0/24").At("pod2"), policy("q", "b3", "198.51.100.0/24").At("pod3"),
		policy("r", "b4", "192.0.2.0/24").At(""), policy("s", "another's", "192.0.3.0/24").At(""), policy("t", "b2", "192.0.4.0/24").At("pod2"),
	}
	if got := uses[4].Block; got != "" {
		t.Errorf("a policy has the block %s, which isn't the Egress's", got)
	}
	s := StateOf(clientOfFamilies("4", uses...))
	// While an address moves, answers come by the router of before, or by the next one.
	for _, r := range e.Routers {
		if !slices.Contains(s.Filter.Peers, r.Addr) {
			t.Errorf("packets of the router %s aren't taken: %v", r.Addr, s.Filter.Peers)
		}
	}
	for to, want := range map[string]string{
		"8.8.8.8": "10.1.1.1", "203.0.113.7": "10.1.1.2", "192.0.4.7": "10.1.1.2",
		"198.51.100.7": "", // its router is dead
		"192.0.2.7":    "", // no router has the address
		"192.0.3.7":    "",
	} {
		var members []string
		name := wayOf(s, netip.MustParseAddr(to))
		for _, r := range s.Routes {
			for _, g := range s.Groups {
				if r.Nexthop == g.ID && r.Dst.Contains(netip.MustParseAddr(to)) && (r.Dst.Bits() > 0 || to == "8.8.8.8") {
					members = append(members, fmt.Sprint(g.Members))
				}
			}
		}
		if got := strings.Trim(strings.Join(members, " "), "[]"); got != want {
			t.Errorf("packets to %s (%s) go to %q, want %q", to, name, got, want)
		}
	}
	ids := map[uint32]bool{}
	for _, g := range s.Groups {
		ids[g.ID] = true
	}
	if len(ids) != len(s.Groups) || len(ids) != 5 {
		t.Errorf("%d IDs of %d groups, want 5", len(ids), len(s.Groups))
	}
}

// Routers that have no address, as nodes and they themselves see it, take no flows. What lets a client use the Egress makes no difference: it is
// one way.
func TestRoutersWithAddresses(t *testing.T) {
	e := direct("net/a", "10.1.1.1 live, 10.1.1.2 live, 10.1.1.3 live, 10.1.1.4 draining, 10.1.1.5 dead, 10.1.1.6 live, 10.1.1.7 live", "0.0.0.0/0")
	holders := map[string]types.UID{}
	for i := range e.Routers {
		n := i + 1
		e.Routers[i].Pod, e.Routers[i].Name = types.UID(fmt.Sprint("pod", n)), fmt.Sprint("r", n)
		e.OfRouters = append(e.OfRouters, OfRouter{fmt.Sprint("b", n), fmt.Sprint("r", n)})
		holders[fmt.Sprint("b", n)] = types.UID(fmt.Sprint("pod", n))
	}
	e.OfRouters = append(e.OfRouters, OfRouter{"b8", "r1"}) // a second one of the first
	holders["b8"] = "pod1"
	delete(holders, "b2")                                               // no node has the address
	e.OfRouters[2].Router = "r1"                                        // another router takes it for its own
	holders["b6"], e.Routers[6].Pod, e.Routers[6].Name = "pod1", "", "" // it has moved; it isn't known whose pod it is
	holder := func(block string) types.UID { return holders[block] }
	all := slices.Clone(e.Routers)
	used := e.WithAddresses(holder)
	policy := e.By(policyOf("p", v2.EgressFailureClosed, "203.0.113.0/24")).WithAddresses(holder)
	s := StateOf(clientOfFamilies("4", used, policy))
	if len(s.Groups) != 1 {
		t.Fatalf("%d groups, want one", len(s.Groups))
	}
	addrs := func(all ...string) (addrs []netip.Addr) {
		for _, text := range all {
			addrs = append(addrs, netip.MustParseAddr(text))
		}
		return addrs
	}
	g := s.Groups[0]
	if d := cmp.Diff([][]netip.Addr{addrs("10.1.1.1"), addrs("10.1.1.2", "10.1.1.3", "10.1.1.4", "10.1.1.6", "10.1.1.7"), addrs("10.1.1.5")},
		[][]netip.Addr{g.Members, g.Draining, g.Dead}, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("members, draining and dead routers (-want +got):\n%s", d)
	}
	if !slices.Equal(e.Routers, all) {
		t.Error("the routers of all clients were changed")
	}
	e.OfRouters = []OfRouter{}
	if s := StateOf(clientOfFamilies("4", e.WithAddresses(holder))); len(s.Groups[0].Members) > 0 {
		t.Errorf("without addresses %v take flows", s.Groups[0].Members)
	}
	e.OfRouters = nil
	if s := StateOf(clientOfFamilies("4", e.WithAddresses(holder))); len(s.Groups[0].Members) != 5 {
		t.Errorf("of an Egress without addresses %v take flows", s.Groups[0].Members)
	}
}

// Policies let a client use the same routers: there is one group of them, and each counts once.
func TestOneEgressOfManyPolicies(t *testing.T) {
	e := egressOf("net/a", "4", 1, "0.0.0.0/0")
	e.Direct = true
	for i := range MostTunnels / 2 {
		e.Routers = append(e.Routers, Router{Addr: netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}), State: RouterLive})
	}
	var uses []Egress
	for i := range 10 {
		uses = append(uses, e.By(policyOf(fmt.Sprint("p", i), v2.EgressFailureClosed, fmt.Sprintf("203.0.%d.0/24", i))))
	}
	fit, excess := Fit(append(uses, e))
	if len(fit) != 11 || len(excess) > 0 {
		t.Errorf("%d fit, and %v don't", len(fit), excess)
	}
	s := StateOf(clientOfFamilies("4", fit...))
	if len(s.Groups) != 1 || len(s.Tunnels) != len(e.Routers) {
		t.Errorf("%d groups, %d tunnels", len(s.Groups), len(s.Tunnels))
	}
	if got := wayOf(s, netip.MustParseAddr("203.0.3.9")); got != "net/a" {
		t.Errorf("packets go to %s", got)
	}
}

// A router of one Egress that is a destination of another isn't used, whichever policy lets the client use it; it is told once.
func TestStraysOfPolicies(t *testing.T) {
	a, b := egressOf("net/a", "4", 1, "192.0.2.0/24"), egressOf("net/b", "4", 2, "198.51.100.0/24")
	b.Direct, b.Routers = true, []Router{{Addr: netip.MustParseAddr("192.0.2.1"), State: RouterLive}, {Addr: netip.MustParseAddr("198.51.100.1"), State: RouterLive}}
	s := StateOf(clientOfFamilies("4", a, b.By(policyOf("p", v2.EgressFailureClosed)), b.By(policyOf("q", v2.EgressFailureClosed))))
	want := []Conflict{{Dst: netip.MustParsePrefix("192.0.2.1/32"), Winner: "net/a", Loser: "net/b", Router: true}}
	if d := cmp.Diff(want, s.Conflicts, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if len(s.Groups) != 1 || len(s.Groups[0].Members) != 1 {
		t.Errorf("groups %v", s.Groups)
	}
}

// wayOf says where a client of a state sends packets to a destination, as its kernel finds it out: the Service or the Egress whose
// routers take them, "unreachable", or "node".
func wayOf(s State, dst netip.Addr) string {
	p := netip.PrefixFrom(dst, dst.BitLen())
	for _, table := range []int{dataplane.TableNarrow, dataplane.TableWide} {
		if table == dataplane.TableWide && prefixes.Within(p, dataplane.PrivateRanges) {
			break
		}
		var best *Route
		for i, r := range s.Routes {
			group := slices.IndexFunc(s.Groups, func(g Group) bool { return g.ID == r.Nexthop })
			if r.Table != table || !r.Dst.Contains(dst) || r.Nexthop != 0 && len(s.Groups[group].Members) == 0 {
				continue
			}
			if best == nil || r.Dst.Bits() > best.Dst.Bits() {
				best = &s.Routes[i]
			}
		}
		switch {
		case best == nil, best.Type == dataplane.Throw:
			continue
		case best.Type == dataplane.Unreachable, best.Sink:
			return "unreachable"
		case best.Nexthop != 0:
			return s.Groups[slices.IndexFunc(s.Groups, func(g Group) bool { return g.ID == best.Nexthop })].Egress
		}
		return best.Peer.String()
	}
	return "node"
}

// Each address goes where the policies, one after the other, say that it does.
func TestPrecedenceOfEachAddress(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 11))
	possible := []string{
		"0.0.0.0/0", "203.0.113.0/24", "203.0.113.0/25", "203.0.113.64/26", "203.0.112.0/23", "203.0.0.0/8", "198.51.100.0/24",
		"10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "8.0.0.0/6", "172.16.0.0/12", "::/0", "2001:db8::/32", "2001:db8:1::/48", "fc00::/7", "fd00:1::/32",
	}
	asked := prefixes.Valid(possible)
	for round := range 400 {
		var egresses []Egress
		for i := range 1 + rng.IntN(4) {
			e := egressOf(fmt.Sprintf("net/%c", 'a'+i), []string{"", "4", "6", "46"}[rng.IntN(4)], i+1)
			for range 1 + rng.IntN(4) {
				e.Destinations = append(e.Destinations, asked[rng.IntN(len(asked))])
			}
			e.OriginatingOnly = rng.IntN(4) == 0
			if e.Direct = rng.IntN(2) == 0; e.Direct {
				for _, a := range egressOf("", []string{"", "4", "6", "46"}[rng.IntN(4)], 20+i).Peers.Addrs() {
					e.Routers = append(e.Routers, Router{Addr: a, State: RouterState(1 + rng.IntN(3))})
				}
				e.InCluster = prefixes.Valid([]string{"10.96.0.0/16", "fd96::/32"})
			}
			egresses = append(egresses, e)
		}
		var uses, policies []Egress
		for _, e := range egresses {
			if rng.IntN(3) == 0 {
				uses = append(uses, e)
			}
		}
		for i := range rng.IntN(6) {
			var own []string
			for range rng.IntN(4) {
				own = append(own, possible[rng.IntN(len(possible))])
			}
			failure := []v2.EgressFailure{v2.EgressFailureClosed, v2.EgressFailureNode}[rng.IntN(2)]
			policies = append(policies, egresses[rng.IntN(len(egresses))].By(policyOf(fmt.Sprint("p", i), failure, own...)))
		}
		naive := slices.Concat(uses, policies)
		rng.Shuffle(len(uses), func(i, j int) { uses[i], uses[j] = uses[j], uses[i] })
		s := StateOf(clientOfFamilies("46", slices.Concat(uses, policies)...))
		for range 100 {
			dst := somewhere(rng, asked[rng.IntN(len(asked))])
			want := naively(naive, dst)
			if got := wayOf(s, dst); got != want {
				t.Fatalf("round %d: packets to %s go to %s, want %s, of %+v", round, dst, got, want, naive)
			}
			kept := s.Filter != nil && slices.ContainsFunc(s.Filter.Destinations, func(r netipx.IPRange) bool { return r.Contains(dst) })
			if kept != (want != "node") {
				t.Fatalf("round %d: packets to %s go to %s, and the ruleset keeps them in: %t", round, dst, want, kept)
			}
		}
	}
}

// somewhere returns an address of a prefix, often one of its ends. Those that no Egress captures are left out.
func somewhere(rng *rand.Rand, p netip.Prefix) netip.Addr {
	for {
		bytes := p.Addr().AsSlice()
		for i := p.Bits(); i < len(bytes)*8; i++ {
			if rng.IntN(2) == 0 {
				bytes[i/8] |= 0x80 >> (i % 8)
			}
		}
		a, _ := netip.AddrFromSlice(bytes)
		one := netip.PrefixFrom(a, a.BitLen())
		if !prefixes.Within(one, slices.Concat(unrouted, dataplane.LinkLocalRanges, prefixes.Valid([]string{"10.96.0.0/16", "fd96::/32"}))) {
			return a
		}
	}
}

// naively says where packets to an address go: to the Egress with the smallest subnet that has it, the first of several.
func naively(uses []Egress, dst netip.Addr) string {
	private := prefixes.Within(netip.PrefixFrom(dst, dst.BitLen()), dataplane.PrivateRanges)
	var decides *Egress
	bits := -1
	for i, e := range uses {
		for _, d := range e.Destinations {
			if d.Contains(dst) && d.Bits() > bits && prefixes.Within(d, dataplane.PrivateRanges) == private {
				decides, bits = &uses[i], d.Bits()
			}
		}
	}
	if decides == nil {
		return "node"
	}
	if decides.Direct {
		for _, r := range decides.Routers {
			if r.State == RouterLive && r.Addr.Is4() == dst.Is4() {
				return decides.Name
			}
		}
	} else if peer := map[bool]netip.Addr{true: decides.Peers.IPv4, false: decides.Peers.IPv6}[dst.Is4()]; peer.IsValid() {
		return peer.String()
	}
	if decides.Open {
		return "node"
	}
	return "unreachable"
}

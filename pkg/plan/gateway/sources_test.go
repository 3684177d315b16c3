package gateway

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// withAddresses is an Egress with floating addresses.
func withAddresses(destinations ...string) *v2.Egress {
	e := &v2.Egress{Spec: v2.EgressSpec{Destinations: destinations, Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient}}}
	e.Status.Addresses = []v2.EgressAddressStatus{{EgressAddress: v2.EgressAddress{IPv4: "203.0.113.1", IPv6: "2001:db8::1"}}}
	return e
}

// policySlice lists clients of a policy, which is older the smaller its age is.
func policySlice(name string, created int, address string, destinations []string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	s := clientSlice(name, endpoints...)
	o := policy.Origin{Namespace: "ns", Name: name, Created: time.Unix(int64(created), 0).UTC()}
	for _, d := range destinations {
		o.Destinations = append(o.Destinations, netip.MustParsePrefix(d))
	}
	s.Labels = map[string]string{v2.LabelPolicyEgress: "nat"}
	s.Annotations = map[string]string{v2.AnnotationPolicy: o.String(), v2.AnnotationAddress: address}
	return s
}

func sourceText(s ruleset.GatewaySource) string {
	to := "any"
	if s.Destinations.IsValid() {
		to = s.Destinations.String()
	}
	return fmt.Sprintf("%s to %s by %s", s.Client, to, s.Address)
}

func TestSources(t *testing.T) {
	annotated := func(address string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		s := clientSlice("annotated", endpoints...)
		s.Annotations = map[string]string{v2.AnnotationAddress: address}
		return s
	}
	a := clientEndpoint("a", "10.0.0.9", "fd00::9")
	all := []string{"0.0.0.0/0", "::/0"}
	for _, c := range []struct {
		name  string
		lists []*discoveryv1.EndpointSlice
		want  []string
	}{
		{"without an address", []*discoveryv1.EndpointSlice{clientSlice("x", a)}, nil},
		{"annotated", []*discoveryv1.EndpointSlice{annotated("203.0.113.1,2001:db8::1", a)}, []string{"10.0.0.9 to any by 203.0.113.1", "fd00::9 to any by 2001:db8::1"}},
		{"of one family", []*discoveryv1.EndpointSlice{annotated("203.0.113.1", a)}, []string{"10.0.0.9 to any by 203.0.113.1"}},
		{"a policy", []*discoveryv1.EndpointSlice{policySlice("p", 1, "203.0.113.1", nil, a)}, []string{"10.0.0.9 to any by 203.0.113.1"}},
		{"a policy in two slices", []*discoveryv1.EndpointSlice{policySlice("p", 1, "203.0.113.1", nil, a), policySlice("p", 1, "203.0.113.1", nil, a)},
			[]string{"10.0.0.9 to any by 203.0.113.1"}},
		{"a policy with destinations", []*discoveryv1.EndpointSlice{policySlice("p", 1, "203.0.113.1", []string{"192.0.2.0/24"}, a)},
			[]string{"10.0.0.9 to 192.0.2.0-192.0.2.255 by 203.0.113.1"}},
		{"the older policy", []*discoveryv1.EndpointSlice{policySlice("a", 2, "203.0.113.2", nil, a), policySlice("b", 1, "203.0.113.1", nil, a)},
			[]string{"10.0.0.9 to 0.0.0.0-255.255.255.255 by 203.0.113.1"}},
		{"the annotation is the oldest", []*discoveryv1.EndpointSlice{policySlice("a", 1, "203.0.113.2", nil, a), annotated("203.0.113.1", a)},
			[]string{"10.0.0.9 to 0.0.0.0-255.255.255.255 by 203.0.113.1"}},
		{"the smaller destination", []*discoveryv1.EndpointSlice{policySlice("a", 1, "203.0.113.1", []string{"192.0.2.0/24"}, a), policySlice("b", 2, "203.0.113.2", []string{"192.0.2.128/25"}, a)},
			[]string{"10.0.0.9 to 192.0.2.0-192.0.2.127 by 203.0.113.1", "10.0.0.9 to 192.0.2.128-192.0.2.255 by 203.0.113.2"}},
		{"the smaller destination has no address: nothing leaves", []*discoveryv1.EndpointSlice{policySlice("a", 1, "203.0.113.1", []string{"192.0.2.0/24"}, a), policySlice("b", 2, "", []string{"192.0.2.128/25"}, a)},
			[]string{"10.0.0.9 to 192.0.2.0-192.0.2.127 by 203.0.113.1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, skipped := StateOf(dualGateway, withAddresses(all...), c.lists)
			var got []string
			for _, s := range g.Floating.Sources {
				got = append(got, sourceText(s))
			}
			if !slices.Equal(got, c.want) || len(skipped) > 0 {
				t.Errorf("sources\n%s\nwant\n%s\nskipped: %q", strings.Join(got, "\n"), strings.Join(c.want, "\n"), skipped)
			}
			if want := []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8::1")}; !slices.Equal(g.Floating.Addresses, want) {
				t.Errorf("addresses %s", g.Floating.Addresses)
			}
		})
	}
	if g, _ := StateOf(dualGateway, someEgress, []*discoveryv1.EndpointSlice{annotated("203.0.113.1", a)}); g.Floating != nil {
		t.Errorf("an Egress without addresses: %+v", g.Floating)
	}
}

// What can't be understood lets nobody in, and costs the others nothing.
func TestDamagedLists(t *testing.T) {
	a, b := clientEndpoint("a", "10.0.0.8"), clientEndpoint("b", "10.0.0.9")
	badPolicy, badAddress := policySlice("x", 1, "203.0.113.1", nil, a), policySlice("y", 1, "203.0.113.1, ", nil, a)
	badPolicy.Annotations[v2.AnnotationPolicy] = "{}"
	g, skipped := StateOf(dualGateway, withAddresses("0.0.0.0/0"), []*discoveryv1.EndpointSlice{badPolicy, badAddress, policySlice("z", 1, "203.0.113.1", nil, b)})
	if len(skipped) != 2 || len(g.Pods) != 1 || len(g.Floating.Sources) != 1 {
		t.Errorf("skipped %q, pods %v, sources %v", skipped, g.Pods, g.Floating.Sources)
	}
	// An Egress without addresses doesn't need to understand them.
	if g, skipped := StateOf(dualGateway, someEgress, []*discoveryv1.EndpointSlice{badPolicy, badAddress}); len(skipped) > 0 || len(g.Pods) != 1 {
		t.Errorf("without addresses: skipped %q, pods %v", skipped, g.Pods)
	}
}

// A client leaves by the address of the policy that decides where its packets go: the one with the longest prefix, of several the first.
func TestSourcesFollowTheClient(t *testing.T) {
	prefix := func(r *rand.Rand) string {
		bits := 24 + r.IntN(9)
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(r.IntN(256))}), bits).Masked().String()
	}
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 2))
		e := withAddresses("192.0.2.0/24")
		for range r.IntN(3) {
			e.Spec.Destinations = append(e.Spec.Destinations, prefix(r))
		}
		client := clientEndpoint("a", "10.0.0.9")
		var lists []*discoveryv1.EndpointSlice
		for i := range 1 + r.IntN(4) {
			var destinations []string
			for range r.IntN(4) {
				destinations = append(destinations, prefix(r))
			}
			address := fmt.Sprint("203.0.113.", i+1)
			if r.IntN(5) == 0 {
				address = ""
			}
			lists = append(lists, policySlice(fmt.Sprint("p", i), r.IntN(3), address, destinations, client))
		}
		g, skipped := StateOf(dualGateway, e, lists)
		if len(skipped) > 0 {
			t.Fatalf("seed %d: skipped %q", seed, skipped)
		}
		for host := range 256 {
			to := netip.AddrFrom4([4]byte{192, 0, 2, byte(host)})
			var got netip.Addr
			matches := 0
			for _, s := range g.Floating.Sources {
				if !s.Destinations.IsValid() || s.Destinations.Contains(to) {
					got = s.Address
					matches++
				}
			}
			if want := decides(t, e, lists, to); got != want || matches > 1 {
				t.Fatalf("seed %d: %d sources for %s, by %s, want %s:\n%v", seed, matches, to, got, want, g.Floating.Sources)
			}
		}
	}
}

// decides is the address by which a client of all lists reaches a destination.
func decides(t *testing.T, e *v2.Egress, lists []*discoveryv1.EndpointSlice, to netip.Addr) netip.Addr {
	t.Helper()
	type match struct {
		use
		bits int
	}
	var matches []match
	for _, l := range lists {
		u, err := useOf(e, l)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range u.destinations {
			if d.Contains(to) {
				matches = append(matches, match{u, d.Bits()})
			}
		}
	}
	if len(matches) == 0 {
		return netip.Addr{}
	}
	return slices.MinFunc(matches, func(a, b match) int {
		return cmp.Or(cmp.Compare(b.bits, a.bits), policy.Compare(a.Policy, b.Policy))
	}).address.IPv4
}

// ofRouters is an Egress of which each router in a list has the next address.
func ofRouters(routers ...string) *v2.Egress {
	e := withAddresses("0.0.0.0/0", "::/0")
	e.Spec.Addresses.Use, e.Status.Addresses = v2.EgressAddressOfRouter, nil
	for i, r := range routers {
		e.Status.Addresses = append(e.Status.Addresses, v2.EgressAddressStatus{
			Router: r, EgressAddress: v2.EgressAddress{IPv4: fmt.Sprint("203.0.113.", i), IPv6: fmt.Sprintf("2001:db8::%x", i)},
		})
	}
	return e
}

// manyClients lists clients of an annotation and of a policy, which says an address as it did for clients, and has destinations of its own.
func manyClients() (lists []*discoveryv1.EndpointSlice) {
	var some, others []discoveryv1.Endpoint
	for i := range 200 {
		ep := clientEndpoint(fmt.Sprint("p", i), fmt.Sprint("10.0.1.", i), fmt.Sprintf("fd00::1:%x", i))
		some = append(some, ep)
		if i%2 == 0 {
			others = append(others, ep)
		}
	}
	return []*discoveryv1.EndpointSlice{clientSlice("annotated", some...), policySlice("p", 1, "198.51.100.1", []string{"192.0.2.0/24"}, others...)}
}

// leaving are the addresses by which clients leave through a router, by client.
func leaving(t *testing.T, pod string, e *v2.Egress) map[netip.Addr]netip.Addr {
	t.Helper()
	cfg := dualGateway
	cfg.Pod = pod
	g, skipped := StateOf(cfg, e, manyClients())
	if len(skipped) > 0 {
		t.Fatalf("skipped %q", skipped)
	}
	by := map[netip.Addr]netip.Addr{}
	for _, s := range g.Floating.Sources {
		if _, twice := by[s.Client]; twice || s.Destinations.IsValid() {
			t.Fatalf("client %s has several addresses: %v", s.Client, s)
		}
		by[s.Client] = s.Address
	}
	return by
}

// Through each router clients leave by its own addresses alone, all of which are used, and through one without any by none. A client's
// address stays the same whatever others the router gets or loses.
func TestRoutersUseTheirOwnAddresses(t *testing.T) {
	one := leaving(t, "a", ofRouters("a", "b", "b", "b", ""))
	for client, address := range one {
		if want := map[bool]string{true: "203.0.113.0", false: "2001:db8::"}[client.Is4()]; address.String() != want {
			t.Fatalf("%s leaves by %s, want %s", client, address, want)
		}
	}
	three := leaving(t, "b", ofRouters("a", "b", "b", "b", ""))
	counts := map[netip.Addr]int{}
	for _, address := range three {
		counts[address]++
	}
	if len(one) != 400 || len(three) != 400 || len(counts) != 6 {
		t.Fatalf("%d and %d of 400 addresses of clients leave, by %v", len(one), len(three), counts)
	}
	for address, n := range counts {
		if n < 40 || n > 100 {
			t.Errorf("%d of 200 clients leave by %s, which is one of three", n, address)
		}
	}
	two := leaving(t, "b", ofRouters("a", "b", "c", "b", ""))
	for client, address := range three {
		if lost := address.String() == "203.0.113.2" || address.String() == "2001:db8::2"; !lost && two[client] != address {
			t.Errorf("%s leaves by %s and, when the router has lost another address, by %s", client, address, two[client])
		}
	}
	for pod, e := range map[string]*v2.Egress{"d": ofRouters("a", "b", ""), "": ofRouters("a", "")} {
		if by := leaving(t, pod, e); len(by) > 0 {
			t.Errorf("through router %q, which has no address, %d clients leave", pod, len(by))
		}
	}
}

// What an EndpointSlice says for the use Client doesn't matter to routers with addresses of their own: not even what can't be understood.
func TestListsForAnotherUse(t *testing.T) {
	l := policySlice("x", 1, "203.0.113.1, ", nil, clientEndpoint("a", "10.0.0.8"))
	l.Annotations[v2.AnnotationPolicy] = "{}"
	cfg := dualGateway
	cfg.Pod = "a"
	if g, skipped := StateOf(cfg, ofRouters("a"), []*discoveryv1.EndpointSlice{l}); len(skipped) > 0 || len(g.Floating.Sources) != 1 {
		t.Errorf("skipped %q, sources %v", skipped, g.Floating.Sources)
	}
}

// Another address of a policy changes no tunnel.
func TestAddressChangesNoTunnel(t *testing.T) {
	state := func(address string) State {
		g, _ := StateOf(dualGateway, withAddresses("0.0.0.0/0"), []*discoveryv1.EndpointSlice{policySlice("p", 1, address, nil, clientEndpoint("a", "10.0.0.9"))})
		return g
	}
	before, after := state("203.0.113.1"), state("203.0.113.2")
	if c, ok := after.Since(before); !ok || len(c.Came)+len(c.Left) > 0 || after.Equal(before) {
		t.Errorf("change %+v, %t; equal: %t", c, ok, after.Equal(before))
	}
	if _, ok := before.Since(state("203.0.113.1")); ok {
		t.Error("there is a change of nothing")
	}
}

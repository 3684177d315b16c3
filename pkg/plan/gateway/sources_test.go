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

package policy

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/floating"
)

// What a policy gets of an Egress with floating addresses, and what it says when it gets none.
func TestResolveAddress(t *testing.T) {
	with := &v2.Egress{Spec: v2.EgressSpec{Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient}}}
	with.Namespace, with.Name = "internet", "nat"
	with.Status.Addresses = []v2.EgressAddressStatus{{Block: "b", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.1", IPv6: "2001:db8::1"}}}
	without, ofRouters := &v2.Egress{}, with.DeepCopy()
	ofRouters.Spec.Addresses.Use = v2.EgressAddressOfRouter
	wants := &v2.EgressAddress{IPv4: "198.51.100.1"}
	for _, c := range []struct {
		name          string
		egress        *v2.Egress
		wants         *v2.EgressAddress
		given         floating.Given
		block, reason string
	}{
		{"an Egress without addresses", without, nil, floating.Given{}, "", ""},
		{"an Egress without addresses, and one that is named", without, wants, floating.Given{}, "", ReasonNoAddresses},
		{"addresses of routers", ofRouters, nil, floating.Given{}, "", ""},
		{"addresses of routers, and one that was given before", ofRouters, nil, floating.Given{Address: "b"}, "", ""},
		{"addresses of routers, and one that is named", ofRouters, wants, floating.Given{}, "", ReasonNoAddresses},
		{"given", with, nil, floating.Given{Address: "b"}, "b", ""},
		{"nothing was asked for", with, nil, floating.Given{}, "", ""},
		{"none left", with, nil, floating.Given{Reason: floating.NoAddress}, "", "NoAddress"},
		{"another", with, wants, floating.Given{Reason: floating.NoSuchAddress}, "", "NoSuchAddress"},
		{"another namespace's", with, wants, floating.Given{Reason: floating.AddressTaken}, "", "AddressTaken"},
		{"full", with, wants, floating.Given{Reason: floating.AddressFull}, "", "AddressFull"},
	} {
		a, p := Facts{Use: v2.EgressUse{Address: c.wants}, Given: c.given}.resolveAddress(c.egress)
		block, reason := "", ""
		if a != nil {
			block = a.Block
		}
		if p != nil {
			reason = p.reason
			if c.wants != nil && reason != ReasonNoAddresses && !strings.Contains(p.message, wants.IPv4) {
				t.Errorf("%s: the message doesn't name the address: %s", c.name, p.message)
			}
		}
		if block != c.block || reason != c.reason {
			t.Errorf("%s: block %q, reason %q, want %q, %q", c.name, block, reason, c.block, c.reason)
		}
	}
	if _, p := (Facts{Given: floating.Given{Reason: floating.NoAddress}}).resolveAddress(&v2.Egress{Spec: with.Spec}); p == nil || !strings.Contains(p.message, v2.EgressAddressesReady) {
		t.Errorf("an Egress that has got no address yet: %+v", p)
	}
	for want, a := range map[string]*v2.EgressAddress{
		"":                                   nil,
		"b":                                  {IPv4: "198.51.100.1", IPv6: "2001:db8:0::1"},
		"none: 198.51.100.1 and 2001:db8::2": {IPv4: "198.51.100.1", IPv6: "2001:db8::2"},
		"none: 198.51.100.2":                 {IPv4: "198.51.100.2"},
	} {
		if got := Wanted(with, a); got != want {
			t.Errorf("%+v is %q, want %q", a, got, want)
		}
	}
}

// A policy says since when its pods leave by its address, at its place.
func TestSince(t *testing.T) {
	w := newWorld()
	e := w.egress("internet/nat", "0.0.0.0/0")
	e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfClient}
	at := func(second int64) metav1.Time { return metav1.NewTime(time.Unix(second, 0)) }
	has := func(node, router string, since int64) {
		held := at(since)
		e.Status.Addresses = []v2.EgressAddressStatus{
			{Block: "a", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.1"}, Node: node, Router: router, Since: &held},
			{Block: "b", EgressAddress: v2.EgressAddress{IPv4: "198.51.100.2"}, Node: node, Router: router, Since: &held},
		}
	}
	w.facts.Given = floating.Given{Address: "a"}
	for i, step := range []struct {
		name string
		do   func()
		want int64 // 0 is none
	}{
		{"the address is given", func() { has("n1", "r1", 5) }, 100},
		{"nothing changes", func() {}, 100},
		{"the number of clients changes", func() { w.facts.Clients = 3 }, 100},
		{"another node has taken it", func() { has("n2", "r2", 102) }, 102},
		{"the record of the holder is written anew", func() { has("n2", "r2", 104) }, 102},
		{"another router of the node has it", func() { has("n2", "r3", 104) }, 105},
		{"another address", func() { w.facts.Given.Address = "b" }, 106},
		{"no node has it", func() { has("", "", 0); e.Status.Addresses[1].Since = nil }, 107},
		{"a node has it again", func() { has("n2", "r3", 108) }, 108},
		{"a status of an earlier version", func() { w.facts.Status.Since = nil }, 108},
		{"no address any more", func() { w.facts.Given = floating.Given{Reason: floating.NoAddress} }, 0},
		{"no Egress", func() { w.facts.Given = floating.Given{Address: "a"}; delete(w.egresses, "internet/nat") }, 0},
	} {
		step.do()
		w.facts.Now = at(100 + int64(i))
		w.facts.Status = Status(w.facts)
		if got := w.facts.Status.Since; (got == nil) != (step.want == 0) || got != nil && got.Unix() != step.want {
			t.Errorf("%s: since %v, want %d", step.name, got, step.want)
		}
	}
}

// The status of a policy names the addresses of all nodes by which its pods leave; the node, and the router, if there is one.
func TestNodeAddresses(t *testing.T) {
	at := func(router, node, ipv4, ipv6 string) v2.EgressNodeAddress {
		return v2.EgressNodeAddress{Router: router, Node: node, EgressAddress: v2.EgressAddress{IPv4: ipv4, IPv6: ipv6}}
	}
	for _, c := range []struct {
		name                  string
		routers               []v2.EgressNodeAddress
		address, node, router string
	}{
		{"no router", nil, "", "", ""},
		{"one router", []v2.EgressNodeAddress{at("r1", "a", "192.0.2.1", "2001:db8::1")}, "192.0.2.1 and 2001:db8::1", "a", "r1"},
		{"two on one node", []v2.EgressNodeAddress{at("r1", "a", "192.0.2.1", ""), at("r2", "a", "192.0.2.1", "")}, "192.0.2.1", "a", ""},
		{"two nodes", []v2.EgressNodeAddress{at("r1", "a", "192.0.2.1", ""), at("r2", "b", "192.0.2.2", "")}, "192.0.2.1, 192.0.2.2", "", ""},
	} {
		st := v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{}}
		Facts{}.locate(&st, &v2.Egress{Status: v2.EgressStatus{NodeAddresses: c.routers}})
		if st.Summary.Address != c.address || st.Node != c.node || st.Router != c.router {
			t.Errorf("%s: address %q, node %q, router %q", c.name, st.Summary.Address, st.Node, st.Router)
		}
	}
	ofNodes := &v2.Egress{Spec: v2.EgressSpec{Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfNode}}}
	if _, p := (Facts{Use: v2.EgressUse{Address: &v2.EgressAddress{IPv4: "192.0.2.1"}}}).resolveAddress(ofNodes); p == nil || p.reason != ReasonNoAddresses {
		t.Errorf("an address of a policy is %+v", p)
	}
}

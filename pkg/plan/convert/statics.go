package convert

import (
	"fmt"
	"net/netip"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// staticName is the name of the Egress, and of the AddressPool, of all StaticEgressIPs.
const staticName = "static-egress-ip"

// staticRule is a rule of a StaticEgressIP that does something.
type staticRule struct {
	of      source[staticEgressIP]
	index   int
	service string
	dests   []netip.Prefix
	address netip.Addr
}

// field is the path of the rule, or of a field of it.
func (r staticRule) field(name string) string {
	path := fmt.Sprintf("spec.rules[%d]", r.index)
	if name != "" {
		path += "." + name
	}
	return path
}

// statics converts StaticEgressIPs: their rules become policies of one Egress, which has all addresses.
func (c *conversion) statics() {
	var rules []staticRule
	for _, s := range c.in.statics {
		if len(s.object.Spec.Rules) == 0 {
			c.note(s.origin, "spec.rules", "there is none, so that it does nothing", "")
		}
		for i := range s.object.Spec.Rules {
			if r, ok := c.rule(staticRule{of: s, index: i}); ok {
				rules = append(rules, r)
			}
		}
	}
	if len(rules) == 0 {
		return
	}
	book := &addressBook{pairs: map[netip.Addr]pair{}}
	users := map[netip.Addr]map[string]bool{}
	var dests []netip.Prefix
	var from []Origin
	for _, r := range rules {
		if !slices.Contains(from, r.of.origin) {
			from = append(from, r.of.origin)
		}
		book.add(only(r.address))
		if users[r.address] == nil {
			users[r.address] = map[string]bool{}
		}
		users[r.address][r.of.origin.Namespace] = true
		dests = append(dests, outside(r.dests, dests)...)
	}
	if dests = widest(dests); len(dests) > maxDestinations {
		dests = everything(true, false, nil)
	}
	subnets, _ := book.subnets(nil)
	list, _ := book.list(pair{})
	name := c.rename(staticName)
	pool := &v2.AddressPool{
		TypeMeta: ofKind("AddressPool"), ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v2.AddressPoolSpec{Purpose: v2.PurposeFloating, FloatingNamespaces: []string{c.EgressNamespace}, Announce: v2.AnnounceNeighbor, Subnets: subnets},
	}
	e := &v2.Egress{
		TypeMeta: ofKind("Egress"), ObjectMeta: metav1.ObjectMeta{Namespace: c.EgressNamespace, Name: name},
		Spec: v2.EgressSpec{
			Destinations: texts(dests), Replicas: 2, Peering: v2.EgressPeeringDirect,
			Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: name, List: list},
		},
	}
	for _, p := range book.order {
		if len(users[p.ipv4]) > 1 {
			e.Spec.Addresses.Shared = append(e.Spec.Addresses.Shared, p.ipv4.String())
		}
	}
	c.add(pool, from...)
	c.add(e, from...)
	c.overlaps(rules)
	for _, r := range rules {
		c.staticPolicy(r, e, book)
	}
}

// rule reads a rule. Nothing validates them there, so that one that can't be understood does nothing.
func (c *conversion) rule(r staticRule) (staticRule, bool) {
	o, said := r.of.origin, r.of.object.Spec.Rules[r.index]
	const nothing = ", so that the rule does nothing there: it is left out"
	if bad := validation.IsDNS1035Label(said.ServiceName); len(bad) > 0 {
		c.lost(o, r.field("service-name"), fmt.Sprintf("%.100q isn't the name of a Service", said.ServiceName)+nothing, "correct it, or take the rule out")
		return r, false
	}
	r.service = said.ServiceName
	address, err := netip.ParseAddr(said.EgressIP)
	if err != nil || !address.Is4() || !sendable(address) {
		c.lost(o, r.field("egressip"), fmt.Sprintf("%.100q isn't an IPv4 address", said.EgressIP)+nothing, "correct it, or take the rule out")
		return r, false
	}
	r.address = address
	if p, _, err := prefix(said.CIDR, true); err != nil || !p.Addr().Is4() {
		c.lost(o, r.field("cidr"), fmt.Sprintf("%.100q isn't an IPv4 range", said.CIDR)+nothing, "correct it, or take the rule out")
		return r, false
	}
	r.dests, _ = c.ranges(o, r.field("cidr"), []string{said.CIDR}) // it was read before
	return r, len(r.dests) > 0
}

// overlaps says where the former system takes the rule that was inserted last, and Coil the one with the smallest range.
func (c *conversion) overlaps(rules []staticRule) {
	for i, r := range rules {
		var same, overlapping *staticRule
		for j, other := range rules[:i] {
			switch {
			case other.of.origin.Namespace != r.of.origin.Namespace || other.service != r.service:
			case r.dests[0] == other.dests[0]:
				same = &rules[j]
			case r.dests[0].Overlaps(other.dests[0]):
				overlapping = &rules[j]
			}
		}
		if same != nil {
			c.lost(r.of.origin, r.field("cidr"), fmt.Sprintf("%s of %s has the same Service and range: with Coil the policy that was made first decides, and there the rule that was inserted last", same.field(""), same.of.origin.Object()), "take one of them out")
		} else if overlapping != nil {
			c.note(r.of.origin, r.field("cidr"), fmt.Sprintf("%s of %s has the same Service and a range that overlaps: with Coil the smaller range decides, and there the rule that was inserted last", overlapping.field(""), overlapping.of.origin.Object()), "")
		}
	}
}

// ruleName is the name of the policy of a rule.
func (c *conversion) ruleName(r staticRule) string {
	const most = 253
	o := r.of.origin
	name := fmt.Sprintf("%s-%d", o.Name, r.index)
	if len(name) > most || c.policyNames[o.Namespace+"/"+name] {
		name = marked(name, "StaticEgressIP "+name, most)
	}
	return name
}

// staticPolicy makes the policy of a rule.
func (c *conversion) staticPolicy(r staticRule, e *v2.Egress, book *addressBook) {
	if _, ok := book.pairs[r.address]; !ok {
		c.lost(r.of.origin, r.field("egressip"), fmt.Sprintf("an Egress has %d addresses, an AddressPool %d subnets and a list %d entries at most, so that this one is left out: the policy isn't accepted, and drops what its pods send", maxAddresses, maxSubnets, maxList),
			"make a second AddressPool and Egress for it, and name that in the policy")
	}
	p := &v2.EgressPolicy{
		TypeMeta:   ofKind("EgressPolicy"),
		ObjectMeta: metadata(r.of.origin.Namespace, c.ruleName(r), r.of.object.Metadata),
	}
	p.Spec.Egress = &v2.EgressReference{Namespace: e.Namespace, Name: e.Name}
	p.Spec.Services, p.Spec.Destinations = []string{r.service}, texts(r.dests)
	p.Spec.Address, p.Spec.OnFailure = &v2.EgressAddress{IPv4: r.address.String()}, c.OnFailure
	c.add(p, r.of.origin)
}

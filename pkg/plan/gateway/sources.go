package gateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/floating"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// use is what lets the clients of some EndpointSlices use an Egress: a policy, or their annotation, which counts as the oldest one.
type use struct {
	policy.Policy
	// destinations are those that its clients reach, as they see it themselves.
	destinations []netip.Prefix
	// address is the floating one by which they leave; invalid for none.
	address ipam.Address
	pods    []Pod
}

func (u use) addressIn(f dataplane.Family) netip.Addr {
	if f == dataplane.IPv4 {
		return u.address.IPv4
	}
	return u.address.IPv6
}

// useOf returns what an EndpointSlice lists clients for. It matters only if clients have floating addresses.
func useOf(e *v2.Egress, list *discoveryv1.EndpointSlice) (use, error) {
	if !e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		return use{}, nil
	}
	u := use{Policy: policy.Annotation(types.NamespacedName{Namespace: e.Namespace, Name: e.Name})}
	if list.Labels[v2.LabelPolicyEgress] != "" {
		o, err := policy.ParseOrigin(list.Annotations[v2.AnnotationPolicy])
		if err != nil {
			return use{}, fmt.Errorf("annotation %s: %w", v2.AnnotationPolicy, err)
		}
		u.Policy = policy.Policy{Name: o.Policy(), Created: o.Created, Destinations: o.Destinations}
	}
	u.destinations = client.EgressOf(e, nil).By(u.Policy).Destinations
	if text := list.Annotations[v2.AnnotationAddress]; text != "" {
		var addrs []netip.Addr
		for part := range strings.SplitSeq(text, ",") {
			a, err := netip.ParseAddr(part)
			if err != nil {
				return use{}, fmt.Errorf("annotation %s: %w", v2.AnnotationAddress, err)
			}
			addrs = append(addrs, a)
		}
		u.address = ipam.AddressOf(addrs...)
	}
	return u, nil
}

// Untranslated returns the families for which a router still lacks a transit address, if its Egress has use: Node. In these families clients can't
// open connections.
func Untranslated(cfg Config, e *v2.Egress) (families []dataplane.Family) {
	if !e.Spec.Addresses.For(v2.EgressAddressOfNode) {
		return nil
	}
	for _, own := range cfg.Addresses {
		f := dataplane.FamilyOf(own)
		if !slices.ContainsFunc(cfg.Transits, func(a netip.Addr) bool { return dataplane.FamilyOf(a) == f }) {
			families = append(families, f)
		}
	}
	return families
}

// floatingOf returns how clients leave by other addresses than the router's own: by floating ones, or by those that the node translates. It is nil if the
// Egress has none. The pods of uses are the clients.
func floatingOf(cfg Config, e *v2.Egress, own map[dataplane.Family]netip.Addr, uses []use) *ruleset.GatewayFloating {
	if e.Spec.Addresses == nil {
		return nil
	}
	f := &ruleset.GatewayFloating{}
	if e.Spec.Addresses.For(v2.EgressAddressOfNode) {
		f.Addresses = slices.DeleteFunc(slices.Clone(cfg.Transits), func(a netip.Addr) bool { return !own[dataplane.FamilyOf(a)].IsValid() })
		f.Sources = sorted(drawn(f.Addresses, uses))
		return f
	}
	var has []netip.Addr // of the router
	for _, s := range e.Status.Addresses {
		for _, text := range []string{s.IPv4, s.IPv6} {
			a, err := netip.ParseAddr(text)
			if err != nil || !own[dataplane.FamilyOf(a)].IsValid() {
				continue
			}
			f.Addresses = append(f.Addresses, a)
			if cfg.Pod != "" && s.Router == cfg.Pod {
				has = append(has, a)
			}
		}
	}
	if e.Spec.Addresses.For(v2.EgressAddressOfRouter) {
		f.Sources = sorted(drawn(has, uses))
	} else {
		f.Sources = sorted(chosen(uses))
	}
	return f
}

func sorted(sources []ruleset.GatewaySource) []ruleset.GatewaySource {
	slices.SortFunc(sources, func(a, b ruleset.GatewaySource) int {
		return cmp.Or(a.Client.Compare(b.Client), a.Destinations.From().Compare(b.Destinations.From()))
	})
	return sources
}

// drawn returns which of a router's addresses each client leaves by: they are drawn by the client's address, so that a client keeps its one, and
// no others than theirs change when an address comes or goes.
func drawn(has []netip.Addr, uses []use) (sources []ruleset.GatewaySource) {
	addrs, hashes := map[dataplane.Family][]netip.Addr{}, map[dataplane.Family][]uint64{}
	for _, a := range has {
		f := dataplane.FamilyOf(a)
		addrs[f], hashes[f] = append(addrs[f], a), append(hashes[f], floating.Hash(a.String()))
	}
	known := map[netip.Addr]bool{}
	for _, u := range uses {
		for _, p := range u.pods {
			f := dataplane.FamilyOf(p.Addr)
			if len(addrs[f]) == 0 || known[p.Addr] {
				continue
			}
			known[p.Addr] = true
			sources = append(sources, ruleset.GatewaySource{Client: p.Addr, Address: addrs[f][floating.Draw(floating.Hash(p.Addr.String()), hashes[f])]})
		}
	}
	return sources
}

// chosen returns the addresses that the uses of clients say.
func chosen(uses []use) (sources []ruleset.GatewaySource) {
	uses = slices.SortedStableFunc(slices.Values(uses), func(a, b use) int { return policy.Compare(a.Policy, b.Policy) })
	of := map[netip.Addr][]int{} // the uses of each client in this order, without a second one of the same policy
	for i, u := range uses {
		for _, p := range u.pods {
			have := of[p.Addr]
			if len(have) == 0 || policy.Compare(uses[have[len(have)-1]].Policy, u.Policy) != 0 {
				of[p.Addr] = append(have, i)
			}
		}
	}
	shares := map[string][]share{}
	for addr, i := range of {
		if len(i) == 1 && uses[i[0]].Destinations == nil { // most likely
			if to := uses[i[0]].addressIn(dataplane.FamilyOf(addr)); to.IsValid() {
				sources = append(sources, ruleset.GatewaySource{Client: addr, Address: to})
			}
			continue
		}
		key := fmt.Sprint(dataplane.FamilyOf(addr), i)
		all, known := shares[key]
		if !known {
			all = shared(uses, i, dataplane.FamilyOf(addr))
			shares[key] = all
		}
		for _, s := range all {
			sources = append(sources, ruleset.GatewaySource{Client: addr, Destinations: s.IPRange, Address: s.address})
		}
	}
	return sources
}

// share is a range of destinations, and the address by which a client reaches them.
type share struct {
	netipx.IPRange
	address netip.Addr
}

// shared returns which of some uses, in the order of their precedence, decides for which destinations of a family: that with the longest
// prefix, of several with the same the first. Destinations for which the use has no address are left out.
func shared(uses []use, some []int, f dataplane.Family) []share {
	by := map[netip.Prefix]int{}
	var prefixes []netip.Prefix
	for _, i := range some {
		for _, d := range uses[i].destinations {
			if _, taken := by[d]; !taken && dataplane.FamilyOf(d.Addr()) == f {
				by[d] = i
				prefixes = append(prefixes, d)
			}
		}
	}
	slices.SortFunc(prefixes, func(a, b netip.Prefix) int { return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), a.Compare(b)) })
	sets := map[int]*netipx.IPSetBuilder{}
	for _, i := range some {
		sets[i] = &netipx.IPSetBuilder{}
	}
	for _, p := range prefixes {
		for _, set := range sets {
			set.RemovePrefix(p)
		}
		sets[by[p]].AddPrefix(p)
	}
	var all []share
	for i, b := range sets {
		address := uses[i].addressIn(f)
		set, _ := b.IPSet() // an invalid prefix, of which it tells, is in no destination
		for _, r := range set.Ranges() {
			if address.IsValid() {
				all = append(all, share{r, address})
			}
		}
	}
	return all
}

// Allows says whether clients may reach a destination.
func (g State) Allows(to netip.Addr) bool {
	return slices.ContainsFunc(g.Destinations, func(p netip.Prefix) bool { return p.Contains(to) })
}

// SourceOf returns the address by which a client's connections to a destination leave the router; not valid if none is opened.
func (g State) SourceOf(client, to netip.Addr) netip.Addr {
	if g.Floating == nil {
		i := slices.IndexFunc(g.Addresses, func(a netip.Addr) bool { return dataplane.FamilyOf(a) == dataplane.FamilyOf(to) })
		if i < 0 {
			return netip.Addr{}
		}
		return g.Addresses[i]
	}
	var rest netip.Addr
	for _, s := range g.Floating.Sources {
		switch {
		case s.Client != client:
		case !s.Destinations.IsValid():
			rest = s.Address
		case s.Destinations.Contains(to):
			return s.Address
		}
	}
	return rest
}

package pools

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// Others are the objects that may use addresses of a pool. The pool itself may be among them.
type Others struct {
	Pools    []*v2.AddressPool
	Nodes    []*corev1.Node
	Services []*networkingv1.ServiceCIDR
}

// Overlapping returns the condition that names the other users of a pool's addresses.
func Overlapping(pool *v2.AddressPool, o Others) metav1.Condition {
	own := Ranges(pool)
	overlaps := func(r ipam.Range) bool { return slices.ContainsFunc(own, r.Overlaps) }
	var others []string
	for _, p := range o.Pools {
		if p.Name == pool.Name {
			continue
		}
		theirs := Ranges(p)
		if !slices.ContainsFunc(theirs, overlaps) {
			continue
		}
		prefixes := Prefixes(p)
		i := slices.IndexFunc(prefixes, func(p netip.Prefix) bool {
			return slices.ContainsFunc(theirs, func(r ipam.Range) bool { return r.Overlaps(ipam.RangeOf(p)) && overlaps(r) })
		})
		others = append(others, fmt.Sprintf("AddressPool %s (%s)", p.Name, prefixes[i]))
	}
	for _, s := range o.Services {
		for _, cidr := range s.Spec.CIDRs {
			if p, err := netip.ParsePrefix(cidr); err == nil && overlaps(ipam.RangeOf(p.Masked())) {
				others = append(others, fmt.Sprintf("ServiceCIDR %s (%s)", s.Name, cidr))
			}
		}
	}
	for _, n := range o.Nodes {
		for _, ip := range plan.NodeAddrs(n, corev1.NodeInternalIP, corev1.NodeExternalIP) {
			if overlaps(ipam.Range{First: ip, Last: ip}) {
				others = append(others, fmt.Sprintf("Node %s (%s)", n.Name, ip))
			}
		}
	}
	if len(others) == 0 {
		return metav1.Condition{
			Type: v2.PoolOverlapping, Status: metav1.ConditionFalse, Reason: ReasonNoOverlap,
			Message: "Nothing else uses addresses of the pool",
		}
	}
	slices.Sort(others)
	return metav1.Condition{
		Type: v2.PoolOverlapping, Status: metav1.ConditionTrue, Reason: ReasonOverlap,
		Message: "The same addresses are used by " + plan.Enumerate(others),
	}
}

// Prefixes returns the prefixes of a pool that can be understood, whatever is
// wrong with the others.
func Prefixes(p *v2.AddressPool) []netip.Prefix {
	var ps []netip.Prefix
	for _, s := range p.Spec.Subnets {
		ps = append(ps, ipam.Prefixes(s.IPv4, s.IPv6)...)
	}
	return ps
}

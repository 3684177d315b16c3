// Package cluster derives which addresses are those of the cluster: of its pods, nodes and Services.
//
// It must not know what clients and routers make of them.
package cluster

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

const (
	// maxInCluster is how many ranges the status of an Egress may have, and maxCoarse how many of
	// these are coarse.
	maxInCluster = 4096
	maxCoarse    = 64
)

// Facts is all that the ranges of a cluster depend on.
type Facts struct {
	// Pools are those of Coil; nil when another network plugin gives pods their addresses,
	// by what Nodes say.
	Pools    []*v2.AddressPool
	Nodes    []*corev1.Node
	Services []*networkingv1.ServiceCIDR
	// ForeignPods says that pods have their addresses from another network plugin.
	ForeignPods bool
	// External are the ranges in which ExternalIPs of Nodes count.
	External []netip.Prefix
}

// Ranges are the ranges of pods, nodes and Services.
type Ranges struct {
	// all are sorted, none inside another one, and neighbours as one.
	all []netip.Prefix
	// coarse are the private ones among them, widened to a few, none wider than a private range.
	coarse []netip.Prefix
}

// RangesOf returns the ranges of a cluster.
func RangesOf(f Facts) Ranges {
	var all []netip.Prefix
	for _, p := range f.Pools {
		all = append(all, pools.Prefixes(p)...)
	}
	for _, s := range f.Services {
		all = append(all, prefixes.Valid(s.Spec.CIDRs)...)
	}
	for _, n := range f.Nodes {
		for _, a := range f.inside(n) {
			all = append(all, netip.PrefixFrom(a, a.BitLen()))
		}
		if f.ForeignPods {
			all = append(all, prefixes.Valid(n.Spec.PodCIDRs)...)
		}
	}
	r := Ranges{all: prefixes.Aggregate(all)}
	r.coarse = prefixes.Fewer(prefixes.Private(r.all), maxCoarse)
	return r
}

// inside returns the addresses of a Node that are the cluster's.
func (f Facts) inside(n *corev1.Node) []netip.Addr {
	addrs := plan.NodeInternalIPs(n)
	for _, a := range plan.NodeAddrs(n, corev1.NodeExternalIP) {
		if prefixes.Within(netip.PrefixFrom(a, a.BitLen()), f.External) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// For returns the ranges that concern an Egress, sorted. Public ones are spared by its clients, and
// served by its routers. So are private ones inside of a private destination. All others are kept off
// its tunnels by rules, and are there coarsely: until the status follows a new destination, its clients
// spare these. Too many ranges are widened to fewer, by as few addresses as possible.
func (r Ranges) For(e *v2.Egress) []netip.Prefix {
	private := prefixes.Private(prefixes.Valid(e.Spec.Destinations))
	inside := func(p netip.Prefix) bool { return prefixes.Within(p, private) }
	fine := slices.DeleteFunc(slices.Clone(r.all), func(p netip.Prefix) bool {
		return prefixes.Within(p, dataplane.PrivateRanges) && !inside(p)
	})
	coarse := slices.DeleteFunc(slices.Clone(r.coarse), inside)
	all := slices.Concat(prefixes.Fewer(fine, maxInCluster-maxCoarse), coarse)
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

package plan

import (
	mathbits "math/bits"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
)

const (
	// maxInCluster is how many ranges the status of an Egress may have, and maxCoarse how many of
	// these are coarse.
	maxInCluster = 4096
	maxCoarse    = 64
	// maxInternalIPs is how many InternalIPs of a Node count: kubelet writes them, and that of a node
	// that was taken over must not fill, or widen, the ranges of all Egresses, nor take all blocks.
	maxInternalIPs = 16
)

// ClusterFacts is all that the ranges of a cluster depend on.
type ClusterFacts struct {
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

// ClusterRanges are the ranges of pods, nodes and Services.
type ClusterRanges struct {
	// all are sorted, none inside another one, and neighbours as one.
	all []netip.Prefix
	// coarse are the private ones among them, widened to a few, none wider than a private range.
	coarse []netip.Prefix
}

// NewClusterRanges returns the ranges of a cluster.
func NewClusterRanges(f ClusterFacts) ClusterRanges {
	var all []netip.Prefix
	for _, p := range f.Pools {
		all = append(all, prefixesOf(p)...)
	}
	for _, s := range f.Services {
		all = append(all, validPrefixes(s.Spec.CIDRs)...)
	}
	for _, n := range f.Nodes {
		for _, a := range f.inside(n) {
			all = append(all, netip.PrefixFrom(a, a.BitLen()))
		}
		if f.ForeignPods {
			all = append(all, validPrefixes(n.Spec.PodCIDRs)...)
		}
	}
	r := ClusterRanges{all: Aggregate(all)}
	r.coarse = fewer(privateOnes(r.all), maxCoarse)
	return r
}

// inside returns the addresses of a Node that are the cluster's.
func (f ClusterFacts) inside(n *corev1.Node) []netip.Addr {
	addrs := NodeInternalIPs(n)
	for _, a := range addrsOf(n, corev1.NodeExternalIP) {
		if within(netip.PrefixFrom(a, a.BitLen()), f.External) {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// For returns the ranges that concern an Egress, sorted. Public ones are spared by its clients, and
// served by its routers. So are private ones inside of a private destination. All others are kept off
// its tunnels by rules, and are there coarsely: until the status follows a new destination, they are
// what its clients spare. Too many ranges are widened to fewer, by as few addresses as possible.
func (r ClusterRanges) For(e *v2.Egress) []netip.Prefix {
	private := privateOnes(validPrefixes(e.Spec.Destinations))
	var fine, coarse []netip.Prefix
	for _, p := range r.all {
		if !within(p, dataplane.PrivateRanges) || within(p, private) {
			fine = append(fine, p)
		}
	}
	for _, p := range r.coarse {
		if !within(p, private) {
			coarse = append(coarse, p)
		}
	}
	all := slices.Concat(fewer(fine, maxInCluster-maxCoarse), coarse)
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// privateOnes returns the private ones of some ranges.
func privateOnes(all []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return !within(p, dataplane.PrivateRanges) })
}

// fewer widens sorted ranges, IPv4 first, until there are no more than limit. Each family has
// half of them at least, and what the other doesn't need: sparse ranges of IPv6 would widen
// those of IPv4, which are short, to half of all addresses.
func fewer(all []netip.Prefix, limit int) []netip.Prefix {
	n := slices.IndexFunc(all, func(p netip.Prefix) bool { return !p.Addr().Is4() })
	if n < 0 {
		n = len(all)
	}
	four, six := all[:n], all[n:]
	four = narrow(four, max(limit/2, limit-len(six)))
	return slices.Concat(four, narrow(six, limit-len(four)))
}

// Cover returns ranges that have all destinations that some have, no more than twice the limit: as few
// others as possible. Private ones stay private, since other rules than those of public ones lead there.
func Cover(all []netip.Prefix, limit int) []netip.Prefix {
	private := privateOnes(all)
	public := slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return slices.Contains(private, p) })
	return slices.Concat(fewer(Aggregate(private), limit), fewer(Aggregate(public), limit))
}

// nodeAddrs returns the addresses of a Node, inside and outside the cluster.
func nodeAddrs(n *corev1.Node) []netip.Addr {
	return addrsOf(n, corev1.NodeInternalIP, corev1.NodeExternalIP)
}

// NodeInternalIPs returns the addresses of a Node inside the cluster: the first ones, since kubelet writes
// them.
func NodeInternalIPs(n *corev1.Node) []netip.Addr {
	addrs := addrsOf(n, corev1.NodeInternalIP)
	return addrs[:min(len(addrs), maxInternalIPs)]
}

// addrsOf leaves names out, even those that read like an address.
func addrsOf(n *corev1.Node, types ...corev1.NodeAddressType) []netip.Addr {
	var out []netip.Addr
	for _, a := range n.Status.Addresses {
		if !slices.Contains(types, a.Type) {
			continue
		}
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			out = append(out, ip.Unmap().WithZone(""))
		}
	}
	return out
}

// Aggregate returns the fewest prefixes that have the same addresses, sorted, IPv4 first.
func Aggregate(all []netip.Prefix) []netip.Prefix {
	all = slices.Clone(all)
	slices.SortFunc(all, netip.Prefix.Compare)
	var out []netip.Prefix
	for _, p := range all {
		if n := len(out); n > 0 && out[n-1].Bits() <= p.Bits() && out[n-1].Overlaps(p) {
			continue
		}
		out = append(out, p)
		// The upper half of a range makes one with the lower half, which may be a half itself.
		for n := len(out); n > 1; n = len(out) {
			both := common(out[n-2], out[n-1])
			if !both.IsValid() || out[n-2].Bits() != out[n-1].Bits() || both.Bits() != out[n-1].Bits()-1 {
				break
			}
			out = append(out[:n-2], both)
		}
	}
	return out
}

// narrow joins neighbours until there are no more than limit, those first whose common
// range is the smallest.
func narrow(all []netip.Prefix, limit int) []netip.Prefix {
	for host := 1; len(all) > limit && host <= 128; host++ {
		var out []netip.Prefix
		for _, p := range all {
			if n := len(out); n > 0 {
				if both := common(out[n-1], p); both.IsValid() && both.Addr().BitLen()-both.Bits() <= host {
					out[n-1] = both
					continue
				}
			}
			out = append(out, p)
		}
		if len(out) < len(all) {
			all = Aggregate(out)
		}
	}
	return all
}

// common returns the longest prefix that has both in it; the zero Prefix if they are not of
// one family.
func common(a, b netip.Prefix) netip.Prefix {
	if a.Addr().BitLen() != b.Addr().BitLen() {
		return netip.Prefix{}
	}
	bits := min(a.Bits(), b.Bits())
	x, y := a.Addr().AsSlice(), b.Addr().AsSlice()
	for i := range x {
		if differs := x[i] ^ y[i]; differs != 0 {
			bits = min(bits, 8*i+mathbits.LeadingZeros8(differs))
			break
		}
	}
	return netip.PrefixFrom(a.Addr(), bits).Masked()
}

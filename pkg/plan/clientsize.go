package plan

import (
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Tenants choose the destinations and the routers of Egresses, and how many of these a pod uses. Each
// destination costs routes in the pod and ranges in the rulesets of the pod and of its node, each address of
// a router a tunnel.
const (
	// MostDestinations is how many different destinations the Egresses of a pod have together.
	MostDestinations = 2048
	// MostTunnels is how many addresses of routers the Egresses of a pod have together.
	MostTunnels = 1024
)

// mostClosing bounds the private and the public ranges that close destinations together.
const mostClosing = 128

// Fit returns the Egresses of a client that are used, the first ones first, and the names of those that
// are more than a pod may have. Their destinations are closed, and others with them if they are scattered.
func Fit(egresses []ClientEgress) (fit []ClientEgress, excess []string) {
	taken := map[netip.Prefix]bool{}
	tunnels := 0
	closing := map[bool][]ClientEgress{} // by OriginatingOnly
	for _, e := range egresses {
		e.Destinations = masked(e.Destinations)
		added := slices.DeleteFunc(slices.Clone(e.Destinations), func(d netip.Prefix) bool { return taken[d] })
		if len(taken)+len(added) > MostDestinations || tunnels+len(e.Routers) > MostTunnels {
			e.Destinations = added
			closing[e.OriginatingOnly] = append(closing[e.OriginatingOnly], e)
			excess = append(excess, e.Name)
			continue
		}
		tunnels += len(e.Routers)
		for _, d := range added {
			taken[d] = true
		}
		fit = append(fit, e)
	}
	for _, originatingOnly := range []bool{false, true} {
		if closed := Closing(closing[originatingOnly], egresses); len(closed.Destinations) > 0 {
			closed.OriginatingOnly = originatingOnly
			fit = append(fit, closed)
		}
	}
	return fit, excess
}

// masked returns each prefix once, sorted and without host bits.
func masked(all []netip.Prefix) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(all))
	for _, p := range all {
		if p = p.Masked(); p.IsValid() {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, comparePrefixes)
	return slices.Compact(out)
}

// Closing returns an Egress, without a name, that closes the destinations of some of a client's Egresses by few
// ranges, and few other addresses. The ranges of the cluster stay spared that all of them spare, but for those
// in which one of the destinations is.
func Closing(some, all []ClientEgress) ClientEgress {
	var closing ClientEgress
	around := map[netip.Prefix]bool{}
	for _, e := range all {
		for _, p := range e.spared() {
			closing.InCluster = append(closing.InCluster, p)
			around[p] = within(p, dataplane.PrivateRanges)
		}
	}
	closing.InCluster = masked(closing.InCluster)
	var outside []netip.Prefix
	for _, e := range some {
		for _, d := range masked(e.Destinations) {
			spared := longest(around, d)
			switch {
			case !spared.IsValid():
				outside = append(outside, d)
			case spared != d: // which no Egress captures
				closing.Destinations = append(closing.Destinations, halves(spared)...)
			}
		}
	}
	closing.Destinations = masked(append(closing.Destinations, Cover(outside, mostClosing)...))
	return closing
}

// longest returns the longest of some prefixes that has all of p, the zero Prefix if there is none.
func longest(among map[netip.Prefix]bool, p netip.Prefix) netip.Prefix {
	for bits := p.Bits(); bits >= 0; bits-- {
		if wider := netip.PrefixFrom(p.Addr(), bits).Masked(); among[wider] {
			return wider
		}
	}
	return netip.Prefix{}
}

// halves splits a range of more than one address.
func halves(p netip.Prefix) []netip.Prefix {
	bits := p.Bits() + 1
	return []netip.Prefix{netip.PrefixFrom(p.Addr(), bits), netip.PrefixFrom(netipx.PrefixLastIP(p), bits).Masked()}
}

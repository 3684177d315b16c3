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
	var more []ClientEgress
	for _, e := range egresses {
		e.Destinations = masked(e.Destinations)
		added := slices.DeleteFunc(slices.Clone(e.Destinations), func(d netip.Prefix) bool { return taken[d] })
		ends := len(e.Peers.Addrs())
		if e.grouped() {
			ends = len(e.Routers)
		}
		if len(taken)+len(added) > MostDestinations || tunnels+ends > MostTunnels {
			e.Destinations = added
			more = append(more, e)
			excess = append(excess, e.Name)
			continue
		}
		tunnels += ends
		for _, d := range added {
			taken[d] = true
		}
		fit = append(fit, e)
	}
	if len(more) == 0 {
		return fit, nil
	}
	return append(fit, Closing(more, fit)...), excess
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

// Closing returns at most two Egresses, without a name, that close the destinations of some of a client's by few
// ranges, and few other addresses. What is closed goes by none of the others that the client uses. The ranges of the
// cluster stay spared, but for those in which a destination is.
func Closing(some, used []ClientEgress) []ClientEgress {
	all := slices.Concat(some, used)
	// around are prefixes that would win over a closed range that isn't longer.
	around := map[netip.Prefix]bool{}
	var destinations netipx.IPSetBuilder
	for _, e := range used {
		for _, d := range e.Destinations {
			around[d.Masked()] = true
		}
	}
	var inCluster, spared []netip.Prefix
	for _, e := range all {
		for _, d := range e.Destinations {
			destinations.AddPrefix(d.Masked())
		}
		inCluster = append(inCluster, e.inCluster()...)
		spared = append(spared, e.spared()...)
	}
	for _, p := range spared {
		around[p] = around[p] || within(p, dataplane.PrivateRanges)
	}
	captured, _ := destinations.IPSet() // an error is of an invalid prefix, which is no destination
	for _, p := range masked(inCluster) {
		if !captured.OverlapsPrefix(p) {
			spared = append(spared, p)
		}
	}
	spared = masked(spared)
	var out []ClientEgress
	for _, originatingOnly := range []bool{false, true} {
		closing := ClientEgress{InCluster: spared, OriginatingOnly: originatingOnly}
		var outside []netip.Prefix
		for _, e := range some {
			if e.OriginatingOnly != originatingOnly {
				continue
			}
			for _, d := range masked(e.Destinations) {
				switch p := longest(around, d); {
				case !p.IsValid():
					outside = append(outside, d)
				case p != d: // which another one has, or none
					closing.Destinations = append(closing.Destinations, netip.PrefixFrom(d.Addr(), p.Bits()+1).Masked())
				}
			}
		}
		closing.Destinations = masked(append(closing.Destinations, Cover(outside, mostClosing)...))
		if len(closing.Destinations) > 0 {
			out = append(out, closing)
		}
	}
	return out
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

package client

import (
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
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

// mostClosed is how many destinations are closed one by one. More of them are closed by ranges that have them all: by at most mostClosing private and
// as many public ones, and by parts of the destinations of Egresses that are used; see Closing.
const (
	mostClosed  = 512
	mostClosing = 128
)

// Fit returns the Egresses of a client that are used, the first ones first, and the names of those that
// are more than a pod may have. Their destinations are closed; see Closing.
func Fit(egresses []Egress) (fit []Egress, excess []string) {
	var taken prefixSet
	tunnels := 0
	counted := map[string]bool{} // Egresses whose tunnels count already
	var more []Egress
	for _, e := range egresses {
		e.Destinations = masked(e.Destinations)
		added := slices.DeleteFunc(slices.Clone(e.Destinations), func(d netip.Prefix) bool { return taken.Get(d) })
		ends := len(e.Peers.Addrs())
		switch {
		case counted[e.Name]:
			ends = 0
		case e.grouped():
			ends = len(e.Routers)
		}
		if taken.Size()+len(added) > MostDestinations || tunnels+ends > MostTunnels {
			e.Destinations = added
			more = append(more, e)
			excess = append(excess, e.String())
			continue
		}
		tunnels += ends
		counted[e.Name] = true
		taken.add(added...)
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
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}

// Closing returns at most two Egresses, without a name, that close the destinations of some of a client's Egresses,
// except destinations that its used Egresses have, too. Up to mostClosed destinations are closed exactly. More are closed
// by few ranges, which also close addresses between the destinations, and up to half of each destination of a used
// Egress, or range of the cluster, that has some of them. No used Egress carries packets to a closed address.
func Closing(some, used []Egress) []Egress {
	// around are prefixes that would win over a closed range that isn't longer.
	var taken, around prefixSet
	for _, e := range used {
		taken.add(e.Destinations...)
		around.add(e.Destinations...)
	}
	var spared []netip.Prefix
	for _, e := range some {
		spared = append(spared, e.spared()...)
	}
	for _, e := range slices.Concat(some, used) {
		around.add(e.spared()...)
	}
	// A destination that one Egress closes altogether isn't open to answers by another one.
	out := []Egress{{InCluster: spared}, {InCluster: spared, OriginatingOnly: true}}
	n := 0
	for i := range out {
		for _, e := range some {
			if e.OriginatingOnly == out[i].OriginatingOnly {
				out[i].Destinations = append(out[i].Destinations, taken.take(masked(e.Destinations))...)
			}
		}
		n += len(out[i].Destinations)
	}
	most, half := mostClosed, false
	if n > mostClosed {
		out = []Egress{joined(out, some, used)}
		most, half = mostClosing, true
	}
	for i := range out {
		out[i].Destinations = around.closing(out[i].Destinations, most, half)
	}
	if len(out) > 1 {
		var altogether prefixSet
		altogether.add(out[0].Destinations...)
		out[1].Destinations = altogether.take(out[1].Destinations)
	}
	return slices.DeleteFunc(out, func(e Egress) bool { return len(e.Destinations) == 0 })
}

// joined returns an Egress with the destinations of those that close, which spares the ranges of the cluster that
// none of the others has. Answers pass only if they pass by all.
func joined(closing, some, used []Egress) Egress {
	all := slices.Concat(some, used)
	one := Egress{OriginatingOnly: !slices.ContainsFunc(all, func(e Egress) bool { return !e.OriginatingOnly })}
	for _, e := range closing {
		one.Destinations = append(one.Destinations, e.Destinations...)
	}
	var destinations prefixSet
	for _, e := range all {
		one.InCluster = append(one.InCluster, e.spared()...)
		destinations.add(e.Destinations...)
	}
	for _, e := range all {
		for _, p := range e.inCluster() {
			if !destinations.OverlapsPrefix(p) {
				one.InCluster = append(one.InCluster, p)
			}
		}
	}
	one.InCluster = masked(one.InCluster)
	return one
}

// closing returns ranges that have some destinations, and that are longer than the prefixes of the set around
// these: halves of such prefixes if wanted, and at most so many private and so many public ones that are in none.
func (s *prefixSet) closing(destinations []netip.Prefix, most int, half bool) []netip.Prefix {
	var inside, outside []netip.Prefix
	for _, d := range destinations {
		p, covered := s.LookupPrefixLPM(d)
		// Rules lead to private destinations before the routes of public ones are asked.
		private := dataplane.PrivateRanges
		switch {
		case !covered, prefixes.Within(d, private) && !prefixes.Within(p, private):
			outside = append(outside, d)
		case half:
			inside = append(inside, netip.PrefixFrom(d.Addr(), min(p.Bits()+1, d.Bits())).Masked())
		default:
			inside = append(inside, d)
		}
	}
	return masked(append(inside, prefixes.Cover(outside, most)...))
}

// prefixSet is a set of prefixes, without invalid ones.
type prefixSet struct{ bart.Lite }

func (s *prefixSet) add(all ...netip.Prefix) {
	for _, p := range all {
		s.Insert(p)
	}
}

// take adds prefixes without host bits, and returns those that weren't there.
func (s *prefixSet) take(all []netip.Prefix) []netip.Prefix {
	var added []netip.Prefix
	for _, p := range all {
		if !s.Get(p) {
			s.Insert(p)
			added = append(added, p)
		}
	}
	return added
}

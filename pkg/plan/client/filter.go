package client

import (
	"maps"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// unrouted are destinations that the kernel doesn't look up in the tables of an Egress, or that no
// node sends on: multicast and limited broadcast.
var unrouted = []netip.Prefix{
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("ff00::/8"),
}

// filterOf returns what nftables does in a client with such Egresses and routes, whose connections
// from the marked ranges are answered by the way they came.
func filterOf(c Client, egresses []Egress, routes []Route, marked []dataplane.Range) *ruleset.Client {
	r := ruleset.Client{Uplink: c.Index, Addresses: c.Address.Addrs(), Port: c.Port, Destinations: captured(routes)}
	for _, e := range egresses {
		r.Peers = append(r.Peers, e.Addresses()...)
	}
	slices.SortFunc(r.Peers, netip.Addr.Compare)
	r.Peers = slices.Compact(r.Peers)
	if len(marked) > 0 {
		r.Originating = &ruleset.Originating{Sources: marked, Mark: dataplane.MarkOriginating, Mask: dataplane.MarkOriginating}
	}
	return &r
}

// Addresses are those from which a client takes packets of the Egress's tunnels: of its Service, from
// which they seem to come if the way there is known to conntrack, and of its routers.
func (e Egress) Addresses() []netip.Addr {
	all := slices.Concat(e.Peers.Addrs(), e.Left)
	for _, r := range e.Routers {
		all = append(all, r.Addr)
	}
	return all
}

// captured returns the addresses that routes lead into tunnels or make unreachable: those of which the
// longest prefix, of the routes and of what is spared, is such a route's.
func captured(routes []Route) []dataplane.Range {
	by := map[netip.Prefix]bool{}
	for _, p := range slices.Concat(dataplane.PrivateRanges, dataplane.LinkLocalRanges, unrouted) {
		by[p] = false
	}
	for _, r := range routes {
		by[r.Dst] = by[r.Dst] || r.Type != dataplane.Throw
	}
	return chosen(by)
}

// chosen returns the addresses whose longest prefix is chosen, sorted and without overlaps.
func chosen(by map[netip.Prefix]bool) []dataplane.Range {
	all := slices.SortedFunc(maps.Keys(by), prefixes.Compare)
	var out []dataplane.Range
	for len(all) > 0 {
		out, all = cover(out, all, by)
	}
	return out
}

// cover adds what is chosen of the first of some sorted prefixes, and returns the prefixes that
// aren't inside of it.
func cover(out []dataplane.Range, all []netip.Prefix, by map[netip.Prefix]bool) ([]dataplane.Range, []netip.Prefix) {
	outer := all[0]
	all = all[1:]
	next := outer.Addr()
	for len(all) > 0 && outer.Overlaps(all[0]) {
		inner := all[0]
		if by[outer] && next.Less(inner.Addr()) {
			out = extend(out, next, inner.Addr().Prev())
		}
		out, all = cover(out, all, by)
		if next = netipx.PrefixLastIP(inner).Next(); !outer.Contains(next) {
			return out, all
		}
	}
	if by[outer] {
		out = extend(out, next, netipx.PrefixLastIP(outer))
	}
	return out, all
}

// extend adds addresses to ranges before them.
func extend(out []dataplane.Range, first, last netip.Addr) []dataplane.Range {
	if n := len(out); n > 0 && out[n-1].Last.Next() == first {
		out[n-1].Last = last
		return out
	}
	return append(out, dataplane.Range{First: first, Last: last})
}

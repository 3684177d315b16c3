package client

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// unrouted are destinations that the kernel doesn't look up in the tables of an Egress, or that no
// node sends on: multicast and limited broadcast.
var unrouted = []netip.Prefix{
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"), netip.MustParsePrefix("ff00::/8"),
}

// filterOf returns the rules of nftables in a client with such Egresses and routes, whose connections
// from the marked ranges are answered by the way they came.
func filterOf(c Client, egresses []Egress, routes []Route, marked []netipx.IPRange) *ruleset.Client {
	r := ruleset.Client{Uplink: c.Index, Addresses: c.Address.Addrs(), Port: c.Port, Destinations: captured(routes), Sources: marked}
	for _, e := range egresses {
		r.Peers = append(r.Peers, e.Addresses()...)
	}
	slices.SortFunc(r.Peers, netip.Addr.Compare)
	r.Peers = slices.Compact(r.Peers)
	return &r
}

// Addresses are those from which a client takes packets of the Egress's tunnels: of its Service, from
// which they seem to come if the way there is known to conntrack, and of its routers.
func (e Egress) Addresses() []netip.Addr {
	all := slices.Concat(e.Peers.Addrs(), e.Left, e.Others)
	for _, r := range e.Routers {
		all = append(all, r.Addr)
	}
	return all
}

// captured returns the addresses that routes lead into tunnels or make unreachable: those of which the
// longest prefix, of the routes and of what is spared, is such a route's.
func captured(routes []Route) []netipx.IPRange {
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
func chosen(by map[netip.Prefix]bool) []netipx.IPRange {
	// Longer prefixes come later. Of one length the chosen ones come first: the set costs what turns between both.
	all := slices.SortedFunc(maps.Keys(by), func(a, b netip.Prefix) int {
		return cmp.Or(cmp.Compare(a.Bits(), b.Bits()), plan.TrueFirst(by[a], by[b]))
	})
	var set netipx.IPSetBuilder
	for _, p := range all {
		if by[p] {
			set.AddPrefix(p)
		} else {
			set.RemovePrefix(p)
		}
	}
	ranges, _ := rangesOf(&set) // an error is of an invalid prefix, which is no destination
	return ranges
}

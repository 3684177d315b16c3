package nft

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// interval are the elements for a range: it ends before an element that says so, or goes to the end of all
// addresses.
func interval(r netipx.IPRange) []nftables.SetElement {
	out := []nftables.SetElement{{Key: r.From().AsSlice()}}
	if end := r.To().Next(); end.IsValid() {
		out = append(out, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
	}
	return out
}

// rangesOf returns the ranges that the elements of a set of intervals stand for; see interval.
func rangesOf(elements []element) []netipx.IPRange {
	slices.SortFunc(elements, func(a, b element) int {
		if c := strings.Compare(a.Key, b.Key); c != 0 || a.end == b.end {
			return c
		}
		if a.end {
			return -1
		}
		return 1
	})
	var out []netipx.IPRange
	var first netip.Addr // of the range that isn't ended yet
	for _, e := range elements {
		a, ok := netip.AddrFromSlice([]byte(e.Key))
		switch {
		case !ok:
		case !e.end:
			first = a
		case first.IsValid():
			out = append(out, netipx.IPRangeFrom(first, a.Prev()))
			first = netip.Addr{}
		}
	}
	if first.IsValid() {
		out = append(out, netipx.IPRangeFrom(first, netipx.PrefixLastIP(netip.PrefixFrom(first, 0))))
	}
	return out
}

// contentOf returns the content of a set with some elements. Of a concatenation each element has the first and the last key
// of its range, in other sets of intervals the end of a range is an element of its own.
func contentOf(interval bool, elements []element) content {
	if interval && !slices.ContainsFunc(elements, func(e element) bool { return e.Last != "" }) {
		return content{ranges: rangesOf(elements)}
	}
	c := content{elements: make([]dataplane.Element, 0, len(elements))}
	for _, e := range elements {
		c.elements = append(c.elements, e.Element)
	}
	return c
}

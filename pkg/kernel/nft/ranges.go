package nft

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// ranged is a set of intervals: the ranges of the family, which are sorted and don't overlap. It never changes:
// its name must tell it apart from sets of other ranges.
func (p protocol) ranged(name string, ranges []dataplane.Range) set {
	return set{name: name, key: p.address, interval: true, ranges: p.ranges(ranges)}
}

// named is a set of intervals whose name has a hash of its ranges. Tenants choose destinations: it must be hard to
// find others with the same hash.
func (p protocol) named(name string, ranges []dataplane.Range) set {
	s := p.ranged(name+p.suffix, ranges)
	sum := sha256.New()
	hashRanges(sum, s.ranges)
	s.name += "_" + hex.EncodeToString(sum.Sum(nil)[:16])
	return s
}

// hashRanges adds ranges to a hash.
func hashRanges(h hash.Hash, ranges []dataplane.Range) {
	for _, r := range ranges {
		h.Write([]byte{byte(r.First.BitLen())})
		h.Write(r.First.AsSlice())
		h.Write(r.Last.AsSlice())
	}
}

// ranges are those of the family.
func (p protocol) ranges(all []dataplane.Range) []dataplane.Range {
	return slices.DeleteFunc(slices.Clone(all), func(r dataplane.Range) bool { return dataplane.FamilyOf(r.First) != p.family })
}

// joined are the ranges of prefixes of the family, without some addresses.
func (p protocol) joined(prefixes []netip.Prefix, without []netip.Addr) []dataplane.Range {
	var b netipx.IPSetBuilder
	for _, x := range prefixes {
		if dataplane.FamilyOf(x.Addr()) == p.family {
			b.AddPrefix(x.Masked())
		}
	}
	for _, a := range without {
		b.Remove(a)
	}
	all, _ := b.IPSet() // an invalid prefix, of which it tells, is in no destination
	var out []dataplane.Range
	for _, r := range all.Ranges() {
		out = append(out, dataplane.Range{First: r.From(), Last: r.To()})
	}
	return out
}

// interval are the elements for a range: it ends before an element that says so, or goes to the end of all
// addresses.
func interval(r dataplane.Range) []nftables.SetElement {
	out := []nftables.SetElement{{Key: r.First.AsSlice()}}
	if end := r.Last.Next(); end.IsValid() {
		out = append(out, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
	}
	return out
}

// rangesOf returns the ranges that the elements of a set of intervals stand for; see interval.
func rangesOf(elements []nftables.SetElement) []dataplane.Range {
	slices.SortFunc(elements, func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.IntervalEnd == b.IntervalEnd {
			return c
		}
		if a.IntervalEnd {
			return -1
		}
		return 1
	})
	var out []dataplane.Range
	var first netip.Addr // of the range that isn't ended yet
	for _, e := range elements {
		a, ok := netip.AddrFromSlice(e.Key)
		switch {
		case !ok:
		case !e.IntervalEnd:
			first = a
		case first.IsValid():
			out = append(out, dataplane.Range{First: first, Last: a.Prev()})
			first = netip.Addr{}
		}
	}
	if first.IsValid() {
		out = append(out, dataplane.Range{First: first, Last: netipx.PrefixLastIP(netip.PrefixFrom(first, 0))})
	}
	return out
}

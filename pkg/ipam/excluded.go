package ipam

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Range is the addresses from First to Last, which are of one family.
type Range struct{ First, Last netip.Addr }

// ParseRange reads an address, a range such as 10.1.2.10-10.1.2.20, or a CIDR.
func ParseRange(text string) (Range, error) {
	if first, last, ok := strings.Cut(text, "-"); ok {
		return parseRange(first, last)
	}
	if strings.Contains(text, "/") {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return Range{}, fmt.Errorf("it is no CIDR: %w", err)
		}
		if p != p.Masked() {
			return Range{}, fmt.Errorf("it has host bits: %s is meant, or the single address %s", p.Masked(), p.Addr())
		}
		return RangeOf(p), nil
	}
	return parseRange(text, text)
}

func parseRange(from, to string) (Range, error) {
	first, err := netip.ParseAddr(strings.TrimSpace(from))
	if err != nil {
		return Range{}, fmt.Errorf("it is no address, range or CIDR: %w", err)
	}
	last, err := netip.ParseAddr(strings.TrimSpace(to))
	switch {
	case err != nil:
		return Range{}, fmt.Errorf("it is no range: %w", err)
	case first.Is4() != last.Is4():
		return Range{}, fmt.Errorf("%s and %s aren't of one family", first, last)
	case last.Less(first):
		return Range{}, fmt.Errorf("%s comes after %s", first, last)
	}
	return Range{first, last}, nil
}

// RangeOf returns the addresses of a prefix.
func RangeOf(p netip.Prefix) Range {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return Range{p.Masked().Addr(), last}
}

// Overlaps says whether two ranges have an address in common.
func (r Range) Overlaps(o Range) bool {
	return r.First.BitLen() == o.First.BitLen() && r.First.Compare(o.Last) <= 0 && o.First.Compare(r.Last) <= 0
}

// contains says whether all of o is in r.
func (r Range) contains(o Range) bool {
	return r.First.BitLen() == o.First.BitLen() && r.First.Compare(o.First) <= 0 && o.Last.Compare(r.Last) <= 0
}

// Without returns what is left of a range without others, in order.
func (r Range) Without(others []Range) []Range {
	left := []Range{r}
	for _, o := range others {
		var rest []Range
		for _, l := range left {
			if !l.Overlaps(o) {
				rest = append(rest, l)
				continue
			}
			if l.First.Less(o.First) {
				rest = append(rest, Range{l.First, o.First.Prev()})
			}
			if o.Last.Less(l.Last) {
				rest = append(rest, Range{o.Last.Next(), l.Last})
			}
		}
		left = rest
	}
	return left
}

// indexes are those of consecutive blocks, both ends included.
type indexes struct{ first, last int64 }

// Without returns the pool whose blocks with an address of one of the ranges aren't to be carved. They keep their indexes. It is an error if a
// range isn't within one subnet.
func (p Pool) Without(ranges []Range) (Pool, error) {
	var excluded []indexes
	for _, r := range ranges {
		if !slices.ContainsFunc(p.subnets, func(s Subnet) bool {
			return slices.ContainsFunc(present(s.IPv4, s.IPv6), func(of netip.Prefix) bool { return RangeOf(of).contains(r) })
		}) {
			return Pool{}, fmt.Errorf("%s isn't within one subnet of the pool", r)
		}
		first := int64(0) // index of the first block of the subnet
		for _, s := range p.subnets {
			n := s.blocks(p.bits)
			for _, prefix := range present(s.IPv4, s.IPv6) {
				// The blocks of a large subnet of IPv6 are its first addresses.
				used := Range{prefix.Addr(), advance(prefix, uint64(n)<<p.bits-1)}
				if !used.Overlaps(r) {
					continue
				}
				from, to := used.First, used.Last
				if from.Less(r.First) {
					from = r.First
				}
				if r.Last.Less(to) {
					to = r.Last
				}
				at := func(a netip.Addr) int64 { return first + int64((low64(a)-low64(prefix.Addr()))>>p.bits) }
				if at(from) < MaxBlocks {
					excluded = append(excluded, indexes{at(from), min(at(to), MaxBlocks-1)})
				}
			}
			first += n
		}
	}
	slices.SortFunc(excluded, func(a, b indexes) int { return cmp.Compare(a.first, b.first) })
	p.excluded = nil
	for _, e := range excluded {
		if n := len(p.excluded); n > 0 && e.first <= p.excluded[n-1].last+1 {
			p.excluded[n-1].last = max(p.excluded[n-1].last, e.last)
			continue
		}
		p.excluded = append(p.excluded, e)
	}
	return p, nil
}

// Excluded says whether the block of an index isn't to be carved.
func (p Pool) Excluded(index int32) bool {
	_, is := p.excludedTo(int64(index))
	return is
}

// excludedTo returns the last one of the excluded blocks that follow an index without a gap, and false if the block of the index isn't excluded.
func (p Pool) excludedTo(index int64) (int64, bool) {
	i, found := slices.BinarySearchFunc(p.excluded, index, func(e indexes, index int64) int {
		switch {
		case e.last < index:
			return -1
		case e.first > index:
			return 1
		}
		return 0
	})
	if !found {
		return 0, false
	}
	return p.excluded[i].last, true
}

// ExcludedWithin is how many of n blocks from an index on aren't to be carved.
func (p Pool) ExcludedWithin(first, n int64) (count int64) {
	for _, e := range p.excluded {
		count += max(0, min(e.last, first+n-1)-max(e.first, first)+1)
	}
	return count
}

// Available is the number of blocks that may be carved.
func (p Pool) Available() int64 { return p.Total() - p.ExcludedWithin(0, MaxBlocks) }

// String is the range as ParseRange reads it.
func (r Range) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	return r.First.String() + "-" + r.Last.String()
}

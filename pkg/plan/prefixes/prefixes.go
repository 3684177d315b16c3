// Package prefixes computes with lists of prefixes: which are private, which are inside of others, how few have the
// same addresses.
//
// It must not know whose the addresses are.
package prefixes

import (
	mathbits "math/bits"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Within says whether one of the ranges has all of p.
func Within(p netip.Prefix, ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Bits() <= p.Bits() && r.Contains(p.Addr()) })
}

// Valid returns the ranges that can be parsed, without host bits.
func Valid(texts []string) []netip.Prefix {
	var all []netip.Prefix
	for _, t := range texts {
		if p, err := netip.ParsePrefix(t); err == nil {
			all = append(all, p.Masked())
		}
	}
	return all
}

// Private returns the private ones of some ranges.
func Private(all []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return !Within(p, dataplane.PrivateRanges) })
}

// Aggregate returns the fewest prefixes that have the same addresses, sorted, IPv4 first.
func Aggregate(all []netip.Prefix) []netip.Prefix {
	var b netipx.IPSetBuilder
	for _, p := range all {
		b.AddPrefix(p)
	}
	set, _ := b.IPSet() // an error is of an invalid prefix, which has no addresses
	return set.Prefixes()
}

// Cover returns ranges that have all destinations that some have, no more than twice the limit: as few
// others as possible. Private ones stay private, since other rules than those of public ones lead there.
func Cover(all []netip.Prefix, limit int) []netip.Prefix {
	private := Private(all)
	public := slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return slices.Contains(private, p) })
	return slices.Concat(Fewer(Aggregate(private), limit), Fewer(Aggregate(public), limit))
}

// Fewer widens sorted ranges, IPv4 first, until there are no more than limit. Each family has
// half of them at least, and what the other doesn't need: sparse ranges of IPv6 would widen
// those of IPv4, which are short, to half of all addresses.
func Fewer(all []netip.Prefix, limit int) []netip.Prefix {
	n := slices.IndexFunc(all, func(p netip.Prefix) bool { return !p.Addr().Is4() })
	if n < 0 {
		n = len(all)
	}
	four, six := all[:n], all[n:]
	four = narrow(four, max(limit/2, limit-len(six)))
	return slices.Concat(four, narrow(six, limit-len(four)))
}

// narrow joins neighbours until there are no more than limit, those first whose common
// range is the smallest.
func narrow(all []netip.Prefix, limit int) []netip.Prefix {
	for host := 1; len(all) > limit && host <= 128; host++ {
		out := make([]netip.Prefix, 0, len(all))
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

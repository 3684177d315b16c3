package convert

import (
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// maxDestinations is how many destinations an Egress or a policy may have.
const maxDestinations = 256

// anywhere are all addresses of both families.
var anywhere = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// withPrivate adds the private networks that a range with public addresses has in it: with Coil it doesn't cover them.
func withPrivate(all []netip.Prefix) []netip.Prefix {
	out := slices.Clone(all)
	for _, p := range all {
		if prefixes.Within(p, dataplane.PrivateRanges) {
			continue
		}
		for _, r := range dataplane.PrivateRanges {
			if p.Bits() <= r.Bits() && p.Contains(r.Addr()) {
				out = append(out, r)
			}
		}
	}
	return unique(out)
}

// unique sorts ranges, those of IPv4 and the widest first, without those that are there twice.
func unique(all []netip.Prefix) []netip.Prefix {
	out := slices.Clone(all)
	slices.SortFunc(out, func(a, b netip.Prefix) int {
		if a.Addr().Is4() != b.Addr().Is4() {
			return a.Addr().BitLen() - b.Addr().BitLen()
		}
		if a.Bits() != b.Bits() {
			return a.Bits() - b.Bits()
		}
		return a.Addr().Compare(b.Addr())
	})
	return slices.Compact(out)
}

// everything returns all destinations of some families but some ranges: public ones, and private networks.
func everything(v4, v6 bool, but []netip.Prefix) []netip.Prefix {
	of := slices.DeleteFunc(withPrivate(anywhere), func(p netip.Prefix) bool { return p.Addr().Is4() && !v4 || !p.Addr().Is4() && !v6 })
	if len(but) == 0 {
		return of
	}
	var out []netip.Prefix
	for _, p := range of {
		var b netipx.IPSetBuilder
		b.AddPrefix(p)
		for _, x := range but {
			b.RemovePrefix(x)
		}
		set, _ := b.IPSet() // an error is of an invalid prefix, which there is none of
		out = append(out, set.Prefixes()...)
	}
	return unique(out)
}

// outside returns the ranges that no other one has in it.
func outside(all, of []netip.Prefix) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return covered(p, of) })
}

// widest returns the ranges that no other one of them covers.
func widest(all []netip.Prefix) (out []netip.Prefix) {
	for _, p := range unique(all) { // the wider one of two comes first
		if !covered(p, out) {
			out = append(out, p)
		}
	}
	return out
}

// covered says whether a policy may have a destination of an Egress with these: one has all of it. A private network is covered by a private one only.
func covered(p netip.Prefix, by []netip.Prefix) bool {
	if !prefixes.Within(p, dataplane.PrivateRanges) {
		return prefixes.Within(p, by)
	}
	return prefixes.Within(p, prefixes.Private(by))
}

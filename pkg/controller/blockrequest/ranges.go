package blockrequest

import (
	"net/netip"

	"github.com/coil-net/coil/pkg/ipam"
)

// ranges is a multiset of prefixes that knows at once whether a prefix shares
// addresses with one of them. The zero ranges is empty.
type ranges struct {
	exact map[netip.Prefix]int
	// inside counts, by prefix, the members that are smaller parts of it. A block is
	// carved with at most ipam.MaxBlockSizeBits host bits, so larger ones aren't kept.
	inside map[netip.Prefix]int
	// lengths counts the members by family and prefix length, since most lengths have none.
	lengths [2][129]int
}

func (r *ranges) add(p netip.Prefix)    { r.change(p.Masked(), 1) }
func (r *ranges) remove(p netip.Prefix) { r.change(p.Masked(), -1) }

func (r *ranges) change(p netip.Prefix, n int) {
	if r.exact == nil {
		r.exact, r.inside = map[netip.Prefix]int{}, map[netip.Prefix]int{}
	}
	bump(r.exact, p, n)
	r.lengths[family(p)][p.Bits()] += n
	largest := p.Addr().BitLen() - ipam.MaxBlockSizeBits
	for bits := p.Bits() - 1; bits >= largest; bits-- {
		bump(r.inside, parent(p, bits), n)
	}
}

func bump(m map[netip.Prefix]int, p netip.Prefix, n int) {
	if m[p] += n; m[p] <= 0 {
		delete(m, p)
	}
}

// overlaps says whether p shares an address with a member. p has at most
// ipam.MaxBlockSizeBits host bits.
func (r *ranges) overlaps(p netip.Prefix) bool {
	if r.inside[p] > 0 {
		return true
	}
	for bits := range p.Bits() + 1 {
		if r.lengths[family(p)][bits] > 0 && r.exact[parent(p, bits)] > 0 {
			return true
		}
	}
	return false
}

func parent(p netip.Prefix, bits int) netip.Prefix {
	return netip.PrefixFrom(p.Addr(), bits).Masked()
}

func family(p netip.Prefix) int {
	if p.Addr().Is4() {
		return 0
	}
	return 1
}

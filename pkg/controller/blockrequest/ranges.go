package blockrequest

import (
	"net/netip"
	"slices"

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

// holders are objects with the prefixes that each has. The zero holders is empty.
type holders struct {
	by     map[string][]netip.Prefix // by name, all of them in ranges
	ranges ranges
}

// hold replaces the prefixes of a name.
func (h *holders) hold(name string, ps []netip.Prefix) {
	if slices.Equal(h.by[name], ps) {
		return // as with most updates, which are about usage
	}
	for _, p := range h.by[name] {
		h.ranges.remove(p)
	}
	delete(h.by, name)
	if len(ps) == 0 {
		return
	}
	for _, p := range ps {
		h.ranges.add(p)
	}
	if h.by == nil {
		h.by = map[string][]netip.Prefix{}
	}
	h.by[name] = ps
}

// overlap says whether a holder has an address of the block.
func (h *holders) overlap(b ipam.Block) bool {
	return slices.ContainsFunc(b.Prefixes(), h.ranges.overlaps)
}

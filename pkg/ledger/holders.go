package ledger

import (
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/coil-net/coil/pkg/ipam"
)

// holders are objects with the prefixes that each has. The zero holders is empty.
type holders struct {
	by     map[string][]netip.Prefix // by name
	number bart.Table[int]           // of the holders of a prefix
}

// hold replaces the prefixes of a name.
func (h *holders) hold(name string, ps []netip.Prefix) {
	if slices.Equal(h.by[name], ps) {
		return // as with most updates, which are about usage
	}
	for _, p := range h.by[name] {
		h.number.Modify(p, func(n int, _ bool) (_ int, none bool) { return n - 1, n == 1 })
	}
	delete(h.by, name)
	if len(ps) == 0 {
		return
	}
	for _, p := range ps {
		h.number.Modify(p, func(n int, _ bool) (_ int, none bool) { return n + 1, false })
	}
	if h.by == nil {
		h.by = map[string][]netip.Prefix{}
	}
	h.by[name] = ps
}

// overlap says whether a holder has an address of the block.
func (h *holders) overlap(b ipam.Block) bool {
	return slices.ContainsFunc(b.Prefixes(), h.number.OverlapsPrefix)
}

// within returns the names of the holders that have an address of the block, sorted.
func (h *holders) within(b ipam.Block) []string {
	if !h.overlap(b) {
		return nil
	}
	var names []string
	for name, ps := range h.by {
		if slices.ContainsFunc(ps, func(p netip.Prefix) bool { return slices.ContainsFunc(b.Prefixes(), p.Overlaps) }) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

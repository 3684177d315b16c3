package blockrequest

import (
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/coil-net/coil/pkg/ipam"
)

// holders are objects with the prefixes that each has. The zero holders is empty.
type holders struct {
	by    map[string][]netip.Prefix // by name
	names bart.Table[[]string]      // by prefix; most prefixes have one holder
}

// hold replaces the prefixes of a name.
func (h *holders) hold(name string, ps []netip.Prefix) {
	if slices.Equal(h.by[name], ps) {
		return // as with most updates, which are about usage
	}
	for _, p := range h.by[name] {
		h.names.Modify(p, func(names []string, _ bool) (_ []string, none bool) {
			names = slices.DeleteFunc(names, func(other string) bool { return other == name })
			return names, len(names) == 0
		})
	}
	delete(h.by, name)
	if len(ps) == 0 {
		return
	}
	for _, p := range ps {
		h.names.Modify(p, func(names []string, _ bool) (_ []string, none bool) { return append(names, name), false })
	}
	if h.by == nil {
		h.by = map[string][]netip.Prefix{}
	}
	h.by[name] = ps
}

// overlap says whether a holder has an address of the block.
func (h *holders) overlap(b ipam.Block) bool {
	return slices.ContainsFunc(b.Prefixes(), h.names.OverlapsPrefix)
}

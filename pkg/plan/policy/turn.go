package policy

import (
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// mostOrdered is how many policies that select one pod are compared by their destinations: comparing takes time.
const mostOrdered = 8

// Before returns those of others of which routers must learn before they learn of p, for a pod that all of these select for one Egress.
// They decide for destinations of p, and as long as a router doesn't know that, p does. No order is right if of some policies each decides for
// destinations of the next one, in a circle: then the oldest of them comes first, as of more than mostOrdered. The function returns the Egress of a name, nil if there is none.
func Before(p Policy, others []Policy, egress func(types.NamespacedName) *v2.Egress) (before []Policy) {
	rest := slices.SortedFunc(slices.Values(append(slices.Clone(others), p)), Compare)
	isP := func(o Policy) bool { return o.Name == p.Name }
	if len(rest) > mostOrdered {
		return rest[:slices.IndexFunc(rest, isP)]
	}
	reached := map[types.NamespacedName][]netip.Prefix{}
	for _, o := range rest {
		reached[o.Name] = o.reaches(egress)
	}
	decides := func(a, b Policy) bool { return decidesFor(reached[a.Name], reached[b.Name], Compare(a, b) < 0) }
	for {
		next := max(0, slices.IndexFunc(rest, func(b Policy) bool {
			return !slices.ContainsFunc(rest, func(a Policy) bool { return a.Name != b.Name && decides(a, b) })
		}))
		switch o := rest[next]; {
		case isP(o):
			return before
		case decides(o, p):
			before = append(before, o)
		}
		rest = slices.Delete(rest, next, next+1)
	}
}

// decidesFor says whether a policy with some destinations decides for some of another one's: it has smaller ones or, if it is older,
// the same.
func decidesFor(a, b []netip.Prefix, older bool) bool {
	return slices.ContainsFunc(a, func(x netip.Prefix) bool {
		if older {
			return prefixes.Within(x, b)
		}
		return slices.ContainsFunc(b, func(y netip.Prefix) bool { return y.Bits() < x.Bits() && y.Contains(x.Addr()) })
	})
}

package client

import (
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// By returns an Egress as a policy lets clients use it.
func (e Egress) By(p policy.Policy) Egress {
	e.Policy, e.Open, e.Block = p.String(), p.OnFailure == v2.EgressFailureNode, ""
	if slices.Contains(e.Blocks, p.Block) {
		e.Block = p.Block
	}
	if p.Destinations != nil {
		e.Destinations = within(p.Destinations, e.Destinations)
	}
	return e
}

// At returns the Egress with the router alone that has the client's floating address: the pod of a UID, empty if none has. As long as it
// has the address, no other router can take its flows: it isn't draining.
func (e Egress) At(pod types.UID) Egress {
	if e.Blocks == nil {
		return e
	}
	var holder []Router
	var others []netip.Addr
	for _, r := range e.Routers {
		if pod != "" && r.Pod == pod {
			if r.State == RouterDraining {
				r.State = RouterLive
			}
			holder = append(holder, r)
		} else {
			others = append(others, r.Addr)
		}
	}
	e.Routers, e.Others = holder, others
	return e
}

// WithAddresses returns the Egress with routers that take flows only if they have a floating address: holder says to which pod packets for
// a block go, and that router has to take the address for its own, too. One without keeps the flows that it has. If routers have no
// such addresses nothing changes.
func (e Egress) WithAddresses(holder func(block string) types.UID) Egress {
	if e.OfRouters == nil {
		return e
	}
	type router struct {
		pod  types.UID
		name string
	}
	has := map[router]bool{}
	for _, a := range e.OfRouters {
		if pod := holder(a.Block); pod != "" {
			has[router{pod, a.Router}] = true
		}
	}
	e.Routers = slices.Clone(e.Routers)
	for i, r := range e.Routers {
		if r.State == RouterLive && !has[router{r.Pod, r.Name}] {
			e.Routers[i].State = RouterDraining
		}
	}
	return e
}

// way tells the ways of packets through Egresses apart: those by different addresses of one Egress lead to different routers.
func (e Egress) way() string {
	if e.Blocks == nil {
		return e.Name
	}
	return e.Name + " by " + e.Block
}

// within returns the destinations of a policy that are an Egress's. Of one that isn't inside of any of the Egress's, those of the
// Egress that are inside of it. Private and public ones have nothing to do with each other: packets to private networks take only
// routes of private destinations.
func within(wanted, all []netip.Prefix) []netip.Prefix {
	private := func(p netip.Prefix) bool { return prefixes.Within(p, dataplane.PrivateRanges) }
	in := []netip.Prefix{}
	for _, d := range wanted {
		alike := slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return private(p) != private(d) })
		if prefixes.Within(d, alike) {
			in = append(in, d)
			continue
		}
		for _, part := range alike {
			if prefixes.Within(part, []netip.Prefix{d}) {
				in = append(in, part)
			}
		}
	}
	return masked(in)
}

// byPrecedence returns Egresses in the order in which they decide for a destination that several have, each once.
func byPrecedence(egresses []Egress) []Egress {
	all := slices.SortedStableFunc(slices.Values(egresses), func(a, b Egress) int {
		if a.Policy == "" && b.Policy == "" {
			return strings.Compare(a.Name, b.Name)
		}
		return plan.TrueFirst(a.Policy == "", b.Policy == "")
	})
	return slices.CompactFunc(all, func(a, b Egress) bool { return a.Name == b.Name && a.Name != "" && a.Policy == b.Policy })
}

// onceEach returns each way once, whatever lets the client use it, by name.
func onceEach(uses []Egress) []Egress {
	all := slices.SortedStableFunc(slices.Values(uses), func(a, b Egress) int { return strings.Compare(a.way(), b.way()) })
	return slices.CompactFunc(all, Egress.same)
}

// same says whether two are one Egress by one address: with the same routers, tunnels and group.
func (e Egress) same(other Egress) bool { return e.way() == other.way() && e.Name != "" }

// String names the Egress, and the policy that lets the client use it.
func (e Egress) String() string {
	if e.Policy == "" {
		return e.Name
	}
	return e.Name + " of " + e.Policy
}

// claim is a destination, and the Egress that has it.
type claim struct {
	netip.Prefix
	egress *Egress
}

// claimsOf returns each destination once. Link-local ones are nobody's.
func claimsOf(egresses []Egress) (claims []claim, conflicts []Conflict) {
	holders := map[netip.Prefix]*Egress{}
	for i := range egresses {
		e := &egresses[i]
		for _, d := range e.Destinations {
			d = d.Masked() // objects of earlier versions may have host bits
			if !d.IsValid() || prefixes.Within(d, dataplane.LinkLocalRanges) {
				continue
			}
			switch holder := holders[d]; {
			case holder == nil:
				holders[d] = e
				claims = append(claims, claim{d, e})
			case !holder.same(*e) && holder.Name != "":
				conflicts = append(conflicts, Conflict{Dst: d, Winner: holder.String(), Loser: e.String()})
			}
		}
	}
	slices.SortFunc(claims, func(a, b claim) int { return a.Compare(b.Prefix) })
	return claims, conflicts
}

package policy

import (
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// Rival is a policy, or the annotation of pods, that decides for a destination in place of a younger policy.
type Rival struct {
	Policy
	Destination netip.Prefix
}

// Annotation returns the policy that an annotation of pods stands for: it is older than every other one.
func Annotation(egress types.NamespacedName) Policy { return Policy{Egress: egress} }

// Annotated says whether the policy is from Annotation.
func (p Policy) Annotated() bool { return p.Name.Name == "" }

// Rivals returns those of other policies that come before one, and lead to another Egress for one of its destinations. They are
// sorted: the first that selects a pod decides for it. The function returns the Egress of a name, nil if there is none.
func Rivals(p Policy, others []Policy, egress func(types.NamespacedName) *v2.Egress) []Rival {
	mine := map[netip.Prefix]bool{}
	for _, d := range p.reaches(egress) {
		mine[d] = true
	}
	var rivals []Rival
	for _, o := range others {
		if o.Egress == p.Egress || Compare(o, p) >= 0 {
			continue
		}
		theirs := slices.DeleteFunc(o.reaches(egress), func(d netip.Prefix) bool { return !mine[d] })
		if len(theirs) > 0 {
			rivals = append(rivals, Rival{o, slices.MinFunc(theirs, netip.Prefix.Compare)})
		}
	}
	slices.SortStableFunc(rivals, func(a, b Rival) int { return Compare(a.Policy, b.Policy) })
	return rivals
}

// reaches returns the destinations of a policy.
func (p Policy) reaches(egress func(types.NamespacedName) *v2.Egress) []netip.Prefix {
	e := egress(p.Egress)
	switch {
	case e == nil:
		return nil
	case p.Destinations == nil:
		return prefixes.Valid(e.Spec.Destinations)
	}
	return slices.Clone(p.Destinations)
}

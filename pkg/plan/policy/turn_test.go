package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestBefore(t *testing.T) {
	nat := types.NamespacedName{Namespace: "internet", Name: "nat"}
	egress := func(name types.NamespacedName) *v2.Egress {
		if name != nat {
			return nil
		}
		return &v2.Egress{Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0", "2001:db8::/32"}}}
	}
	// policies are named 1, 2, 3 in the order of their age; "" has all destinations of the Egress.
	policies := func(destinations ...string) (all []Policy) {
		for i, text := range destinations {
			p := Policy{Name: types.NamespacedName{Namespace: "shop", Name: fmt.Sprint(i + 1)}, Created: time.Unix(int64(i), 0), Egress: nat}
			for d := range strings.FieldsSeq(text) {
				p.Destinations = append(p.Destinations, netip.MustParsePrefix(d))
			}
			all = append(all, p)
		}
		return all
	}
	many := policies(slices.Repeat([]string{"198.51.100.0/24"}, mostOrdered+1)...)
	many[mostOrdered].Destinations = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
	for _, tt := range []struct {
		name     string
		policies []Policy
		want     []string // before each policy
	}{
		{"one", policies(""), []string{""}},
		{"the older first", policies("", "", ""), []string{"", "1", "1 2"}},
		{"the smaller first", policies("", "203.0.113.0/24", "203.0.113.9/32"), []string{"2 3", "3", ""}},
		{"the older of the same, the smaller of others", policies("203.0.113.0/24", "", "203.0.113.0/24"), []string{"", "1 3", "1"}},
		{"another destination", policies("203.0.113.0/24", "198.51.100.0/24 192.0.2.0/24"), []string{"", ""}},
		{"another family", policies("203.0.113.0/24", "2001:db8::/48", ""), []string{"", "", "1 2"}},
		{"the smaller elsewhere", policies("203.0.113.0/24", "203.0.113.0/24 198.51.100.1/32"), []string{"", "1"}},
		{"each is smaller somewhere", policies("203.0.113.0/24 198.51.100.1/32", "203.0.113.9/32 198.51.100.0/24"), []string{"", "1"}},
		{"a circle", policies("192.0.2.0/24 198.51.100.1/32", "198.51.100.0/24 203.0.113.1/32", "203.0.113.0/24 192.0.2.1/32"), []string{"", "1", "2"}},
		{"an annotation", append(policies("", "203.0.113.0/24"), Annotation(nat)), []string{"2 nat", "", "2"}},
		{"many by age", many, []string{"", "1", "1 2", "1 2 3", "1 2 3 4", "1 2 3 4 5", "1 2 3 4 5 6", "1 2 3 4 5 6 7", "1 2 3 4 5 6 7 8"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i, p := range tt.policies {
				var names []string
				for _, o := range Before(p, slices.Delete(slices.Clone(tt.policies), i, i+1), egress) {
					name := o.Name.Name
					if o.Annotated() {
						name = o.Egress.Name
					}
					names = append(names, name)
				}
				slices.Sort(names)
				if got := strings.Join(names, " "); got != tt.want[i] {
					t.Errorf("before %q: %q, want %q", p.Name.Name, got, tt.want[i])
				}
			}
		})
	}
}

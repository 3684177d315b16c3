package prefixes

import (
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/plan/plantest"
)

func TestAggregate(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"nothing", "", ""},
		{"twice", "10.0.0.0/8 10.0.0.0/8", "10.0.0.0/8"},
		{"inside", "10.1.0.0/16 10.0.0.0/8 10.0.0.0/32", "10.0.0.0/8"},
		{"two halves", "10.0.1.0/24 10.0.0.0/24", "10.0.0.0/23"},
		{"neighbours that aren't halves", "10.0.1.0/24 10.0.2.0/24", "10.0.1.0/24 10.0.2.0/24"},
		{"quarters", "10.0.0.0/26 10.0.0.128/26 10.0.0.64/26 10.0.0.192/26", "10.0.0.0/24"},
		{"a half and what is inside the other", "10.0.0.0/25 10.0.0.128/26", "10.0.0.0/25 10.0.0.128/26"},
		{"both families", "fd00::1/128 fd00::/128 0.0.0.0/1 128.0.0.0/1", "0.0.0.0/0 fd00::/127"},
		{"all", "::/0 fd00::/8 0.0.0.0/0 10.0.0.0/8", "0.0.0.0/0 ::/0"},
	} {
		if got := Aggregate(plantest.Prefixes(tt.in)); !slices.Equal(got, plantest.Prefixes(tt.want)) {
			t.Errorf("%s: %v, want %s", tt.name, got, tt.want)
		}
	}
}

// TestNarrow holds that too many ranges become fewer: near ones are joined first.
func TestNarrow(t *testing.T) {
	if got, want := narrow(plantest.Prefixes("10.0.0.1/32 10.0.0.2/32 192.0.2.0/24 fd00::/64"), 3), plantest.Prefixes("10.0.0.0/30 192.0.2.0/24 fd00::/64"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

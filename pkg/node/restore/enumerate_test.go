package restore

import (
	"strings"
	"testing"
)

func TestEnumerate(t *testing.T) {
	long := strings.Repeat("x", 300)
	for _, tt := range []struct {
		name  string
		items []string
		want  string
	}{
		{"one", []string{"a"}, "a"},
		{"some", []string{"a", "b"}, "a; b"},
		{"one that is long", []string{long + long + long}, long + long + long},
		{"too many", []string{long, long, long, "a", "b"}, long + "; " + long + " and 3 more, see the log"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := enumerate(tt.items); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

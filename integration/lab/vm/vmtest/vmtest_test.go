package vmtest

import "testing"

func TestPattern(t *testing.T) {
	for _, c := range []struct{ name, selected, want string }{
		{"TestEgress", "", "^TestEgress$"},
		{"TestEgress", "Egress", "^TestEgress$"},
		{"TestEgress/6.12", "Egress", `^TestEgress$/^6\.12$`},
		{"TestEgress/6.12", "Egress/6/nat/IPv[46]", `^TestEgress$/^6\.12$/nat/IPv[46]`},
	} {
		if got := pattern(c.name, c.selected); got != c.want {
			t.Errorf("%s selected by %q: %q, want %q", c.name, c.selected, got, c.want)
		}
	}
}

package loadbalancer

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// Each version of an object is looked at once, and what is gone is forgotten.
func TestFindings(t *testing.T) {
	looked := 0
	look := func(n *int) int { looked++; return *n }
	var r findings[int, int]
	one, two := 1, 2
	for i, step := range []struct {
		uid          types.UID
		object       *int
		want, looked int
	}{
		{"a", &one, 1, 1}, {"a", &one, 1, 1}, {"b", &one, 1, 2}, {"a", &two, 2, 3}, {"a", &two, 2, 3}, {"a", &one, 1, 4},
	} {
		if got := r.of(step.uid, step.object, look); got != step.want || looked != step.looked {
			t.Errorf("step %d: %d after %d looks, want %d after %d", i, got, looked, step.want, step.looked)
		}
	}
	r.keep(1)
	if len(r.byUID) != 2 {
		t.Errorf("of 2 objects, of which half are there, %d are remembered", len(r.byUID))
	}
	if r.keep(0); len(r.byUID) != 0 {
		t.Errorf("%d objects that are gone are remembered", len(r.byUID))
	}
}

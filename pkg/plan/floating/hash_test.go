package floating_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/plan/floating"
)

// What is drawn is spread evenly, and depends neither on the order nor on others that come and go.
func TestDraw(t *testing.T) {
	var all []uint64
	for i := range 8 {
		all = append(all, floating.Hash(fmt.Sprint("198.51.100.", i)))
	}
	counts := map[uint64]int{}
	for i := range 8000 {
		key := floating.Hash(fmt.Sprintf("10.%d.0.%d", i/250, i%250))
		drawn := all[floating.Draw(key, all)]
		counts[drawn]++
		turned := slices.Clone(all)
		slices.Reverse(turned)
		if got := turned[floating.Draw(key, turned)]; got != drawn {
			t.Fatalf("key %d: %d is drawn in another order, and %d before", key, got, drawn)
		}
		fewer := slices.Delete(turned, 2, 3)
		if got := fewer[floating.Draw(key, fewer)]; slices.Contains(fewer, drawn) && got != drawn {
			t.Fatalf("key %d: %d is drawn without another one, and %d before", key, got, drawn)
		}
	}
	for h, n := range counts {
		if n < 850 || n > 1150 {
			t.Errorf("%d is drawn %d times of 8000, and is one of eight", h, n)
		}
	}
}

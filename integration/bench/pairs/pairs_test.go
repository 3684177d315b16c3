package pairs

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// Each side has its turn each time, and each is the first equally often.
func TestInTurns(t *testing.T) {
	var order []int
	values, err := InTurns(4, 2, func(side int) (float64, error) {
		order = append(order, side)
		return float64(side), nil
	})
	if err != nil || !slices.Equal(order, []int{0, 1, 1, 0, 0, 1, 1, 0}) || len(values[0]) != 4 || values[1][3] != 1 {
		t.Errorf("%v, %v, %v", order, values, err)
	}
}

// The bounds have the median of what is measured between them about 19 times of 20.
func TestRatioOf(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const runs = 2000
	missed := 0
	for range runs {
		a, b := make([]float64, 99), make([]float64, 99)
		for i := range a {
			a[i], b[i] = r.ExpFloat64(), 1
		}
		got := RatioOf(a, b)
		if got.Low > got.Median || got.High < got.Median {
			t.Fatalf("the bounds of %+v are no bounds", got)
		}
		if got.Low > math.Ln2 || got.High < math.Ln2 {
			missed++
		}
	}
	if missed > runs*6/100 {
		t.Errorf("the median was outside of the bounds %d times of %d", missed, runs)
	}
	if got := RatioOf([]float64{3}, []float64{2}); got != (Ratio{1.5, 1.5, 1.5}) {
		t.Errorf("one pair has the ratio %+v", got)
	}
}

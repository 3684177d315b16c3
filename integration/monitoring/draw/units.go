package draw

import (
	"fmt"
	"math"
	"strconv"
)

// unit is how values are written.
type unit struct {
	// scale is what a value is multiplied by first, if it isn't 0.
	scale float64
	// sizes are the words after a number, from the smallest. A value is written with the largest of which there is at least one.
	sizes []size
	// binary says that 1024 is a round number.
	binary bool
}

type size struct {
	from float64
	word string
}

// decimal are the sizes of what is counted.
func decimal(word string) unit {
	return unit{sizes: []size{{1, " " + word}, {1e3, " k" + word}, {1e6, " M" + word}, {1e9, " G" + word}}}
}

// units are those of Grafana that dashboards name.
var units = map[string]unit{
	"short":       {sizes: []size{{1, ""}, {1e3, " K"}, {1e6, " Mil"}, {1e9, " Bil"}}},
	"percentunit": {scale: 100, sizes: []size{{1, "%"}}},
	"s":           {sizes: []size{{1e-6, " µs"}, {1e-3, " ms"}, {1, " s"}, {60, " min"}, {3600, " h"}, {86400, " d"}}},
	"bytes":       {binary: true, sizes: []size{{1, " B"}, {1 << 10, " KiB"}, {1 << 20, " MiB"}, {1 << 30, " GiB"}}},
	"Bps":         decimal("B/s"),
	"pps":         decimal("p/s"),
	"reqps":       {sizes: []size{{1, " req/s"}}},
	"ops":         {sizes: []size{{1, " ops/s"}}},
	"cps":         {sizes: []size{{1, " c/s"}}},
}

// write writes a value with at most three digits that count.
func (u unit) write(v float64) string {
	if u.scale != 0 {
		v *= u.scale
	}
	as := u.sizes[0]
	for _, s := range u.sizes {
		if math.Abs(v) >= s.from || v == 0 && s.from <= 1 {
			as = s
		}
	}
	return digits(v/as.from) + as.word
}

// digits writes a number with three digits that count, or all that are before the point.
func digits(v float64) string {
	if math.Abs(v) >= 100 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	rounded, err := strconv.ParseFloat(fmt.Sprintf("%.3g", v), 64)
	if err != nil {
		return fmt.Sprint(v)
	}
	return strconv.FormatFloat(rounded, 'f', -1, 64)
}

// ticks are round values from 0 to at least the largest one, some three to six.
func (u unit) ticks(largest float64) (all []float64) {
	if largest <= 0 {
		largest = 1
	}
	step, magnitude := largest/4, 1.0
	if u.binary {
		for magnitude*1024 <= step {
			magnitude *= 1024
		}
	}
	magnitude *= math.Pow(10, math.Floor(math.Log10(step/magnitude)))
	for _, m := range []float64{1, 2, 2.5, 5, 10} {
		if m*magnitude >= step*(1-1e-9) {
			step = m * magnitude
			break
		}
	}
	for i := 0; ; i++ {
		all = append(all, float64(i)*step)
		if float64(i)*step >= largest*(1-1e-9) {
			return all
		}
	}
}

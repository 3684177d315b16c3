package draw

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// chart is an image of lines, ready to be written as SVG. All of it is in pixels.
type chart struct {
	Width, Height            int
	Left, Right, Top, Bottom float64 // edges of the area of the lines
	Values, Times            []tick
	Lines                    []line
	Limits                   []limit
}

// tick is a round value or time at the edge.
type tick struct {
	At   float64
	Text string
}

// line is a series.
type line struct {
	Name, Colour string
	// Path is the line and Area what is below it, empty if it isn't filled.
	Path, Area string
	// Dots are points without neighbours.
	Dots []dot
}

type dot struct{ X, Y float64 }

// limit is a value from which on values have another colour.
type limit struct {
	At     float64
	Colour string
}

// named is a series with the name that the legend gives it.
type named struct {
	name   string
	points []Point
}

// newChart draws series.
func newChart(width, height int, w Window, d Defaults, all []named) (*chart, error) {
	u, ok := units[d.Unit]
	if !ok {
		return nil, fmt.Errorf("the unit %q isn't known", d.Unit)
	}
	stacked := d.Custom.Stacking.Mode == "normal"
	levels := stack(all, stacked)
	largest := 0.0
	for _, l := range levels {
		for _, p := range l {
			largest = max(largest, p.high)
		}
	}
	ticks := u.ticks(largest)
	c := &chart{Width: width, Height: height, Left: 52, Right: float64(width) - 14, Top: 6, Bottom: float64(height) - 16}
	top := ticks[len(ticks)-1]
	y := func(v float64) float64 { return round(c.Bottom - (c.Bottom-c.Top)*v/top) }
	x := func(t float64) float64 {
		return round(c.Left + (c.Right-c.Left)*(t-seconds(w.From))/w.To.Sub(w.From).Seconds())
	}
	for _, v := range ticks {
		c.Values = append(c.Values, tick{y(v), u.write(v)})
	}
	for _, t := range times(w.From, w.To, width/64) {
		c.Times = append(c.Times, tick{x(seconds(t.at)), t.text})
	}
	if d.Custom.ThresholdsStyle.Mode == "dashed" {
		for _, s := range d.Thresholds.Steps {
			if s.Value != nil && *s.Value <= top {
				c.Limits = append(c.Limits, limit{y(*s.Value), colours[s.Color]})
			}
		}
	}
	for i, points := range levels {
		l := line{Name: all[i].name, Colour: palette[i%len(palette)]}
		for _, part := range parts(points, w.Step.Seconds()) {
			l.add(part, x, y, d.Custom.FillOpacity > 0)
		}
		c.Lines = append(c.Lines, l)
	}
	return c, nil
}

// level is a point of a line: the value, and where what is below it ends.
type level struct{ t, low, high float64 }

// stack puts each series on top of those before it, if they are stacked.
func stack(all []named, stacked bool) [][]level {
	levels, sums := make([][]level, len(all)), map[float64]float64{}
	for i, s := range all {
		for _, p := range s.points {
			low := 0.0
			if stacked {
				low = sums[p.T]
				sums[p.T] += p.V
			}
			levels[i] = append(levels[i], level{p.T, low, low + p.V})
		}
	}
	return levels
}

// parts are the stretches of a line without a gap.
func parts(points []level, step float64) (all [][]level) {
	for i, p := range points {
		if i == 0 || p.t-points[i-1].t > 1.5*step {
			all = append(all, nil)
		}
		all[len(all)-1] = append(all[len(all)-1], p)
	}
	return all
}

// add adds a stretch.
func (l *line) add(part []level, x, y func(float64) float64, filled bool) {
	if len(part) == 1 {
		l.Dots = append(l.Dots, dot{x(part[0].t), y(part[0].high)})
		return
	}
	var path, back strings.Builder
	for i, p := range part {
		word := "L"
		if i == 0 {
			word = "M"
		}
		fmt.Fprintf(&path, "%s%g %g", word, x(p.t), y(p.high))
		under := part[len(part)-1-i]
		fmt.Fprintf(&back, "L%g %g", x(under.t), y(under.low))
	}
	l.Path += path.String()
	if filled {
		l.Area += path.String() + back.String() + "Z"
	}
}

// moment is a round time.
type moment struct {
	at   time.Time
	text string
}

// times are round times of a window, about as many as asked for, or fewer.
func times(from, to time.Time, about int) (all []moment) {
	steps := []time.Duration{
		time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, 30 * time.Second, time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute,
		15 * time.Minute, 30 * time.Minute, time.Hour, 3 * time.Hour, 6 * time.Hour, 12 * time.Hour,
	}
	step := 24 * time.Hour
	for i := len(steps) - 1; i >= 0 && to.Sub(from)/steps[i] < time.Duration(max(about, 1)); i-- {
		step = steps[i]
	}
	format := "15:04"
	if step < time.Minute {
		format = "15:04:05"
	}
	for t := from.Truncate(step); !t.After(to); t = t.Add(step) {
		if !t.Before(from) {
			all = append(all, moment{t, t.UTC().Format(format)})
		}
	}
	return all
}

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

// round is to a tenth of a pixel.
func round(v float64) float64 { return math.Round(v*10) / 10 }

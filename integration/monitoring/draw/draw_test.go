package draw

import (
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestWrite(t *testing.T) {
	for _, c := range []struct {
		unit string
		v    float64
		want string
	}{
		{"short", 0, "0"}, {"short", 3, "3"}, {"short", 0.25, "0.25"}, {"short", 1234, "1.23 K"}, {"short", 987654, "988 K"},
		{"percentunit", 0.125, "12.5%"}, {"percentunit", 1, "100%"}, {"percentunit", 0, "0%"},
		{"s", 0, "0 s"}, {"s", 0.00123, "1.23 ms"}, {"s", 0.0000005, "0.5 µs"}, {"s", 90, "1.5 min"}, {"s", 200000, "2.31 d"},
		{"bytes", 0, "0 B"}, {"bytes", 1536, "1.5 KiB"}, {"bytes", 50 << 20, "50 MiB"},
		{"Bps", 1536, "1.54 kB/s"}, {"Bps", 12, "12 B/s"}, {"pps", 2e6, "2 Mp/s"}, {"reqps", 0.5, "0.5 req/s"},
	} {
		if got := units[c.unit].write(c.v); got != c.want {
			t.Errorf("%g %s: %q, want %q", c.v, c.unit, got, c.want)
		}
	}
}

// Ticks are round, few, and reach the largest value, whatever that is.
func TestTicks(t *testing.T) {
	for _, c := range []struct {
		unit    string
		largest float64
		want    []float64
	}{
		{"short", 0, []float64{0, 0.25, 0.5, 0.75, 1}}, {"short", 3, []float64{0, 1, 2, 3}}, {"short", 7, []float64{0, 2, 4, 6, 8}}, {"short", 10, []float64{0, 2.5, 5, 7.5, 10}},
		{"bytes", 100 << 20, []float64{0, 25 << 20, 50 << 20, 75 << 20, 100 << 20}}, {"bytes", 1 << 10, []float64{0, 500, 1000, 1500}},
	} {
		if diff := cmp.Diff(c.want, units[c.unit].ticks(c.largest)); diff != "" {
			t.Errorf("%g %s (-want +got):\n%s", c.largest, c.unit, diff)
		}
	}
	for name, u := range units {
		for v := 1e-9; v < 1e12; v *= 1.7 {
			if got := u.ticks(v); len(got) < 3 || len(got) > 6 || got[len(got)-1] < v*0.999 || got[len(got)-2] >= v {
				t.Errorf("%g %s: %g", v, name, got)
			}
		}
	}
}

func TestTimes(t *testing.T) {
	at := func(text string) time.Time {
		v, err := time.Parse(time.TimeOnly, text)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	for _, c := range []struct{ from, to, want string }{
		{"10:00:02", "10:00:41", "10:00:10 10:00:20 10:00:30 10:00:40"}, {"10:00:30", "10:12:30", "10:05 10:10"}, {"06:10:00", "12:10:00", "09:00 12:00"},
	} {
		var got []string
		for _, m := range times(at(c.from), at(c.to), 4) {
			got = append(got, m.text)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s to %s: %q, want %q", c.from, c.to, got, c.want)
		}
	}
}

// A line has gaps where values are missing, and a dot for a value by itself. Stacked lines end where the next ones begin.
func TestChart(t *testing.T) {
	w := Window{From: time.Unix(1000, 0), To: time.Unix(1010, 0), Step: time.Second}
	series := []named{
		{"a", []Point{{1000, 1}, {1001, 1}, {1003, 2}, {1005, 4}, {1006, 2}}},
		{"b", []Point{{1005, 4}, {1006, 6}}},
	}
	d := Defaults{Unit: "short"}
	limit := 6.0
	d.Thresholds.Steps = []Step{{"green", nil}, {"red", &limit}}
	d.Custom.ThresholdsStyle.Mode = "dashed"
	c, err := newChart(166, 122, w, d, series) // lines are between 52 and 152, 6 and 106
	if err != nil {
		t.Fatal(err)
	}
	want := []line{
		{Name: "a", Colour: palette[0], Path: "M52 89.3L62 89.3M102 39.3L112 72.7", Dots: []dot{{82, 72.7}}},
		{Name: "b", Colour: palette[1], Path: "M102 39.3L112 6"},
	}
	if diff := cmp.Diff(want, c.Lines); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
	if len(c.Limits) != 1 || c.Limits[0].At != 6 || c.Values[len(c.Values)-1] != (tick{6, "6"}) {
		t.Errorf("limits %v, ticks %v", c.Limits, c.Values)
	}

	d.Custom.Stacking.Mode, d.Custom.FillOpacity = "normal", 30
	if c, err = newChart(166, 122, w, d, series); err != nil {
		t.Fatal(err)
	}
	if got, want := c.Lines[1].Area, "M102 6L112 6L112 81L102 56Z"; got != want {
		t.Errorf("the area of b is %s, want %s", got, want)
	}
	if _, err := newChart(1, 1, w, Defaults{Unit: "furlongs"}, nil); err == nil {
		t.Error("all units are known")
	}
}

// Numbers have the colour of their threshold, and are compared with the largest one, or with what the panel says.
func TestNumbers(t *testing.T) {
	one, half := 1.0, 0.5
	d := Defaults{Unit: "percentunit", Max: &one}
	d.Thresholds.Steps = []Step{{"green", nil}, {"orange", &half}}
	series := []named{{"a", []Point{{1, 0.7}, {2, 0.2}}}, {"b", []Point{{2, 0.5}}}}
	got, err := numbers(d, series)
	want := []number{{"a", "20%", colours["green"], 20}, {"b", "50%", colours["orange"], 50}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	d.Max = nil
	if got, err = numbers(d, series); err != nil || got[0].Percent != 40 || got[1].Percent != 100 {
		t.Errorf("%v, %v", got, err)
	}
	d.Thresholds.Steps[1].Color = "mauve"
	if _, err := numbers(d, series); err == nil {
		t.Error("all colours are known")
	}
}

// Answers are read as Prometheus gives them. What is no number is no value.
func TestSeries(t *testing.T) {
	var p Point
	for text, want := range map[string]float64{`[1.5,"2"]`: 2, `[1.5,"+Inf"]`: math.Inf(1)} {
		if err := p.UnmarshalJSON([]byte(text)); err != nil || p != (Point{1.5, want}) {
			t.Errorf("%s: %v, %v", text, p, err)
		}
	}
	for _, text := range []string{`[1.5,2]`, `["x","2"]`, `[1.5,"two"]`} {
		if err := p.UnmarshalJSON([]byte(text)); err == nil {
			t.Errorf("%s: %v", text, p)
		}
	}
	var r result
	for _, values := range [][]Point{{{1, 1}, {2, math.NaN()}, {3, 3}}, {{1, math.NaN()}}} {
		r.Result = append(r.Result, struct {
			Metric map[string]string
			Value  *Point
			Values []Point
		}{Metric: map[string]string{"node": "n1"}, Values: values})
	}
	got := r.series()
	if len(got) != 1 || !slices.Equal(got[0].Points, []Point{{1, 1}, {3, 3}}) {
		t.Fatalf("%v", got)
	}
	if got := (Target{LegendFormat: "{{node}}, {{pool}}"}).legend(got[0]); got != "n1, " {
		t.Errorf("the legend says %q", got)
	}
}

func TestResolve(t *testing.T) {
	w := Window{From: time.Unix(0, 0), To: time.Unix(3600, 0), Step: 15 * time.Second, Rate: time.Minute}
	const expr = `rate(x{node=~"$node"}[$__rate_interval]) + avg_over_time(y[$__range:$__interval])`
	if got, want := w.All(expr), `rate(x{node=~".*"}[60000ms]) + avg_over_time(y[3600000ms:15000ms])`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// Kinds, units and colours of Coil's dashboards are known.
func TestFill(t *testing.T) {
	files, err := filepath.Glob("../../../manifests/monitoring/dashboards/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d dashboards, %v", len(files), err)
	}
	w := Window{From: time.Unix(1000, 0), To: time.Unix(1010, 0), Step: time.Second}
	for _, file := range files {
		d, err := Read(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range d.Panels {
			v := view{Columns: p.GridPos.W, Rows: p.GridPos.H}
			if p.Type == kindRow {
				continue
			}
			if err := v.fill(p, w, []named{{"a", []Point{{1001, 1}, {1002, 3}}}}); err != nil {
				t.Errorf("%s, %s: %v", d.Title, p.Title, err)
			}
			if lines := v.Chart != nil && v.Chart.Lines[0].Path != ""; !lines && len(v.Numbers) != 1 {
				t.Errorf("%s, %s: there is nothing to see: %+v", d.Title, p.Title, v)
			}
		}
	}
}

// Package draw draws dashboards of Grafana as pages of HTML and SVG, with what a Prometheus answers to their queries.
//
// It owns the few kinds of panels and the units that Coil's dashboards have; an unknown one is an error. It must not know what they show.
package draw

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"
)

// Dashboard is what Grafana reads, as far as it is drawn or checked.
type Dashboard struct {
	UID, Title, Description string
	SchemaVersion           int
	Templating              struct{ List []Variable }
	Panels                  []Panel
}

// Variable is a choice at the top. All values are drawn.
type Variable struct {
	Name, Label, Type string
	Query             any
	Definition        string
}

// Panel is a picture of queries, or the heading of those below it.
type Panel struct {
	ID                       int
	Type, Title, Description string
	GridPos                  struct{ H, W, X, Y int }
	FieldConfig              struct{ Defaults Defaults }
	Targets                  []Target
}

// Kinds of panels.
const (
	kindRow   = "row"
	kindLines = "timeseries"
	kindStat  = "stat"
	kindBars  = "bargauge"
)

// Defaults say how the values of a panel look.
type Defaults struct {
	Unit       string
	Max        *float64
	Thresholds struct{ Steps []Step }
	Custom     struct {
		FillOpacity     int
		Stacking        struct{ Mode string }
		ThresholdsStyle struct{ Mode string }
	}
}

// Step is the colour of values from one on; nil is the lowest.
type Step struct {
	Color string
	Value *float64
}

// Target is a query.
type Target struct{ RefID, Expr, LegendFormat string }

// Read reads a dashboard's file.
func Read(path string) (d Dashboard, err error) {
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &d)
	}
	if err != nil {
		return Dashboard{}, fmt.Errorf("dashboard %s: %w", path, err)
	}
	return d, nil
}

// Window is the time that is drawn.
type Window struct {
	From, To time.Time
	// Step is the distance of points, and Rate what rates are taken of: Grafana's $__interval and $__rate_interval.
	Step, Rate time.Duration
}

// Resolve puts values in place of what Grafana fills in. Variables that users choose stay: they are texts.
func (w Window) Resolve(expr string) string {
	ms := func(d time.Duration) string { return fmt.Sprintf("%dms", d.Milliseconds()) }
	return strings.NewReplacer("$__rate_interval", ms(w.Rate), "$__interval", ms(w.Step), "$__range", ms(w.To.Sub(w.From))).Replace(expr)
}

// Chosen is a value in a query that users choose.
var Chosen = regexp.MustCompile(`"\$(\w+)"`)

// All is Resolve with all values of each variable.
func (w Window) All(expr string) string { return Chosen.ReplaceAllString(w.Resolve(expr), `".*"`) }

var inLegend = regexp.MustCompile(`\{\{(\w+)\}\}`)

// legend is the name of a series.
func (t Target) legend(s Series) string {
	return inLegend.ReplaceAllStringFunc(t.LegendFormat, func(label string) string { return s.Labels[strings.Trim(label, "{}")] })
}

// colours of thresholds, and of lines in their order, which are Grafana's on a light page.
var (
	colours = map[string]string{"green": "#56a64b", "orange": "#ff780a", "red": "#e02f44"}
	palette = []string{"#56a64b", "#e0b400", "#3274d9", "#ff780a", "#e02f44", "#a352cc", "#37a2a2", "#8f3bb8", "#1f60c4", "#c4162a", "#19730e", "#cc9d00"}
)

// colour is that of a value.
func (d Defaults) colour(v float64) (string, error) {
	name := ""
	for _, s := range d.Thresholds.Steps {
		if s.Value == nil || v >= *s.Value {
			name = s.Color
		}
	}
	c, ok := colours[name]
	if !ok {
		return "", fmt.Errorf("the colour %q isn't known", name)
	}
	return c, nil
}

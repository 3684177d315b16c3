package main

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
)

// Target is what a figure has to reach on the machine of README.md.
type Target struct {
	Figure  string `json:"figure"`
	Got     string `json:"got"`
	Want    string `json:"want"`
	Reached bool   `json:"reached"`
}

// errMissed says that a target was missed; the table names it.
var errMissed = errors.New("a target was missed")

// targets holds the figures against what they have to reach. A figure that wasn't
// measured has none.
func targets(rows []Row, d Daemon) []Target {
	find := func(system, op string, concurrency, existing int, family string) (Row, bool) {
		for _, r := range rows {
			if r.System == system && r.Op == op && r.Concurrency == concurrency && r.Existing == existing && r.Family == family {
				return r, true
			}
		}
		return Row{}, false
	}
	var all []Target
	atMost := func(figure, unit string, got, limit float64) {
		all = append(all, target(figure, unit, "at most", got, limit, got <= limit))
	}
	atLeast := func(figure, unit string, got, limit float64) {
		all = append(all, target(figure, unit, "at least", got, limit, got >= limit))
	}
	add, ok := find("coil", "ADD", 1, 0, ipv4)
	if ok {
		atMost("ADD, one at a time, p50", " ms", add.P50, 2.5)
	}
	kernel, ok1 := find("kernel", "ADD", 1, 0, ipv4)
	exec, ok2 := find("exec", "ADD", 1, 0, ipv4)
	if ok && ok1 && ok2 {
		atMost("ADD, one at a time, p50, by that of exec and kernel together", "", add.P50/(exec.P50+kernel.P50), 1.8)
	}
	if dualStack, ok2 := find("coil", "ADD", 1, 0, dual); ok && ok2 {
		atMost("ADD, one at a time, p50, dual stack more than IPv4", " ms", dualStack.P50-add.P50, 1)
	}
	many, ok := find("coil", "ADD", 8, 0, ipv4)
	if ok {
		atLeast("ADD, 8 at once", "/s", many.Rate, 600)
	}
	if onto, ok2 := find("coil", "ADD", 8, 1000, ipv4); ok && ok2 {
		atLeast("ADD, 8 at once, onto 1000 pods by onto none", "", onto.Rate/many.Rate, 0.8)
	}
	if del, ok := find("coil", "DEL", 1, 0, ipv4); ok {
		atMost("DEL, one at a time, p50", " ms", del.P50, 5)
	}
	if del, ok := find("coil", "DEL", 8, 0, ipv4); ok {
		atLeast("DEL, 8 at once, until the links are gone", "/s", del.Rate, 600)
	}
	failures := 0
	for _, r := range rows {
		if r.System == "coil" {
			failures += r.Failures
		}
	}
	atMost("calls of Coil that failed", "", float64(failures), 0)
	if d.Churned == 0 {
		return all
	}
	atMost("ADDs and DELs that failed while links came and went", "", float64(d.ChurnFailures), 0)
	atLeast("pods attached and detached meanwhile", "", float64(d.Churned), 10000)
	atMost("coild, from its start to the first ADD, 1000 pods", " ms", d.Restart, 300)
	atMost("coild, resident memory, 250 pods", " MiB", d.RSS, 40)
	atMost("coild, idle, 250 pods", " % of a processor", d.Idle*100, 0.1)
	return all
}

func target(figure, unit, bound string, got, limit float64, reached bool) Target {
	text := func(x float64) string { return fmt.Sprintf("%.4g%s", x, unit) }
	return Target{Figure: figure, Got: text(got), Want: bound + " " + text(limit), Reached: reached}
}

// verdict prints targets; errMissed unless all are reached.
func verdict(out io.Writer, all []Target) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	missed := false
	for _, t := range all {
		word := "reached"
		if !t.Reached {
			word, missed = "MISSED", true
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", word, t.Figure, t.Got, t.Want)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if missed {
		return errMissed
	}
	return nil
}

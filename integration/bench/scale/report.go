package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/coil-net/coil/integration/bench/figures"
)

// report is scale.json: what a run has measured, and when and where.
type report struct {
	figures.Conditions
	Figures figures.Figures `json:"figures"`
	// Requests counts what all coilds asked for together, by what it was.
	Requests []requestCount `json:"requests,omitempty"`
}

func newReport() *report { return &report{Conditions: figures.Now()} }

func (r *report) write(path string) error {
	r.LoadAtEnd = figures.Load()
	return figures.Write(path, r)
}

// print prints tables as people read them; figures.ErrMissed unless all targets are
// reached.
func (r *report) print(out io.Writer) error {
	fmt.Fprintf(out, "%s, load %s to %s\n\n", r.Conditions, r.Load, r.LoadAtEnd)
	if err := r.Figures.Print(out); err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if len(r.Requests) > 0 {
		fmt.Fprintln(w, "\nrequests of all coilds\tof each")
	}
	for _, c := range r.Requests {
		fmt.Fprintf(w, "%d\t%d to %d\t%s %s\n", c.All, c.Least, c.Most, c.Verb, c.Subject)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return r.Figures.Verdict()
}

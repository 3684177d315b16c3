package main

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// table prints rows as people read them: a line per cell and operation, a column
// per system.
func table(out io.Writer, rows []Row, systems []string) error {
	type line struct {
		op string
		c  cell
	}
	var order []line
	cells := map[line]map[string]Row{}
	for _, r := range rows {
		l := line{r.Op, cell{r.Concurrency, r.Existing, r.Family}}
		if cells[l] == nil {
			cells[l] = map[string]Row{}
			order = append(order, l)
		}
		cells[l][r.System] = r
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "family\tpods\tat once\top\t")
	for _, s := range systems {
		fmt.Fprintf(w, "%s p50\tp99\tper s\t", s)
	}
	fmt.Fprintln(w)
	for _, op := range ops {
		for _, l := range order {
			if l.op != op {
				continue
			}
			fmt.Fprintf(w, "%s\t%d\t%d\t%s\t", l.c.family, l.c.existing, l.c.concurrency, l.op)
			for _, s := range systems {
				r, ok := cells[l][s]
				if !ok {
					fmt.Fprint(w, "-\t-\t-\t")
					continue
				}
				failed := ""
				if r.Failures > 0 {
					failed = fmt.Sprintf(" (%d of %d failed)", r.Failures, r.N)
				}
				fmt.Fprintf(w, "%.2f\t%.2f\t%.0f%s\t", r.P50, r.P99, r.Rate, failed)
			}
			fmt.Fprintln(w)
		}
	}
	return w.Flush()
}

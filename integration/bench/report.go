package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// conditions say when and where figures were measured.
type conditions struct {
	Date      time.Time  `json:"date"`
	Kernel    string     `json:"kernel"`
	CPU       string     `json:"cpu"`
	CPUs      int        `json:"cpus"`
	Go        string     `json:"go"`
	Load      string     `json:"loadavg_at_start"`
	LoadAtEnd string     `json:"loadavg_at_end"`
	Cells     []cellNote `json:"cells,omitempty"`
}

func newConditions() conditions {
	var u unix.Utsname
	_ = unix.Uname(&u) // what fails here is only a label
	return conditions{
		Date: time.Now().UTC().Truncate(time.Second), Kernel: unix.ByteSliceToString(u.Release[:]), CPU: cpuModel(),
		CPUs: runtime.NumCPU(), Go: runtime.Version(), Load: loadavg(),
	}
}

func (c conditions) String() string {
	return fmt.Sprintf("%s, Linux %s, %d x %s, %s", c.Date.Format("2006-01-02"), c.Kernel, c.CPUs, c.CPU, c.Go)
}

func cpuModel() string {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}

// write writes a value as JSON to a file below dir.
func write(dir, name string, v any) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), append(b, '\n'), 0o644)
}

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

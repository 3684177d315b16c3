package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// Figure is one line of scale.json.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	// Unit is empty for ratios and counts.
	Unit string `json:"unit,omitempty"`
	// AtMost or AtLeast is the target; a figure without one only informs.
	AtMost  *float64 `json:"at_most,omitempty"`
	AtLeast *float64 `json:"at_least,omitempty"`
	Reached bool     `json:"reached"`
}

// report is what a run has measured, and when and where.
type report struct {
	Date    time.Time `json:"date"`
	Kernel  string    `json:"kernel"`
	CPU     string    `json:"cpu"`
	CPUs    int       `json:"cpus"`
	Go      string    `json:"go"`
	Load    string    `json:"loadavg_at_start"`
	LoadEnd string    `json:"loadavg_at_end"`
	Figures []Figure  `json:"figures"`
	// Requests counts what all coilds asked for together, by what it was.
	Requests []requestCount `json:"requests,omitempty"`
}

func newReport() *report {
	var u unix.Utsname
	_ = unix.Uname(&u) // what fails here is only a label
	return &report{
		Date: time.Now().UTC().Truncate(time.Second), Kernel: unix.ByteSliceToString(u.Release[:]), CPU: cpuModel(),
		CPUs: runtime.NumCPU(), Go: runtime.Version(), Load: loadavg(),
	}
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

func loadavg() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

func (r *report) atMost(name, unit string, value, limit float64) {
	r.Figures = append(r.Figures, Figure{Name: name, Unit: unit, Value: round(value), AtMost: &limit, Reached: value <= limit})
}

func (r *report) atLeast(name, unit string, value, limit float64) {
	r.Figures = append(r.Figures, Figure{Name: name, Unit: unit, Value: round(value), AtLeast: &limit, Reached: value >= limit})
}

// note adds a figure without a target.
func (r *report) note(name, unit string, value float64) {
	r.Figures = append(r.Figures, Figure{Name: name, Unit: unit, Value: round(value), Reached: true})
}

func (r *report) write(path string) error {
	r.LoadEnd = loadavg()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// errMissed says that a target was missed; the table names it.
var errMissed = errors.New("a target was missed")

// print prints tables as people read them; errMissed unless all targets are reached.
func (r *report) print(out io.Writer) error {
	fmt.Fprintf(out, "%s, Linux %s, %d x %s, %s, load %s to %s\n\n", r.Date.Format(time.DateOnly), r.Kernel, r.CPUs, r.CPU, r.Go, r.Load, r.LoadEnd)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	missed := false
	for _, f := range r.Figures {
		word, want := "", ""
		switch {
		case f.AtMost != nil:
			word, want = "reached", fmt.Sprintf("at most %.4g %s", *f.AtMost, f.Unit)
		case f.AtLeast != nil:
			word, want = "reached", fmt.Sprintf("at least %.4g %s", *f.AtLeast, f.Unit)
		}
		if !f.Reached {
			word, missed = "MISSED", true
		}
		fmt.Fprintf(w, "%s\t%s\t%.4g %s\t%s\n", word, f.Name, f.Value, f.Unit, want)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if len(r.Requests) > 0 {
		fmt.Fprintln(w, "\nrequests of all coilds\tof each")
	}
	for _, c := range r.Requests {
		fmt.Fprintf(w, "%d\t%d to %d\t%s %s\n", c.All, c.Least, c.Most, c.Verb, c.Subject)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if missed {
		return errMissed
	}
	return nil
}

// quantile is the nearest-rank quantile, in milliseconds; 0 if there are no values.
func quantile(values []time.Duration, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(q * float64(len(sorted))))
	return ms(sorted[min(max(rank, 1), len(sorted))-1])
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// round keeps three digits behind the point.
func round(x float64) float64 { return math.Round(x*1000) / 1000 }

// Package figures is how measurements are told: with when and where they were made, and
// beside what they have to reach.
//
// It must not know what is measured.
package figures

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

	"github.com/coil-net/coil/integration/lab/build"
)

// Folder is where results go: the given folder, or integration/bench/out. Measuring
// needs root.
func Folder(given string) (string, error) {
	if os.Geteuid() != 0 {
		return "", errors.New("must run as root: it makes network namespaces")
	}
	if given != "" {
		return given, nil
	}
	root, err := build.Root()
	if err != nil {
		return "", err
	}
	return filepath.Join(root, "integration/bench/out"), nil
}

// Conditions say when and where figures were measured.
type Conditions struct {
	Date      time.Time `json:"date"`
	Kernel    string    `json:"kernel"`
	CPU       string    `json:"cpu"`
	CPUs      int       `json:"cpus"`
	Go        string    `json:"go"`
	Load      string    `json:"loadavg_at_start"`
	LoadAtEnd string    `json:"loadavg_at_end"`
}

// Now returns the conditions at the start of a measurement.
func Now() Conditions {
	var u unix.Utsname
	_ = unix.Uname(&u) // what fails here is only a label
	return Conditions{
		Date: time.Now().UTC().Truncate(time.Second), Kernel: unix.ByteSliceToString(u.Release[:]), CPU: cpuModel(),
		CPUs: runtime.NumCPU(), Go: runtime.Version(), Load: Load(),
	}
}

// String is the date and the machine in one line.
func (c Conditions) String() string {
	return fmt.Sprintf("%s, Linux %s, %d x %s, %s", c.Date.Format(time.DateOnly), c.Kernel, c.CPUs, c.CPU, c.Go)
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

// Load is /proc/loadavg.
func Load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(b))
}

// Figure is one that was measured.
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

// Figures are those of one run.
type Figures []Figure

// AtMost adds a figure that has to be at most limit.
func (fs *Figures) AtMost(name, unit string, value, limit float64) {
	*fs = append(*fs, Figure{Name: name, Unit: unit, Value: Round(value, 3), AtMost: &limit, Reached: value <= limit})
}

// AtLeast adds a figure that has to be at least limit.
func (fs *Figures) AtLeast(name, unit string, value, limit float64) {
	*fs = append(*fs, Figure{Name: name, Unit: unit, Value: Round(value, 3), AtLeast: &limit, Reached: value >= limit})
}

// Note adds a figure without a target.
func (fs *Figures) Note(name, unit string, value float64) {
	*fs = append(*fs, Figure{Name: name, Unit: unit, Value: Round(value, 3), Reached: true})
}

// ErrMissed says that a target was missed; the table names it.
var ErrMissed = errors.New("a target was missed")

// Verdict is ErrMissed unless all targets are reached.
func (fs Figures) Verdict() error {
	if slices.ContainsFunc(fs, func(f Figure) bool { return !f.Reached }) {
		return ErrMissed
	}
	return nil
}

// Print prints a line for each figure.
func (fs Figures) Print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, f := range fs {
		word, want := "", ""
		switch {
		case f.AtMost != nil:
			word, want = "reached", fmt.Sprintf("at most %.5g %s", *f.AtMost, f.Unit)
		case f.AtLeast != nil:
			word, want = "reached", fmt.Sprintf("at least %.5g %s", *f.AtLeast, f.Unit)
		}
		if !f.Reached {
			word = "MISSED"
		}
		fmt.Fprintf(w, "%s\t%s\t%.5g %s\t%s\n", word, f.Name, f.Value, f.Unit, want)
	}
	return w.Flush()
}

// Write writes a value as JSON to a file, and makes its folder.
func Write(path string, v any) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// Quantile is the nearest-rank quantile in milliseconds; 0 if there are no values.
func Quantile(values []time.Duration, q float64) float64 {
	return Milliseconds(NearestRank(values, q))
}

// NearestRank is the smallest value that the part q of all doesn't exceed; 0 if there are no values.
func NearestRank(values []time.Duration, q float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Milliseconds are those of d, to a microsecond.
func Milliseconds(d time.Duration) float64 { return Round(float64(d)/float64(time.Millisecond), 3) }

// Round keeps so many digits behind the point.
func Round(x float64, digits int) float64 {
	p := math.Pow10(digits)
	return math.Round(x*p) / p
}

package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestMain(m *testing.M) {
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	os.Exit(m.Run())
}

// need is for tests that measure on a small scale, in the time that tests have. What
// depends on the speed of the machine, which tests share, is left to the measurement.
func need(t *testing.T) options {
	t.Helper()
	testkit.Need(t, testkit.Netns)
	testkit.Need(t, testkit.APIServer)
	return options{
		nodes: 50, blocks: 400, singles: 5, burst: 300, coilds: 20,
		delay: time.Second, quiet: 2 * time.Second, log: os.Stderr,
	}
}

// figure returns the figure whose name contains a text.
func (r *report) figure(t *testing.T, text string) figures.Figure {
	t.Helper()
	i := slices.IndexFunc(r.Figures, func(f figures.Figure) bool { return strings.Contains(f.Name, text) })
	if i < 0 {
		t.Fatalf("there is no figure %q: %+v", text, r.Figures)
	}
	return r.Figures[i]
}

// The controller answers many requests about as fast as a client that only writes.
func TestController(t *testing.T) {
	rep := newReport()
	if err := measureController(t.Context(), need(t), rep); err != nil {
		t.Fatal(err)
	}
	if f := rep.figure(t, "controller by bare client"); f.Value < 0.4 {
		t.Errorf("the controller is %.2f times as fast as a bare client", f.Value)
	}
	if f := rep.figure(t, "most of the whole run"); !f.Reached {
		t.Errorf("even a small cluster takes the controller %.0f MiB", f.Value)
	}
}

// A pool whose block is late holds up no pod of another pool.
func TestLateBlock(t *testing.T) {
	o := need(t)
	if _, _, err := stall(t.Context(), o); err != nil {
		t.Fatal(err)
	}
}

// Each coild lists and watches what the table allows, once.
func TestCoilds(t *testing.T) {
	o := need(t)
	rep := newReport()
	if err := measureCoilds(t.Context(), o, rep); err != nil {
		t.Fatal(err)
	}
	for _, f := range rep.Figures {
		if !f.Reached {
			t.Errorf("%s: %v", f.Name, f.Value)
		}
	}
	if len(rep.Requests) == 0 {
		t.Error("no request was counted")
	}
	if t.Failed() {
		if err := rep.print(os.Stderr); err != nil {
			t.Log(err)
		}
	}
}

// The report ends with an error when a target was missed, and only then.
func TestReport(t *testing.T) {
	for _, tt := range []struct {
		name   string
		add    func(*report)
		missed bool
	}{
		{"reached", func(r *report) { r.Figures.AtMost("x", "s", 1, 1) }, false},
		{"too much", func(r *report) { r.Figures.AtMost("x", "s", 1.1, 1) }, true},
		{"too little", func(r *report) { r.Figures.AtLeast("x", "", 0.7, 0.8) }, true},
		{"without a target", func(r *report) { r.Figures.Note("x", "", 99) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newReport()
			tt.add(r)
			var out strings.Builder
			if err := r.print(&out); (err != nil) != tt.missed || strings.Contains(out.String(), "MISSED") != tt.missed {
				t.Errorf("error %v, printed\n%s", err, out.String())
			}
		})
	}
	if got := figures.Quantile([]time.Duration{3e6, 1e6, 2e6, 4e6}, 0.5); got != 2 {
		t.Errorf("the median of 1 to 4 ms is %v", got)
	}
}

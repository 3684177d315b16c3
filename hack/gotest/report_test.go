package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// sources is a module with every way in which tests end.
var sources = map[string]string{
	"go.mod": "module example.org/m\n\ngo 1.26\n",
	"good/good_test.go": `package good
import "testing"
func TestA(t *testing.T) { t.Attr("rounds", "7") }
func TestB(t *testing.T) { t.Run("one", func(t *testing.T) {}); t.Run("two", func(t *testing.T) {}) }
`,
	"empty/empty.go": "package empty\n",
	"bad/bad_test.go": `package bad
import "testing"
func TestGood(t *testing.T) {}
func TestBad(t *testing.T) {
	t.Log("said by the parent")
	t.Run("child", func(t *testing.T) { t.Error("said by the child") })
	t.Run("sibling", func(t *testing.T) { t.Log("of no interest") })
}
`,
	"exits/exits_test.go": `package exits
import ("os"; "testing")
func TestExit(t *testing.T) { println("last words"); os.Exit(3) }
`,
	"panics/panics_test.go": `package panics
import "testing"
func TestPanic(t *testing.T) { panic("no way") }
`,
	"broken/broken_test.go": `package broken
import "testing"
func TestX(t *testing.T) { undefined() }
`,
	"integration/skips/skips_test.go": `package skips
import ("os"; "testing")
func TestTier(t *testing.T) {
	if os.Getenv("COIL_TEST_TIERS") != "netns" { t.Skip("tier netns was not asked for") }
}
`,
}

// asReference is a machine as fast as the reference.
func asReference(context.Context) (speed, error) { return reference, nil }

// runIn runs gotest on packages of a copy of sources and returns its output.
func runIn(t *testing.T, o options) (string, error) {
	t.Helper()
	return runOf(t.Context(), t, sources, o)
}

// runOf runs gotest on packages of a module.
func runOf(ctx context.Context, t *testing.T, files map[string]string, o options) (string, error) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, files)
	t.Chdir(dir)
	o.timeout = time.Minute
	if o.measure == nil {
		o.measure = asReference
	}
	var out strings.Builder
	err := run(ctx, o, &out)
	t.Log(out.String())
	return out.String(), err
}

// write writes files below a folder.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRun(t *testing.T) {
	tests := []struct {
		name    string
		options options
		fails   bool
		want    []string
		not     []string
	}{
		{
			name:    "all pass",
			options: options{packages: []string{"./good", "./empty"}},
			want:    []string{"ok   example.org/m/good", "example.org/m/good TestA: rounds 7\n", "3 passed, 0 failed, 0 skipped"},
			not:     []string{"empty"},
		},
		{
			name:    "a subtest fails",
			options: options{packages: []string{"./bad"}},
			fails:   true,
			want: []string{
				"--- FAIL example.org/m/bad TestBad/child", "said by the child", "said by the parent",
				"s\n  TestBad/child\n      bad_test.go:6: said by the child\n",
				"\nfailed:\n  example.org/m/bad TestBad/child\n      bad_test.go:6: said by the child\n", "2 passed, 1 failed, 0 skipped",
			},
			not: []string{"of no interest"},
		},
		{
			name:    "a test ends the process",
			options: options{packages: []string{"./exits", "./good"}},
			fails:   true,
			want:    []string{"ended during TestExit", "last words", "\nfailed:\n  example.org/m/exits TestExit\n", "3 passed, 1 failed"},
		},
		{
			name:    "a test panics",
			options: options{packages: []string{"./panics"}},
			fails:   true,
			want:    []string{"no way", "panics_test.go:3", "example.org/m/panics TestPanic\n", "0 passed, 1 failed"},
		},
		{
			name:    "a test doesn't compile",
			options: options{packages: []string{"./broken", "./good"}},
			fails:   true,
			want:    []string{"undefined: undefined", "example.org/m/broken (build)", "3 passed, 1 failed"},
		},
		{
			name:    "a tier that wasn't asked for",
			options: options{packages: []string{"./..."}, run: "TestTier"},
			fails:   true, // because of ./broken
			want:    []string{"0 passed, 1 failed, 1 skipped"},
		},
		{
			name:    "a skip is good enough",
			options: options{packages: []string{"./integration/..."}},
			want:    []string{"0 passed, 0 failed, 1 skipped"},
		},
		{
			name:    "a skip is not good enough",
			options: options{packages: []string{"./integration/..."}, noSkips: true},
			fails:   true,
			want:    []string{"example.org/m/integration/skips TestTier: skips_test.go:4: tier netns was not asked for"},
		},
		{
			name:    "a tier that was asked for",
			options: options{packages: []string{"./integration/..."}, tiers: "netns", noSkips: true},
			want:    []string{"1 passed, 0 failed, 0 skipped"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			out, err := runIn(t, tt.options)
			if tt.fails != errors.Is(err, errFailed) || !tt.fails && err != nil {
				t.Errorf("error %v, want failed tests: %v", err, tt.fails)
			}
			for _, s := range tt.want {
				if !strings.Contains(out, s) {
					t.Errorf("the output lacks %q", s)
				}
			}
			for _, s := range tt.not {
				if strings.Contains(out, s) {
					t.Errorf("the output has %q", s)
				}
			}
		})
	}
}

func TestRunEndsWhenInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out strings.Builder
	if err := run(ctx, options{packages: []string{"./..."}, timeout: time.Minute, measure: asReference}, &out); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}

// A test that is running when the run is interrupted is told so, and can clean up: the go command doesn't pass a signal on.
func TestRunInterruptsTests(t *testing.T) {
	dir := t.TempDir()
	runs, cleaned := filepath.Join(dir, "runs"), filepath.Join(dir, "cleaned")
	files := map[string]string{"go.mod": "module example.org/m\n\ngo 1.26\n", "waits/waits_test.go": fmt.Sprintf(`package waits
import ("os"; "os/signal"; "testing"; "time")
func TestWaits(t *testing.T) {
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, os.Interrupt)
	os.WriteFile(%q, nil, 0o644)
	select {
	case <-interrupted:
		os.WriteFile(%q, nil, 0o644)
	case <-time.After(time.Minute):
	}
}
`, runs, cleaned)}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		defer cancel()
		for !exists(runs) && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
	}()
	if out, err := runOf(ctx, t, files, options{packages: []string{"./..."}}); !errors.Is(err, context.Canceled) || !exists(cleaned) {
		t.Errorf("error %v, want %v; the test was interrupted: %t\n%s", err, context.Canceled, exists(cleaned), out)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestSplit(t *testing.T) {
	got := split([]string{"m/pkg/ipam", "m/integration/lab", "m/cmd/coil", "m/integration/lab/vm", "m/integration/egress", "m/integration/egress/cluster", "m/integration/cluster", "m/integration/upgrade", "m/integration/routes", "m/pkg/app/coil", "m/pkg/app/coild", "m/pkg/podnet", "m/pkg/kernel/nft"})
	want := parts{
		timed: []string{"m/pkg/app/coil"},
		light: []string{"m/pkg/podnet", "m/pkg/kernel/nft"}, pure: []string{"m/pkg/ipam", "m/cmd/coil", "m/pkg/app/coild"}, heavy: []string{"m/integration/lab"},
		waiting: []string{"m/integration/cluster", "m/integration/upgrade"}, routing: []string{"m/integration/routes"}, late: []string{"m/integration/egress/cluster"}, emulated: []string{"m/integration/lab/vm", "m/integration/egress"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(parts{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Light packages, which use all processors, don't keep others from beginning. With machines, those that
// make no network namespace come after these.
func TestLightComesLast(t *testing.T) {
	files := maps.Clone(sources)
	files["integration/egress/egress_test.go"] = "package egress\nimport (\"testing\"; \"time\")\nfunc TestMachine(t *testing.T) { time.Sleep(time.Second) }\n"
	for tiers, first := range map[string]string{"netns": "integration/skips", "vm": "integration/egress"} {
		out, err := runOf(t.Context(), t, files, options{packages: []string{"./good", "./integration/..."}, tiers: tiers})
		before, light := strings.Index(out, "ok   example.org/m/"+first), strings.Index(out, "ok   example.org/m/good")
		if err != nil || before < 0 || light < before {
			t.Errorf("%s: error %v; at %d is what comes first, at %d what comes last", tiers, err, before, light)
		}
	}
}

func TestHeartbeat(t *testing.T) {
	now := time.Unix(1000, 0)
	var out strings.Builder
	r := newReport(&out, func() time.Time { return now })
	r.add(event{Action: "run", Package: "p", Test: "TestLong"})
	r.heartbeat()
	if out.Len() > 0 {
		t.Errorf("at once: %q", out.String())
	}
	now = now.Add(40 * time.Second)
	r.heartbeat()
	if want := "...  p TestLong (40s)\n"; out.String() != want {
		t.Errorf("after 40 s: %q, want %q", out.String(), want)
	}
	r.heartbeat()
	if n := strings.Count(out.String(), "\n"); n != 1 {
		t.Errorf("%d lines although one was written just now", n)
	}
}

func TestMessages(t *testing.T) {
	output := []string{
		"=== RUN   TestX\n", "    x_test.go:3: " + strings.Repeat("long ", 100) + "\n", "        its second line\n",
		"    I1122 15:10:23.341438   19185 export.go:75] said by a program\n", "--- FAIL: TestX (0.00s)\n",
		"panic: ouch [recovered, repanicked]\n", "\t/usr/local/go/src/testing/testing.go:1974 +0x232\n",
	}
	want := []string{"x_test.go:3: " + strings.Repeat("long ", 57) + "lo...", "panic: ouch [recovered, repanicked]"}
	if diff := cmp.Diff(want, messages(output)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	many := slices.Repeat([]string{"    x_test.go:3: no\n"}, 20)
	if got := messages(many); len(got) != 9 || got[8] != "..." {
		t.Errorf("of 20 messages: %q", got)
	}
}

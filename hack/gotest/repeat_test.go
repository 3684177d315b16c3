package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
)

// weather is a module whose tests fail in their first run, or in the first two.
var weather = map[string]string{
	"go.mod": "module example.org/m\n\ngo 1.26\n",
	"late/late_test.go": `package late
import ("os"; "testing")
func late(t *testing.T, name string) {
	if _, err := os.Stat(name); err != nil {
		os.WriteFile(name, nil, 0o600)
		t.Errorf("%s was late", name)
	}
}
func TestSteady(t *testing.T) { t.Attr("scale", os.Getenv("COIL_TEST_TIMEOUT_SCALE")) }
func TestLate(t *testing.T) { late(t, "1") }
func TestOf(t *testing.T) {
	t.Run("a/b (c)", func(t *testing.T) { late(t, "2") })
	t.Run("d", func(t *testing.T) { late(t, "3") })
	t.Run("e", func(t *testing.T) { late(t, "4") })
}
func TestTwice(t *testing.T) {
	if _, err := os.Stat("5"); err == nil { late(t, "6") }
	late(t, "5")
}
func TestThird(t *testing.T) {
	if _, err := os.Stat("7"); err == nil {
		if _, err := os.Stat("8"); err == nil { t.Error("the second time alone") }
		os.WriteFile("8", nil, 0o600)
	}
	late(t, "7")
}
func TestNeedsOthers(t *testing.T) {
	if _, err := os.Stat("9"); err == nil { t.Skip("alone") }
	late(t, "9")
}
`,
	"late/late.go": "package late\n",
	"many/many_test.go": `package many
import ("fmt"; "os"; "testing")
func TestMain(m *testing.M) { code := m.Run(); os.WriteFile("ran", nil, 0o600); os.Exit(code) }
` + func() (b string) {
		for i := range 11 {
			b += fmt.Sprintf("func Test%d(t *testing.T) { if _, err := os.Stat(\"ran\"); err != nil { t.Error(fmt.Sprint(\"no\")) } }\n", i)
		}
		return b
	}(),
	"races/races_test.go": `package races
import ("os"; "testing")
func TestRaces(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o600)
		os.Stderr.WriteString("==================\nWARNING: DATA RACE\nWrite at 0x00c000012345 by goroutine 7:\n==================\n")
		t.Error("race detected during execution of test")
	}
}
`,
	"panics/panics_test.go": `package panics
import ("os"; "testing")
func TestPanics(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o600)
		t.Run("failed before", func(t *testing.T) { t.Error("no") })
		panic("no way")
	}
	t.Run("failed before", func(t *testing.T) {})
}
`,
	"end/end_test.go": `package end
import ("os"; "testing")
func TestMain(m *testing.M) {
	if code := m.Run(); code != 0 { panic("after the tests") }
}
func TestEnd(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o600)
		t.Error("late")
	}
}
`,
	"leaks/leaks_test.go": `package leaks
import ("os"; "testing")
func TestLeaks(t *testing.T) {
	if _, err := os.Stat("ran"); err != nil {
		os.WriteFile("ran", nil, 0o600)
		t.Error("process 7 is left behind: <nil>")
	}
}
`,
	"main/main_test.go": `package main
import ("os"; "testing")
func TestMain(m *testing.M) {
	code := m.Run()
	if _, err := os.Stat("ran"); err == nil && code == 0 { code = 1; println("something is wrong in the end") }
	os.WriteFile("ran", nil, 0o600)
	os.Exit(code)
}
func TestX(t *testing.T) { if _, err := os.Stat("ran"); err != nil { t.Error("late") } }
`,
}

// builtGo is a script in the place of the go command. It runs tests of weather that are linked already: each case
// of TestRepeat runs a few of them many times.
const builtGo = `#!/bin/sh
command=$1
here=$PWD
failed=0
for arg; do
	case $arg in
	-run=*) run=${arg#-run=} ;;
	./* | example.org/*)
		package=${arg##*/}
		if [ "$command" = list ]; then
			echo "example.org/m/$package"
			continue
		fi
		cd "$here/$package"
		"$TEST2JSON" -t -p "example.org/m/$package" "$BUILT/$package.test" -test.v=test2json -test.paniconexit0 -test.timeout=1m -test.run="$run" || failed=1
		;;
	esac
done
exit $failed
`

// useBuilt links the tests of weather, and puts builtGo into the PATH of the test.
func useBuilt(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	write(t, dir, weather)
	write(t, dir, map[string]string{"bin/go": builtGo})
	testkit.Check(t, os.Chmod(filepath.Join(dir, "bin/go"), 0o755))
	for name, args := range map[string][]string{
		"BUILT":     {"test", "-c", "-ldflags=-s", "-o", dir + "/bin/", "./..."},
		"TEST2JSON": {"tool", "-n", "test2json"},
	} {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Dir, cmd.Env, cmd.Stderr = dir, append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
		out := testkit.Must(cmd.Output())(t)
		t.Setenv(name, cmp.Or(strings.TrimSpace(string(out)), dir+"/bin"))
	}
	t.Setenv("PATH", dir+"/bin:"+os.Getenv("PATH"))
}

func TestRepeat(t *testing.T) {
	useBuilt(t)
	const failedLate = "example.org/m/late Test"
	tests := []struct {
		name    string
		options options
		fails   bool
		want    []string
		not     []string
	}{
		{
			name:    "as many as tolerated are unsteady",
			options: options{packages: []string{"./late"}, run: "TestSteady|TestLate|TestOf/(d|a)", tolerated: 3},
			want: []string{
				"repetition 2 of 2: example.org/m/late TestLate\n", "they count as passed:\n  example.org/m/late TestLate: unsteady in 1 of its last 1 runs\n",
				"TestOf/a/b_(c): unsteady in", "TestOf/d: unsteady in", "3 was late\n",
				"TestSteady: scale 1\n", "slowest packages:\n", "s  example.org/m/late\n", "slowest tests:\n", "s  example.org/m/late TestSteady\n", "\n4 passed, 0 failed, 0 skipped in ",
			},
			not: []string{"\nfailed:", "MEND"},
		},
		{
			name:    "one more than tolerated",
			options: options{packages: []string{"./late"}, run: "TestLate|TestOf", tolerated: 3},
			fails:   true,
			want:    []string{"they count as failed", "\nfailed:\n  example.org/m/late TestLate\n      late_test.go:6: 1 was late\n", "\n0 passed, 4 failed, 0 skipped in "},
		},
		{
			name:    "none is tolerated",
			options: options{packages: []string{"./late"}, run: "TestSteady|TestLate"},
			fails:   true,
			want:    []string{"they count as failed", "\n1 passed, 1 failed, 0 skipped in "},
		},
		{
			name:    "failed again",
			options: options{packages: []string{"./late"}, run: "TestTwice|TestThird", tolerated: 3},
			fails:   true,
			want:    []string{"repetition 2 of 2: " + failedLate + "Third", "\nfailed:\n  " + failedLate + "Twice", "\n0 passed, 2 failed, 0 skipped in "},
			not:     []string{"repetition 2 of 2: " + failedLate + "Twice", "\nunsteady"},
		},
		{
			name:    "skipped when alone",
			options: options{packages: []string{"./late"}, run: "TestNeedsOthers", tolerated: 3},
			fails:   true,
			want:    []string{"\n0 passed, 1 failed, 0 skipped in "},
		},
		{
			name:    "too many",
			options: options{packages: []string{"./many"}, tolerated: 20},
			fails:   true,
			want:    []string{"no failed test is repeated: too many failed", "\n0 passed, 11 failed, 0 skipped in "},
			not:     []string{"repetition"},
		},
		{
			name:    "no time left",
			options: options{packages: []string{"./late"}, run: "TestLate", again: -1, tolerated: 3},
			fails:   true,
			want:    []string{"not repeated, for there is no time left: example.org/m/late TestLate\n", "\n0 passed, 1 failed, 0 skipped in "},
		},
		{
			name:    "a race, a leak and a panic",
			options: options{packages: []string{"./races", "./leaks", "./panics", "./end"}, tolerated: 4},
			fails:   true,
			want:    []string{"\nfailed:\n", "TestRaces", "TestLeaks", "TestPanics/failed_before", "TestEnd", "\n0 passed, 4 failed, 0 skipped in "},
			not:     []string{"repetition"},
		},
		{
			name:    "the package fails though the test passes",
			options: options{packages: []string{"./main"}, tolerated: 3},
			fails:   true,
			want:    []string{"repetition 1 of 2", "something is wrong in the end", "\n0 passed, 1 failed, 0 skipped in "},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.options.again == 0 {
				tt.options.again = time.Hour
			}
			t.Setenv(scaleEnv, "")
			tt.options.history = filepath.Join(t.TempDir(), "history.json")
			out, err := runOf(t.Context(), t, weather, tt.options)
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

// The history tells of a test that is unsteady for the second time, and keeps what a run of other tests knows nothing of. The
// go command is the real one.
func TestUnsteadyAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.json")
	o := options{packages: []string{"./late"}, run: "TestLate|TestSteady", again: time.Hour, tolerated: 3, history: path}
	for n, want := range []string{"unsteady in 1 of its last 1 runs\n", "unsteady in 2 of its last 2 runs -- MEND IT FIRST\n"} {
		out, err := runOf(t.Context(), t, weather, o)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("run %d: %v, and the output lacks %q", n+1, err, want)
		}
	}
	if content, err := os.ReadFile(path); err != nil || strings.Contains(string(content), "TestSteady") {
		t.Errorf("the history is %s, %v; want nothing of a steady test", content, err)
	}
}

func TestPattern(t *testing.T) {
	const name = "TestX/6.12/a_(b)|c[d"
	got := strings.Split(pattern(name), "/")
	for i, part := range strings.Split(name, "/") {
		if re := regexp.MustCompile(got[i]); !re.MatchString(part) || re.MatchString(part+"x") || re.MatchString("x"+part) {
			t.Errorf("%q isn't for %q alone", got[i], part)
		}
	}
}

func TestCandidates(t *testing.T) {
	r := newReport(&strings.Builder{}, time.Now)
	for i := range 11 { // of one top-level test
		r.failures = append(r.failures, failure{pkg: "p", what: fmt.Sprintf("TestX/%d", i), again: true, seconds: float64(20 - i)})
	}
	r.failures = append(r.failures, failure{pkg: "q", what: "(build)"})
	all, why := r.candidates()
	if len(all) != 11 || why != "" || all[0].what != "TestX/10" {
		t.Errorf("%d candidates, %q", len(all), why)
	}
}

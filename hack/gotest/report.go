package main

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// event is a line of "go test -json" (cmd/test2json) or of "go build -json" in it
// (cmd/go, help buildjson).
type event struct {
	Action      string
	Package     string
	ImportPath  string // of a build event
	Test        string
	Output      string
	Elapsed     float64 // seconds
	FailedBuild string
	Key, Value  string // of an attribute
}

// report sums up the events of a run, whose parts may send theirs at once.
type report struct {
	out io.Writer
	now func() time.Time

	mu sync.Mutex // of everything below

	start    time.Time
	packages map[string]*pkg
	builds   map[string][]string // output of each build, by its ID
	quiet    time.Time           // of the last line written

	passed, skipped int
	failures        []failure
	skips           []string
	ran             []string // tests that passed, as "package test"
	ended           []taken  // packages whose tests ended
	passes          []taken  // tests that passed and have no subtests
	whole           []string // packages of which all tests ran
}

// taken is how long something took.
type taken struct {
	name    string
	seconds float64
}

// failure is a test, or a part of a package's tests, that failed.
type failure struct {
	pkg, what string // what is empty if the package gives no more to name
	why       []string

	output  []string // of a test, all of it
	seconds float64
	again   bool // it is a single test, and running it again may tell a fault from the weather
	// unsteady says that it passed when it ran again.
	unsteady bool
}

func (f failure) String() string {
	return strings.TrimSpace(f.pkg+" "+f.what) + reasons(f.why)
}

// reasons are lines below the name of what failed.
func reasons(why []string) string {
	var b strings.Builder
	for _, line := range why {
		b.WriteString("\n      " + line)
	}
	return b.String()
}

// pkg is a package whose tests run.
type pkg struct {
	tests  map[string]*result
	output []string // that no test has written
	passed int
	failed bool
	// complete says that the testing package itself ended the tests, after failures.
	complete bool
	grave    bool // it said what no weather can cause
	part     bool // some of its tests didn't run, or none did now
}

// result is what is known of one test.
type result struct {
	start  time.Time
	output []string
	parent bool // it has subtests
	failed bool // a subtest has failed
}

func newReport(out io.Writer, now func() time.Time) *report {
	return &report{
		out: out, now: now, start: now(), quiet: now(),
		packages: map[string]*pkg{}, builds: map[string][]string{},
	}
}

// stray writes a line that isn't an event.
func (r *report) stray(line []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.print("%s", line)
}

// add takes the next event.
func (r *report) add(e event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e.Action {
	case "build-output":
		r.builds[e.ImportPath] = append(r.builds[e.ImportPath], e.Output)
		return
	case "build-fail":
		return // the package's own event follows and names it
	}
	p := r.packages[e.Package]
	if p == nil {
		p = &pkg{tests: map[string]*result{}}
		r.packages[e.Package] = p
	}
	if e.Test == "" {
		r.addPackage(p, e)
		return
	}
	t := p.tests[e.Test]
	if t == nil {
		t = &result{start: r.now()}
		p.tests[e.Test] = t
		if parent := p.tests[parentOf(e.Test)]; parent != nil {
			parent.parent = true
		}
	}
	switch e.Action {
	case "output":
		t.output = append(t.output, e.Output)
		p.grave = p.grave || grave.MatchString(e.Output)
	case "attr": // a figure that is worth to be seen
		r.print("     %s %s: %s %s\n", e.Package, e.Test, e.Key, e.Value)
	case "pass":
		if !t.parent {
			p.passed++
			r.passed++
			r.ran = append(r.ran, e.Package+" "+e.Test)
			r.passes = append(r.passes, taken{e.Package + " " + e.Test, e.Elapsed})
		}
		delete(p.tests, e.Test)
	case "skip":
		r.skipped++
		p.part = true
		r.skips = append(r.skips, e.Package+" "+e.Test+": "+reason(t.output))
		delete(p.tests, e.Test)
	case "fail":
		r.failTest(p, e, t)
		delete(p.tests, e.Test)
	}
}

// failTest reports a failed test. One whose subtest has failed isn't counted again; what it
// wrote itself may tell why.
func (r *report) failTest(p *pkg, e event, t *result) {
	p.failed = true
	if parent := p.tests[parentOf(e.Test)]; parent != nil {
		parent.failed = true
	}
	text := indent(t.output)
	why := messages(t.output)
	p.grave = p.grave || slices.ContainsFunc(why, leak.MatchString)
	if t.failed {
		if text != "" {
			r.print("     output of %s %s\n%s", e.Package, e.Test, text)
		}
		return
	}
	r.failures = append(r.failures, failure{pkg: e.Package, what: e.Test, why: why, output: t.output, seconds: e.Elapsed})
	r.print("--- FAIL %s %s (%.1fs)\n%s", e.Package, e.Test, e.Elapsed, text)
}

func (r *report) addPackage(p *pkg, e event) {
	switch e.Action {
	case "output":
		p.output = append(p.output, e.Output)
		p.grave = p.grave || grave.MatchString(e.Output) || abnormal.MatchString(e.Output)
		p.complete = p.complete || e.Output == "FAIL\n"
		p.part = p.part || strings.HasSuffix(e.Output, "\t(cached)\n")
	case "skip":
		delete(r.packages, e.Package) // it has no tests
	case "pass":
		r.endPackage(p, e)
		r.print("ok   %s %.1fs, %d passed\n", e.Package, e.Elapsed, p.passed)
		delete(r.packages, e.Package)
	case "fail":
		r.endPackage(p, e)
		r.failPackage(p, e)
		delete(r.packages, e.Package)
	}
}

// endPackage notes that a package's tests came to an end, of whatever kind.
func (r *report) endPackage(p *pkg, e event) {
	r.ended = append(r.ended, taken{e.Package, e.Elapsed})
	if p.part || p.grave || len(p.tests) > 0 || e.FailedBuild != "" {
		return
	}
	r.whole = append(r.whole, e.Package)
}

// failPackage reports what ended a package's tests: failed tests, which are reported
// already, or else a failed build, a panic, a timeout or an exit.
func (r *report) failPackage(p *pkg, e event) {
	var names []string
	for name := range p.tests {
		names = append(names, name)
	}
	slices.Sort(names)
	switch {
	case e.FailedBuild != "":
		r.failures = append(r.failures, failure{pkg: e.Package, what: "(build)"})
		r.print("--- FAIL %s: build\n%s", e.Package, indent(r.builds[e.FailedBuild]))
	case len(names) > 0: // these never came to an end
		r.failures = append(r.failures, failure{pkg: e.Package, what: strings.Join(names, ", ")})
		r.print("--- FAIL %s: ended during %s\n", e.Package, strings.Join(names, ", "))
		for _, name := range names {
			r.print("%s", indent(p.tests[name].output))
		}
		r.print("%s", indent(p.output))
	case !p.failed:
		r.failures = append(r.failures, failure{pkg: e.Package})
		r.print("--- FAIL %s\n%s", e.Package, indent(p.output))
	}
	for i := range r.failures {
		if f := &r.failures[i]; f.pkg == e.Package {
			f.again = p.failed && p.complete && !p.grave && len(names) == 0
		}
	}
	// The tests' logs above are long: whoever reads from here back need not search.
	r.print("FAIL %s %.1fs\n", e.Package, e.Elapsed)
	for _, f := range r.failures {
		if f.pkg == e.Package && f.what != "" {
			r.print("  %s%s\n", f.what, reasons(f.why))
		}
	}
}

// heartbeat says what runs if nothing else has been said for a while.
func (r *report) heartbeat() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.now().Sub(r.quiet) < 30*time.Second {
		return
	}
	var running []string
	for name, p := range r.packages {
		for test, t := range p.tests {
			if !t.parent {
				running = append(running, fmt.Sprintf("%s %s (%.0fs)", name, test, r.now().Sub(t.start).Seconds()))
			}
		}
	}
	slices.Sort(running)
	const most = 5
	if len(running) > most {
		running = append(running[:most], "...")
	}
	if len(running) == 0 {
		running = []string{"building"}
	}
	r.print("...  %s\n", strings.Join(running, "; "))
}

func (r *report) failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.failures) > 0
}

func (r *report) print(format string, args ...any) {
	r.quiet = r.now()
	fmt.Fprintf(r.out, format, args...)
}

func parentOf(test string) string {
	if i := strings.LastIndexByte(test, '/'); i >= 0 {
		return test[:i]
	}
	return ""
}

// frame reports whether a line is one of the testing package's own.
func frame(line string) bool {
	line = strings.TrimSpace(line)
	return line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ")
}

// reason is why a test was skipped: the last line that it wrote.
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		if !frame(line) {
			return strings.TrimSpace(line)
		}
	}
	return "no reason given"
}

// message is the beginning of what a test said by its T, or of a panic.
var message = regexp.MustCompile(`^\s*(\w+\.go:\d+: |panic: )`)

// grave is a line of output after which no failed test of a package is unsteady.
var grave = regexp.MustCompile(`^\s*WARNING: DATA RACE|race detected during execution of test|^\s*goleak: `)

// abnormal is a line of a package, after its tests, that says that it didn't end by itself. During its
// tests a panic, which a timeout is, an exit or a signal shows by the lack of the line "FAIL".
var abnormal = regexp.MustCompile(`^(panic: |fatal error: |exit status|signal: )`)

// leak is a message of a test that finds something where nothing may be.
var leak = regexp.MustCompile(`(?i)\bleak|left behind|\b(is|are) left\b|packets left|the rig left|: left (on disk|cgroups|process)`)

// messages are the first lines of what a failed test said, without what the programs
// involved said.
func messages(output []string) []string {
	const most, width = 8, 300
	var all []string
	for _, line := range output {
		if !message.MatchString(line) {
			continue
		}
		if len(all) == most {
			return append(all, "...")
		}
		line = strings.TrimSpace(line)
		if len(line) > width {
			line = strings.ToValidUTF8(line[:width], "") + "..."
		}
		all = append(all, line)
	}
	return all
}

// indent joins lines without those that frame a test.
func indent(lines []string) string {
	var b strings.Builder
	for _, line := range lines {
		if !frame(line) {
			b.WriteString("    " + strings.TrimRight(line, "\n") + "\n")
		}
	}
	return b.String()
}

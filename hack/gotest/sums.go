package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// finish writes the sums and reports whether the run is good. Up to tolerated unsteady tests count as
// passed; if there are more, each of them has failed.
func (r *report) finish(noSkips bool, tolerated int, past *history) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slowest()
	good := true
	if noSkips && len(r.skips) > 0 {
		good = false
		r.print("\nskipped, although every tier was asked for:\n  %s\n", strings.Join(r.skips, "\n  "))
	}
	var failed, unstable []failure
	for _, f := range r.failures {
		if f.unsteady {
			unstable = append(unstable, f)
		} else {
			failed = append(failed, f)
		}
	}
	passed := r.passed
	if n := len(unstable); n > 0 {
		verdict := "they count as failed"
		if n <= tolerated {
			verdict, passed = "they count as passed", passed+n
		}
		r.print("\nunsteady: failed once and passed %d times alone; %s:\n", repeats, verdict)
		for _, f := range unstable {
			r.print("  %s%s\n%s", strings.TrimSpace(f.pkg+" "+f.what), past.remark(f), indent(last(f.output)))
		}
		if n > tolerated {
			failed = append(failed, unstable...)
		}
	}
	if len(failed) > 0 {
		good = false
		r.print("\nfailed:\n")
		for _, f := range failed {
			r.print("  %s\n", f)
		}
	}
	r.print("\n%d passed, %d failed, %d skipped in %s\n",
		passed, len(failed), r.skipped, r.now().Sub(r.start).Round(time.Second))
	return good
}

// remark tells how often a test was unsteady, and marks one that was so before.
func (h *history) remark(f failure) string {
	if h == nil {
		return ""
	}
	n, of := h.rate(f.pkg, f.what)
	remark := fmt.Sprintf(": unsteady in %d of its last %d runs", n, of)
	if n > 1 {
		remark += " -- MEND IT FIRST"
	}
	return remark
}

// last are the last lines of a test's output, which may be long and is whole further up.
func last(output []string) []string {
	const most = 40
	if len(output) <= most {
		return output
	}
	return append([]string{"...\n"}, output[len(output)-most:]...)
}

// slowest writes tables of the packages and of the tests that took longest.
func (r *report) slowest() {
	r.table("slowest packages", r.ended, 10)
	r.table("slowest tests", r.passes, 30)
}

// table writes the entries of all that took longest, at most so many as most says.
func (r *report) table(title string, all []taken, most int) {
	if len(all) == 0 {
		return
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b taken) int { return cmp.Compare(b.seconds, a.seconds) })
	r.print("\n%s:\n", title)
	for _, t := range all[:min(len(all), most)] {
		r.print("%8.1fs  %s\n", t.seconds, t.name)
	}
}

// remember adds the run to the history.
func (r *report) remember(o options) *history {
	r.mu.Lock()
	defer r.mu.Unlock()
	past, err := updateHistory(o.history, func(h *history) {
		for _, name := range r.ran {
			pkg, test, _ := strings.Cut(name, " ")
			h.add(pkg, test, steady)
		}
		for _, f := range r.failures {
			outcome := failing
			if f.unsteady {
				outcome = unsteady
			}
			h.add(f.pkg, f.what, outcome)
		}
		if o.run != "" {
			return // who knows which tests of a package ran
		}
		for _, pkg := range r.whole {
			h.Packages[pkg]++
		}
	})
	if err != nil {
		r.print("history: %v\n", err)
	}
	return past
}

// say writes something that isn't about an event.
func (r *report) say(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.print(format, args...)
}

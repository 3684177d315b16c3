package main

import (
	"cmp"
	"context"
	"regexp"
	"slices"
	"strings"
	"time"
)

const (
	// repeats is how often a failed test runs again.
	repeats = 2
	// repeatFor ends repetitions early enough for the limit of 90 minutes that continuous integration has.
	repeatFor = 20 * time.Minute
	// mostRepeated is of top-level tests. If more than these failed, that is a fault, or a machine on
	// which no test means anything.
	mostRepeated = 10
	// toleratedByCI is how many unsteady tests don't fail a run of continuous integration.
	toleratedByCI = 3
)

// repeat runs failed tests again, each alone, and marks those that pass each time as unsteady. A test
// for which there is no time left has failed. mode says how a package's tests are run.
func repeat(ctx context.Context, o options, r *report, mode func(pkg string) how) error {
	candidates, why := r.candidates()
	if why != "" {
		r.say("\nno failed test is repeated: %s\n", why)
	}
	end := r.now().Add(o.again)
	for _, f := range candidates {
		steady := true
		for n := 1; steady && n <= repeats; n++ {
			left := end.Sub(r.now())
			if left < time.Duration(f.seconds*float64(time.Second)) || left <= 0 {
				r.say("\nnot repeated, for there is no time left: %s %s\n", f.pkg, f.what)
				steady = false
				break
			}
			r.say("\nrepetition %d of %d: %s %s\n", n, repeats, f.pkg, f.what)
			var err error
			if steady, err = passes(ctx, o, r, mode(f.pkg), f, left); err != nil {
				return err
			}
		}
		f.unsteady = steady
	}
	return nil
}

// candidates are the failed tests that are worth to be repeated, those that take least first. The
// reason is given if there are none although tests failed that could be.
func (r *report) candidates() (all []*failure, none string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	tops := map[string]bool{}
	for i := range r.failures {
		f := &r.failures[i]
		if f.what != "" {
			top, _, _ := strings.Cut(f.what, "/")
			tops[f.pkg+" "+top] = true
		}
		if f.again {
			all = append(all, f)
		}
	}
	if len(all) > 0 && len(tops) > mostRepeated {
		return nil, "too many failed"
	}
	slices.SortStableFunc(all, func(a, b *failure) int { return cmp.Compare(a.seconds, b.seconds) })
	return all, ""
}

// passes runs a failed test alone and says whether it and its package passed.
func passes(ctx context.Context, o options, r *report, h how, f *failure, within time.Duration) (bool, error) {
	o.run, o.timeout = pattern(f.what), min(o.timeout, within)
	// The package's timeout doesn't count what it takes to build it.
	limited, cancel := context.WithTimeout(ctx, within+time.Minute)
	defer cancel()
	once := newReport(r.out, r.now)
	err := test(limited, o, once, h, []string{f.pkg}, "-p=1", "-count=1")
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	if err != nil {
		once.say("%v\n", err)
	}
	return err == nil && !once.failed() && slices.Contains(once.ran, f.pkg+" "+f.what), nil
}

// pattern selects one test.
func pattern(name string) string {
	var elements []string
	for e := range strings.SplitSeq(name, "/") {
		elements = append(elements, "^"+regexp.QuoteMeta(e)+"$")
	}
	return strings.Join(elements, "/")
}

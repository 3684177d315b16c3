// Package testkit is what tests of several packages share: the tiers of tests, their
// long forms, the scaling of their timeouts, and how they check for errors. Product code must not import it.
package testkit

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Tier is what a test needs from the machine that it runs on.
type Tier string

// The tiers. Unit tests need nothing and don't name a tier.
const (
	// Netns tests are root and make network namespaces.
	Netns Tier = "netns"
	// APIServer tests start etcd and kube-apiserver.
	APIServer Tier = "apiserver"
	// Cluster tests start whole clusters with nodes.
	Cluster Tier = "cluster"
	// VM tests start a virtual machine with another kernel.
	VM Tier = "vm"
)

// Need skips the test unless its tier was asked for by the environment variable
// COIL_TEST_TIERS, a list separated by commas. "make test" asks for all of them.
// A test whose tier was asked for fails when the machine lacks something: it
// never skips.
func Need(tb testing.TB, tier Tier) {
	tb.Helper()
	if !slices.Contains(strings.Split(os.Getenv("COIL_TEST_TIERS"), ","), string(tier)) {
		tb.Skipf("tier %s was not asked for; run with COIL_TEST_TIERS=%s", tier, tier)
	}
	if os.Geteuid() != 0 && tier != APIServer {
		tb.Fatalf("tests of tier %s must run as root", tier)
	}
}

// Forms of tests. In the short one, that of "make test", each kind of case comes once; in the long
// one, which an environment variable asks for, it comes as often as it takes to trust it.
const (
	CrashForm  Form = "COIL_CRASH"
	HealForm   Form = "COIL_HEAL"
	EgressForm Form = "COIL_EGRESS"
)

// Form is the environment variable that is "long" for the long form of some tests.
type Form string

// Long says whether the long form was asked for.
func (f Form) Long() bool { return os.Getenv(string(f)) == "long" }

// Times returns how often to do something, or how many of it to take.
func (f Form) Times(short, long int) int {
	if f.Long() {
		return long
	}
	return short
}

// Timeout scales a wait by the environment variable COIL_TEST_TIMEOUT_SCALE (default 1), for machines
// that are slow or busy: hack/gotest measures how much, and emulated processors are ten times as slow.
// It is for how long to wait until a test fails. The bound of a figure that a test measures is a Limit.
func Timeout(d time.Duration) time.Duration { return scaled(d, "COIL_TEST_TIMEOUT_SCALE") }

// Limit is the bound of a figure that a test measures. That the machine is slow or busy doesn't change
// it. Only where processors are emulated, COIL_TEST_LIMIT_SCALE (default 1) scales it, always by the same.
func Limit(d time.Duration) time.Duration { return scaled(d, "COIL_TEST_LIMIT_SCALE") }

// scaled multiplies d with what an environment variable says.
func scaled(d time.Duration, env string) time.Duration {
	if f, err := strconv.ParseFloat(os.Getenv(env), 64); err == nil && f > 0 {
		return time.Duration(float64(d) * f)
	}
	return d
}

// Must returns what a call returned, for a test that fails if it returned an error, too:
// Must(f())(t).
func Must[T any](v T, err error) func(testing.TB) T {
	return func(tb testing.TB) T {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
		return v
	}
}

// Check fails the test if one of the errors isn't nil.
func Check(tb testing.TB, errs ...error) {
	tb.Helper()
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
}

// Eventually polls cond until it returns nil, and fails the test with its last
// error when timeout, scaled, has passed. It asks the less often the longer it takes, and
// at most a twentieth later than it could: answers cost those it waits for.
func Eventually(tb testing.TB, timeout time.Duration, what string, cond func() error) {
	tb.Helper()
	start := time.Now()
	deadline := start.Add(Timeout(timeout))
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("%s: not within %s: %v", what, Timeout(timeout), err)
		}
		time.Sleep(min(max(time.Since(start)/20, 50*time.Millisecond), time.Second))
	}
}

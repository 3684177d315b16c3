// Package testkit is what tests of several packages share: the tiers of tests, their
// long forms, the scaling of their timeouts, and how they check for errors. Product code must not import it.
package testkit

import (
	"context"
	"errors"
	"fmt"
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
	// APIServer tests start etcd and kube-apiserver, or Keystone and Neutron.
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
	CrashForm    Form = "COIL_CRASH"
	RepairForm   Form = "COIL_REPAIR"
	EgressForm   Form = "COIL_EGRESS"
	MigrateForm  Form = "COIL_MIGRATE"
	ReleaseForm  Form = "COIL_RELEASE"
	FloatingForm Form = "COIL_FLOATING"
	LBForm       Form = "COIL_LB"
	OperateForm  Form = "COIL_OPERATE"
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
// error when timeout, scaled, has passed.
func Eventually(tb testing.TB, timeout time.Duration, what string, cond func() error) {
	tb.Helper()
	// Not the test's context: conditions are awaited in clean-ups, too.
	if err := Within(context.Background(), timeout, cond); err != nil {
		tb.Fatalf("%s: %v", what, err)
	}
}

// Within polls cond until it returns nil, for at most timeout, scaled, or until ctx ends. The error has the last one
// of cond.
func Within(ctx context.Context, timeout time.Duration, cond func() error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, Timeout(timeout), fmt.Errorf("not within %s", Timeout(timeout)))
	defer cancel()
	return Poll(ctx, 5*time.Millisecond, cond)
}

// Poll calls cond until it returns nil or ctx ends; the error has the last one of cond then. The pause is least at
// first, and later a twentieth of the time so far, at most 2 s: each call takes time from those it waits for. So it is
// also as long as the call took, up to a tenth of a second: some start dozens of programs, which would take a whole processor.
func Poll(ctx context.Context, least time.Duration, cond func() error) error {
	for start := time.Now(); ; {
		called := time.Now()
		err := cond()
		if err == nil {
			return nil
		}
		took := time.Since(called)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(min(max(time.Since(start)/20, least, min(took, 100*time.Millisecond)), 2*time.Second)):
		}
	}
}

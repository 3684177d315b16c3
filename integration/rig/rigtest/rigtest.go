// Package rigtest gives a test a rig of its own, or all tests of a package the same one.
//
// It owns what such tests need and what they must leave behind: nothing. It must not
// know what is tested.
package rigtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// New starts a rig, which ends with the test. Skipped unless the tiers that a rig needs
// were asked for.
func New(t *testing.T) *rig.Rig {
	t.Helper()
	return NewWith(t, rig.Options{})
}

// NewWith is New with options.
func NewWith(t *testing.T, o rig.Options) *rig.Rig {
	t.Helper()
	testkit.Need(t, testkit.Netns)
	testkit.Need(t, testkit.APIServer)
	o.Log = os.Stderr
	r, err := rig.New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(r.Dir()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the rig left %s: %v", r.Dir(), err)
		}
	})
	return r
}

// Pings begins to ping as soon as pings are answered: until the kernel has noticed carriers and neighbours, packets may
// be lost.
func Pings(t testing.TB, begin func() (*netlab.Pinger, error)) *netlab.Pinger {
	t.Helper()
	testkit.Eventually(t, 10*time.Second, "pings are answered", func() error {
		p, err := begin()
		if err != nil {
			return err
		}
		sent, answered, err := p.End()
		if err == nil && answered < sent {
			err = fmt.Errorf("%s: no answer", p)
		}
		return err
	})
	return testkit.Must(begin())(t)
}

// Sh runs a script in a node's network namespace and returns its output; the test ends if one of its commands fails.
func Sh(t testing.TB, n *rig.Node, script string) string {
	t.Helper()
	return testkit.Must(n.Run(t.Context(), "sh", "-ec", script))(t)
}

// Shared is the rig of all tests of a package.
type Shared struct {
	// Options of the rig.
	Options rig.Options
	// Check says whether the machine has what the tests need beside it; nil for nothing.
	Check func() error
	// End takes away what the tests have made beside the rig; nil for nothing.
	End func() error
	// Parallel is how many tests run at once; 0 for the default.
	Parallel int

	once    sync.Once
	running *rig.Rig
	err     error
}

// Main is what TestMain calls: it runs the tests, ends the rig, and the process.
func (s *Shared) Main(m *testing.M) {
	if s.Parallel > 0 {
		_ = flag.Set("test.parallel", strconv.Itoa(s.Parallel))
	}
	code := m.Run()
	if s.running != nil {
		if err := s.running.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if s.End != nil {
		if err := s.End(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// Rig returns the rig, which the first test that asks for it starts. Skipped unless the
// tiers that a rig needs were asked for.
func (s *Shared) Rig(tb testing.TB) *rig.Rig {
	tb.Helper()
	testkit.Need(tb, testkit.Netns)
	testkit.Need(tb, testkit.APIServer)
	s.once.Do(func() {
		if s.Check != nil {
			if s.err = s.Check(); s.err != nil {
				return
			}
		}
		s.Options.Log = os.Stderr
		// It outlives the test that asks for it first.
		s.running, s.err = rig.New(context.Background(), s.Options)
	})
	if s.err != nil {
		tb.Fatal(s.err)
	}
	return s.running
}

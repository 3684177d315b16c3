package restore

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// steps notes what InLine has others do, with whether that counts as repair, and fails as it is told.
type steps struct {
	did  []string
	fail string
}

var errStep = errors.New("no memory")

func (s *steps) do(format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	s.did = append(s.did, what)
	if s.fail != "" && strings.HasPrefix(what, s.fail) {
		return errStep
	}
	return nil
}

// Mend implements Pods.
func (s *steps) Mend(ctx context.Context, repair bool, pods func(context.Context) ([]podnet.Wired, error)) error {
	wired, err := pods(ctx)
	return errors.Join(err, s.do("mend %d, repair %t", len(wired), repair))
}

// Routes implements Pods.
func (s *steps) Routes(_ context.Context, repair bool) error {
	return s.do("routes, repair %t", repair)
}

// newSteps makes the steps those of a node.
func newSteps(n *node) *steps {
	s := &steps{}
	n.Pods, n.BootID = s, "boot"
	n.WiredOf = func(all []store.Allocation) []podnet.Wired { return make([]podnet.Wired, len(all)) }
	n.Remember = func(usage []store.Usage) { _ = s.do("remember %d", len(usage)) }
	n.Claim = func(_ context.Context, usage []store.Usage, fresh bool) ([]store.Block, error) {
		return []store.Block{n.block}, s.do("claim, %d recorded, fresh %t", len(usage), fresh)
	}
	n.Export = func(context.Context) error { return s.do("export") }
	n.Adopted = func() { _ = s.do("adopted") }
	n.Guard = func(_ context.Context, repair bool) error { return s.do("guard, repair %t", repair) }
	n.Warn = func(reason, _ string, _ ...any) { _ = s.do("warn %s", reason) }
	return s
}

// inLine calls InLine, and returns what was done.
func (s *steps) inLine(t *testing.T, n *node, want error) string {
	t.Helper()
	s.did = nil
	if err := n.InLine(t.Context(), nil); !errors.Is(err, want) {
		t.Errorf("InLine: %v, want %v", err, want)
	}
	return strings.Join(s.did, "; ")
}

func TestInLine(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(*node)
		want    string
	}{
		{"a node that never had a pod", func(*node) {},
			"mend 0, repair false; claim, 0 recorded, fresh false; routes, repair false; export; guard, repair false"},
		{"a process before this one has served", func(n *node) { n.link("a", n.record("a", store.Attached).Addrs()...) },
			"remember 1; mend 1, repair true; claim, 1 recorded, fresh false; routes, repair true; export; guard, repair true"},
		{"before this boot", func(n *node) {
			n.link("a", n.record("a", store.Attached).Addrs()...)
			n.BootID = "another"
		}, "mend 1, repair false; claim, 1 recorded, fresh false; routes, repair false; export; guard, repair false"},
		{"an ADD that died", func(n *node) { n.record("a", store.Pending) },
			"mend 1, repair false; claim, 1 recorded, fresh false; routes, repair false; export; guard, repair false"},
		{"the record was lost", func(n *node) {
			n.Fresh = true
			n.link("a", n.block.IPv4.Addr().Next())
		}, "mend 0, repair false; claim, 0 recorded, fresh true; adopted; routes, repair false; export; guard, repair false"},
		{"a link that can't be adopted", func(n *node) { n.link("a") },
			"mend 0, repair false; claim, 0 recorded, fresh false; warn LinkNotAdopted; routes, repair false; export; guard, repair false"},
		{"a route to nobody", func(n *node) { n.links.strays = []string{"10.1.0.3 by eth7"} },
			"mend 0, repair false; claim, 0 recorded, fresh false; warn LinkNotAdopted; routes, repair false; export; guard, repair false"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			s := newSteps(n)
			c.prepare(n)
			if d := cmp.Diff(c.want, s.inLine(t, n, nil)); d != "" {
				t.Errorf("steps (-want +got):\n%s", d)
			}
			if n.Fresh {
				t.Error("the record counts as made anew")
			}
		})
	}
}

// Nothing goes on after a failed step that what comes after it needs. A node without the ruleset serves.
func TestInLineFails(t *testing.T) {
	all := []string{"mend 1, repair false", "claim, 1 recorded, fresh true", "adopted", "routes, repair false", "export", "guard, repair false"}
	for _, c := range []struct {
		fail  string
		did   int // of all
		want  error
		fresh bool
	}{
		{"mend", 1, errStep, true},
		{"claim", 2, errStep, true},
		{"routes", 5, errStep, false},
		{"export", 5, errStep, false},
		{"guard", 6, nil, false},
	} {
		t.Run(c.fail, func(t *testing.T) {
			n := newNode(t)
			n.record("gone", store.Pending)
			n.link("found", n.block.IPv4.Addr().Next().Next().Next())
			n.Fresh = true
			s := newSteps(n)
			s.fail = c.fail
			if d := cmp.Diff(strings.Join(all[:c.did], "; "), s.inLine(t, n, c.want)); d != "" {
				t.Errorf("steps (-want +got):\n%s", d)
			}
			if n.Fresh != c.fresh {
				t.Errorf("the record counts as made anew: %t", n.Fresh)
			}
		})
	}
}

// The allocations that the record had when the process began aren't read again.
func TestInLineTakesWhatWasRead(t *testing.T) {
	n := newNode(t)
	s := newSteps(n)
	recorded := []store.Allocation{{ID: id("a"), BootID: "boot", State: store.Attached}, {ID: id("b")}}
	if err := n.InLine(t.Context(), recorded); err != nil {
		t.Fatal(err)
	}
	if len(s.did) < 2 || s.did[1] != "mend 2, repair true" {
		t.Errorf("steps %q, want those of two pods that were served", s.did)
	}
}

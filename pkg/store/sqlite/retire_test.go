package sqlite_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

func mustRetire(t *testing.T, path string) *sqlite.Retired {
	t.Helper()
	r, err := sqlite.Retire(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func TestRetire(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	fill(t, s, mustBlock(t, "default-0", "10.1.0.0/29", "fd00:1::/125"), 3)
	want, err := s.List(t.Context())
	if err != nil || len(want) != 3 {
		t.Fatalf("%v, %v", want, err)
	}
	if _, err := sqlite.Retire(o.Path); !errors.Is(err, sqlite.ErrLocked) {
		t.Errorf("while it is open: %v", err)
	}
	mustClose(t, s)

	r := mustRetire(t, o.Path)
	got, err := r.List(t.Context())
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b store.Allocation) bool { return a.ID == b.ID && a.Pod == b.Pod && a.State == b.State })); diff != "" || err != nil {
		t.Errorf("List: %v (-want +got):\n%s", err, diff)
	}
	if _, _, err := sqlite.Open(t.Context(), o); !errors.Is(err, sqlite.ErrLocked) {
		t.Errorf("Open meanwhile: %v", err)
	}

	// Others' files stay, those that were set aside go.
	dir := filepath.Dir(o.Path)
	for _, f := range []string{"coild.db.20260101T000000Z-Damaged", "coild.db.20260101T000000Z-Damaged-wal", "coild.dbx", "sysctl.json"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	removed, err := r.Remove()
	if err != nil || len(removed) < 5 {
		t.Errorf("removed %q, %v", removed, err)
	}
	if diff := cmp.Diff([]string{"coild.dbx", "sysctl.json"}, testkit.FilesIn(t, dir)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	if again, err := r.Remove(); err != nil || len(again) > 0 {
		t.Errorf("again: %q, %v", again, err)
	}
}

// A record that was never there is nothing, and is not made; one that can't be read is an error.
func TestRetireNothing(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{filepath.Join(dir, "coild.db"), filepath.Join(dir, "none", "coild.db")} {
		r := mustRetire(t, path)
		all, err := r.List(t.Context())
		removed, removeErr := r.Remove()
		if err := errors.Join(err, removeErr); err != nil || len(all)+len(removed) > 0 {
			t.Errorf("%v, %v, %v", all, removed, err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("made %v, %v", entries, err)
	}
	path := filepath.Join(dir, "coild.db")
	if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if all, err := mustRetire(t, path).List(t.Context()); err == nil {
		t.Errorf("a file of zeros has %v", all)
	}
}

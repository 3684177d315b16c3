package sqlite

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
)

func touch(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, n := range names {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// The newest three of each kind stay, and all that isn't of the kind.
func TestPrune(t *testing.T) {
	others := []string{
		"coild.db", "coild.db-wal", "coild.db-shm", "coild.db-lock", "coild.db-ballast", "coild.db.mine", "coild.db.20200101T000000Z",
		"other.db.20200101T000000Z-Damaged", "coild.db2.20200101T000000Z-Damaged",
	}
	copies := []string{"coild.db.20200101T000000Z-v1", "coild.db.20200102T000000Z-v1", "coild.db.20200103T000000Z-v2", "coild.db.20200104T000000Z-v2"}
	aside := []string{
		"coild.db.20200101T000000Z-Damaged", "coild.db.20200101T000000Z-Damaged-wal", "coild.db.20200101T000000Z-Damaged-shm",
		"coild.db.20200105T000000Z-Damaged", "coild.db.20200105T000000Z-Damaged-2", "coild.db.20200105T000000Z-Damaged-10",
		"coild.db.20200105T000000Z-Damaged-10-wal", "coild.db.20200105T000000Z-OtherNode-11",
	}
	for _, c := range []struct {
		name, made string
		gone       []string
	}{
		{"set aside", "coild.db.20200106T000000Z-Damaged", slices.Concat(aside[:5])},
		{"set aside by a clock that was reset", "coild.db.19700101T000000Z-Damaged", aside[:5]},
		{"copies", "coild.db.20200105T000000Z-v3", copies[:2]},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			all := slices.Concat(others, copies, aside, []string{c.made})
			touch(t, dir, all...)
			prune(filepath.Join(dir, "coild.db"), filepath.Join(dir, c.made))
			want := slices.DeleteFunc(slices.Clone(all), func(n string) bool { return slices.Contains(c.gone, n) })
			slices.Sort(want)
			if got := testkit.FilesIn(t, dir); !slices.Equal(got, want) {
				t.Errorf("left: %q\nwant: %q", got, want)
			}
		})
	}
}

// Records of each re-creation of the Node don't pile up.
func TestRecordsSetAsideArePruned(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "db")
	for i := range 2 * keptFiles {
		if err := os.WriteFile(path, fmt.Appendf(nil, "damaged %d", i), 0o600); err != nil {
			t.Fatal(err)
		}
		s, res := testStore(t, mustMigrations(t), path)
		if err := s.Close(); err != nil || res.SetAside == "" {
			t.Fatalf("%+v, %v", res, err)
		}
		if text, err := os.ReadFile(res.SetAside); err != nil || string(text) != fmt.Sprintf("damaged %d", i) {
			t.Errorf("set aside: %q, %v", text, err)
		}
	}
	aside, err := filepath.Glob(path + ".*-Damaged*")
	if err != nil || len(aside) != keptFiles {
		t.Errorf("%d are left: %q, %v", len(aside), aside, err)
	}
}

// A copy that fails half-way, as on a full disk, leaves nothing; one that succeeds replaces old ones.
func TestCopyBeforeMigration(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "db")
	released := mustMigrations(t)
	s, _ := testStore(t, released, path)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	db, err := connect(path, false, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.ExecContext(t.Context(), `CREATE TABLE filler AS SELECT randomblob(1 << 20) AS x`); err != nil {
		t.Fatal(err)
	}
	newer := append(slices.Clone(released), `CREATE TABLE another (x)`)
	before := testkit.FilesIn(t, dir)

	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	low := limit
	low.Cur = 512 << 10
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &low); err != nil {
		t.Fatal(err)
	}
	err = migrate(t.Context(), db, path, newer, time.Now())
	if rerr := unix.Setrlimit(unix.RLIMIT_FSIZE, &limit); rerr != nil {
		t.Fatal(rerr)
	}
	if err == nil {
		t.Error("the copy has room")
	}
	if got := testkit.FilesIn(t, dir); !slices.Equal(got, before) {
		t.Errorf("after a copy that failed: %q, want %q", got, before)
	}

	touch(t, dir, "db.20200101T000000Z-v1", "db.20200102T000000Z-v1", "db.20200103T000000Z-v1", "db.20200101T000000Z-Damaged")
	if err := migrate(t.Context(), db, path, newer, time.Now()); err != nil {
		t.Fatal(err)
	}
	copies, err := filepath.Glob(path + ".*-v*")
	if err != nil || len(copies) != keptFiles || slices.Contains(copies, path+".20200101T000000Z-v1") {
		t.Errorf("copies: %q, %v", copies, err)
	}
}

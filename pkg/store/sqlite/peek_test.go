package sqlite_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestPeek(t *testing.T) {
	record := func(t *testing.T, pragma string) string {
		o := options(t)
		s, _ := mustOpen(t, o)
		mustClose(t, s)
		if pragma != "" {
			db := rawDB(t, o.Path)
			mustExec(t, db, pragma)
			testkit.Check(t, db.Close())
		}
		return o.Path
	}
	file := func(t *testing.T, content string) string {
		path := filepath.Join(t.TempDir(), "f")
		testkit.Check(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	_, known, _ := sqlite.Peek("")
	for _, tt := range []struct {
		name    string
		path    string
		version int
		err     error
	}{
		{"this version's", record(t, ""), known, nil},
		{"a newer one's", record(t, "PRAGMA user_version = 77"), 77, nil},
		{"an older one's", record(t, "PRAGMA user_version = 1"), 1, nil},
		{"another program's", record(t, "PRAGMA application_id = 1"), 0, sqlite.ErrDamaged},
		{"without a schema", record(t, "PRAGMA user_version = 0; PRAGMA application_id = 0"), 0, nil},
		{"empty", file(t, ""), 0, nil},
		{"too short", file(t, "SQLite format 3\x00"), 0, sqlite.ErrDamaged},
		{"no database", file(t, string(make([]byte, 4096))), 0, sqlite.ErrDamaged},
		{"none", filepath.Join(t.TempDir(), "f"), 0, fs.ErrNotExist},
	} {
		version, k, err := sqlite.Peek(tt.path)
		if version != tt.version || k != known || !errors.Is(err, tt.err) {
			t.Errorf("%s: version %d of %d, error %v; want %d of %d, %v", tt.name, version, k, err, tt.version, known, tt.err)
		}
	}
	if known < 2 {
		t.Errorf("this program knows %d versions", known)
	}
}

// Peek leaves a record alone that coild has open.
func TestPeekAtAnOpenRecord(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	defer mustClose(t, s)
	testkit.Check(t, s.Checkpoint(t.Context()))
	if version, known, err := sqlite.Peek(o.Path); version != known || err != nil {
		t.Errorf("version %d of %d, error %v", version, known, err)
	}
	testkit.Check(t, s.Writable(t.Context()))
}

package sqlite_test

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/store/storetest"
	"github.com/coil-net/coil/pkg/testkit"
)

// options are those of a Store in a new folder.
func options(tb testing.TB) sqlite.Options {
	tb.Helper()
	return sqlite.Options{
		Path: filepath.Join(tb.TempDir(), "coil", "coild.db"), Identity: testNode,
		BootID: "boot-1", CoolDown: time.Minute, Clock: storetest.NewClock(),
	}
}

// mustOpen opens a Store, which is closed with the test if it isn't before.
func mustOpen(tb testing.TB, o sqlite.Options) (*sqlite.Store, sqlite.OpenResult) {
	tb.Helper()
	s, res, err := sqlite.Open(tb.Context(), o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = s.Close() }) // of a test that failed in between
	return s, res
}

func mustClose(tb testing.TB, s *sqlite.Store) {
	tb.Helper()
	if err := s.Close(); err != nil {
		tb.Fatal(err)
	}
}

func mustBlock(tb testing.TB, name, ipv4, ipv6 string) store.Block {
	tb.Helper()
	b, err := ipam.ParseBlock(&ipv4, &ipv6)
	if err != nil {
		tb.Fatal(err)
	}
	pool, _, _ := strings.Cut(name, "-")
	return store.Block{Name: name, Pool: pool, Block: b}
}

func id(name string) attachment.ID { return attachment.ID{ContainerID: name, IfName: "eth0"} }

func request(name string, b store.Block) store.Request {
	return store.Request{
		ID: id(name), Pod: store.Pod{Namespace: "ns", Name: name, UID: "uid-" + name},
		Netns: store.Netns{Path: "/run/netns/" + name, Inode: 1}, Pool: b.Pool, Blocks: []string{b.Name},
	}
}

// fill records the block and n attached allocations in it, and marks the record
// as rebuilt.
func fill(tb testing.TB, s *sqlite.Store, b store.Block, n int) {
	tb.Helper()
	if err := s.SetBlocks(tb.Context(), []store.Block{b}); err != nil {
		tb.Fatal(err)
	}
	for i := range n {
		name := fmt.Sprintf("c%d", i)
		if _, err := s.Reserve(tb.Context(), request(name, b)); err != nil {
			tb.Fatal(err)
		}
		if err := s.Attach(tb.Context(), id(name), store.Wiring{HostIfName: "veth" + name, HostIfIndex: i, Result: []byte("{}")}); err != nil {
			tb.Fatal(err)
		}
	}
	if err := s.Rebuilt(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

func mustList(tb testing.TB, s *sqlite.Store) []store.Allocation {
	tb.Helper()
	as, err := s.List(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return as
}

// files are the names in the folder of a record.
func files(tb testing.TB, o sqlite.Options) []string {
	tb.Helper()
	return testkit.FilesIn(tb, filepath.Dir(o.Path))
}

// rawDB opens the file as another program would, for reading or to break it.
func rawDB(tb testing.TB, path string) *sql.DB {
	tb.Helper()
	db, err := sql.Open("sqlite", "file:"+path)
	if err != nil {
		tb.Fatal(err)
	}
	db.SetMaxOpenConns(1) // pragmas are per connection
	tb.Cleanup(func() { _ = db.Close() })
	return db
}

func mustExec(tb testing.TB, db *sql.DB, query string, args ...any) {
	tb.Helper()
	if _, err := db.ExecContext(tb.Context(), query, args...); err != nil {
		tb.Fatalf("%s: %v", query, err)
	}
}

var fresh = sqlite.OpenResult{Fresh: true, Reason: sqlite.Missing}

func TestFirstOpen(t *testing.T) {
	o := options(t)
	s, res := mustOpen(t, o)
	if res != fresh {
		t.Errorf("first Open: %+v", res)
	}
	for name, want := range map[string]os.FileMode{"": 0o700 | os.ModeDir, "coild.db": 0o600, "coild.db-wal": 0o600, "coild.db-shm": 0o600, "coild.db-lock": 0o600, "coild.db-ballast": 0o600} {
		st, err := os.Stat(filepath.Join(filepath.Dir(o.Path), name))
		if err != nil || st.Mode() != want {
			t.Errorf("%q: mode %v, %v; want %v", name, st.Mode(), err, want)
		}
	}
	mustClose(t, s)

	// The process ended before all was rebuilt: the next one must do that.
	s, res = mustOpen(t, o)
	if want := (sqlite.OpenResult{Fresh: true, Reason: sqlite.Unfinished}); res != want {
		t.Errorf("Open before Rebuilt: %+v, want %+v", res, want)
	}
	if err := s.Rebuilt(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	s, res = mustOpen(t, o)
	if res != (sqlite.OpenResult{}) {
		t.Errorf("Open after Rebuilt: %+v", res)
	}
	mustClose(t, s)
	if got, want := files(t, o), []string{"coild.db", "coild.db-ballast", "coild.db-lock"}; !slices.Equal(got, want) {
		t.Errorf("files after Close: %v, want %v", got, want)
	}
}

func TestOptions(t *testing.T) {
	for name, change := range map[string]func(*sqlite.Options){
		"path":      func(o *sqlite.Options) { o.Path = "" },
		"boot ID":   func(o *sqlite.Options) { o.BootID = "" },
		"cool-down": func(o *sqlite.Options) { o.CoolDown = -1 },
		"ballast":   func(o *sqlite.Options) { o.BallastBytes = -1 },
	} {
		o := options(t)
		change(&o)
		if s, _, err := sqlite.Open(t.Context(), o); err == nil {
			mustClose(t, s)
			t.Errorf("bad %s is taken", name)
		}
	}
}

// The name of the file is no URL and no pattern.
func TestOddPath(t *testing.T) {
	o := options(t)
	o.Path = filepath.Join(t.TempDir(), "a b?mode=memory&x=%41#c", "coild.db")
	s, _ := mustOpen(t, o)
	fill(t, s, mustBlock(t, "default-0", "10.0.0.0/30", ""), 2)
	mustClose(t, s)
	if st, err := os.Stat(o.Path); err != nil || st.Size() == 0 {
		t.Fatalf("%v, %v", st, err)
	}
	s, res := mustOpen(t, o)
	if res.Fresh || len(mustList(t, s)) != 2 {
		t.Errorf("%+v", res)
	}
}

func TestSystemClock(t *testing.T) {
	o := options(t)
	o.Clock = nil
	o.CoolDown = 50 * time.Millisecond
	s, _ := mustOpen(t, o)
	one := mustBlock(t, "default-0", "10.0.0.0/32", "")
	fill(t, s, one, 1)
	begin := time.Now()
	if _, err := s.Release(t.Context(), id("c0")); err != nil {
		t.Fatal(err)
	}
	if err := s.Cool(t.Context(), id("c0")); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 10*time.Second, "the address cools down", func() error {
		a, err := s.Reserve(t.Context(), request("next", one))
		if err == nil && (a.Since.Before(begin.Add(-time.Second)) || time.Since(a.Since) > time.Minute) {
			t.Errorf("reserved at %s", a.Since)
		}
		return err
	})
	if d := time.Since(begin); d < o.CoolDown {
		t.Errorf("cooled down in %s", d)
	}
}

func TestOneProcess(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	if _, _, err := sqlite.Open(t.Context(), o); !errors.Is(err, sqlite.ErrLocked) {
		t.Errorf("second Open: %v", err)
	}
	fill(t, s, mustBlock(t, "default-0", "10.0.0.0/30", ""), 1)
	mustClose(t, s)
	mustClose(t, s) // twice is fine
	if _, err := s.Release(t.Context(), id("c0")); !errors.Is(err, sqlite.ErrClosed) {
		t.Errorf("Release after Close: %v", err)
	}
	if _, err := s.Get(t.Context(), id("c0")); err == nil {
		t.Error("Get after Close is no error")
	}
	if _, res := mustOpen(t, o); res.Fresh {
		t.Errorf("Open after Close: %+v", res)
	}
}

// Something else may stand where the file should be: each case says what becomes of it.
func TestSetAside(t *testing.T) {
	write := func(data string) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	run := func(queries ...string) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			db := rawDB(t, path)
			for _, q := range queries {
				mustExec(t, db, q)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	record := func(queries ...string) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			o := options(t)
			o.Path = path
			s, _ := mustOpen(t, o)
			fill(t, s, mustBlock(t, "default-0", "10.0.0.0/30", ""), 2)
			mustClose(t, s)
			run(queries...)(t, path)
		}
	}
	for _, tc := range []struct {
		name   string
		make   func(*testing.T, string)
		reason sqlite.Reason
		aside  bool
	}{
		{"empty file", write(""), sqlite.Missing, false},
		{"text", write("this is no database, and longer than a header of a hundred bytes: " + strings.Repeat("x", 5000)), sqlite.Damaged, true},
		{"one byte", write("S"), sqlite.Damaged, true},
		{"zeroes", write(strings.Repeat("\x00", 8192)), sqlite.Damaged, true},
		{"folder", func(t *testing.T, path string) {
			if err := os.Mkdir(path, 0o755); err != nil {
				t.Fatal(err)
			}
		}, sqlite.OtherProgram, true},
		{"log without file", func(t *testing.T, path string) {
			write("a log")(t, path+"-wal")
			write("an index")(t, path+"-shm")
		}, sqlite.Missing, true},
		{"empty database", run(`VACUUM`), sqlite.Missing, false},
		{"other program's", run(`CREATE TABLE t (x)`), sqlite.OtherProgram, true},
		{"other program's with an ID", run(`PRAGMA application_id = 7`, `CREATE TABLE t (x)`), sqlite.OtherProgram, true},
		{"newer schema", record(`PRAGMA user_version = 99`), sqlite.NewerSchema, true},
		{"no schema", record(`PRAGMA user_version = 0`), sqlite.Damaged, true},
		{"missing table", record(`DROP VIEW pods`, `DROP TABLE addresses`), sqlite.Damaged, true},
		{"missing index", record(`DROP INDEX attachments`), sqlite.Damaged, true},
		{"index of other values", record(`PRAGMA writable_schema = 1`, `UPDATE sqlite_schema SET rootpage =
			(SELECT sum(rootpage) FROM sqlite_schema WHERE name GLOB 'sqlite_autoindex_addresses_[12]') - rootpage
			WHERE name GLOB 'sqlite_autoindex_addresses_[12]'`), sqlite.Damaged, true},
		{"missing column", record(`ALTER TABLE blocks DROP COLUMN pool`), sqlite.Damaged, true},
		{"missing identity", record(`DELETE FROM meta WHERE key = 'node_uid'`), sqlite.Damaged, true},
		{"nonsense for an address", record(`UPDATE addresses SET ipv4 = '10.0.0.x' WHERE block_offset = 1`), sqlite.Damaged, true},
		{"address with a mapped form", record(`UPDATE addresses SET ipv6 = '::ffff:10.0.0.1' WHERE block_offset = 1`), sqlite.Damaged, true},
		{"address in another form", record(`UPDATE addresses SET ipv6 = 'FD00::1', block_id = NULL, block_offset = NULL WHERE block_offset = 1`), sqlite.Damaged, true},
		{"nonsense for a block", record(`UPDATE blocks SET ipv4 = '10.0.0.1/30'`), sqlite.Damaged, true},
		{"nonsense for a client", record(`INSERT INTO clients VALUES ('c', 'eth0', 'ns', 'p', '', '', 0, '10.0.0.9', NULL, '2026-01-01T00:00:00.000Z', '[{"destinations": ["x"]}]')`), sqlite.Damaged, true},
		{"address of no block", record(`PRAGMA foreign_keys = 0`, `DELETE FROM blocks`), sqlite.Damaged, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := options(t)
			if err := os.MkdirAll(filepath.Dir(o.Path), 0o700); err != nil {
				t.Fatal(err)
			}
			tc.make(t, o.Path)
			before := files(t, o)
			s, res := mustOpen(t, o)
			if !res.Fresh || res.Reason != tc.reason || (res.SetAside != "") != tc.aside {
				t.Fatalf("%+v, want reason %s", res, tc.reason)
			}
			fill(t, s, mustBlock(t, "default-0", "10.0.0.0/30", ""), 4)
			mustClose(t, s)
			if tc.aside {
				for _, name := range before {
					if name == "coild.db-lock" || name == "coild.db-ballast" {
						continue
					}
					moved := res.SetAside + strings.TrimPrefix(name, "coild.db")
					if _, err := os.Stat(moved); err != nil {
						t.Errorf("%s is gone: %v", name, err)
					}
				}
			}
			if s, res = mustOpen(t, o); res.Fresh || len(mustList(t, s)) != 4 {
				t.Errorf("next Open: %+v", res)
			}
		})
	}
}

// Files that are set aside in the same second don't replace each other.
func TestSetAsideTwice(t *testing.T) {
	o := options(t)
	seen := map[string]bool{}
	for i := range 3 {
		if err := os.MkdirAll(filepath.Dir(o.Path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(o.Path, []byte(fmt.Sprintf("file %d", i)), 0o600); err != nil {
			t.Fatal(err)
		}
		s, res := mustOpen(t, o)
		mustClose(t, s)
		data, err := os.ReadFile(res.SetAside)
		if err != nil || string(data) != fmt.Sprintf("file %d", i) || seen[res.SetAside] {
			t.Errorf("%s: %q, %v", res.SetAside, data, err)
		}
		seen[res.SetAside] = true
		if err := os.Remove(o.Path); err != nil {
			t.Fatal(err)
		}
	}
}

// The view is what people look at, with a shell that only reads.
func TestPodsView(t *testing.T) {
	o := options(t)
	clock := storetest.NewClock()
	clock.Step(time.Since(clock.Now())) // the view compares with the real time
	o.Clock = clock
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/29", "fd00::/125")
	fill(t, s, b, 2)
	clock.Advance(-2 * o.CoolDown)
	for _, p := range []string{"gone", "cools", "leaves"} {
		if _, err := s.Reserve(t.Context(), request(p, b)); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{"gone", "cools", "leaves"} {
		if _, err := s.Release(t.Context(), id(p)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Cool(t.Context(), id("gone")); err != nil {
		t.Fatal(err)
	}
	clock.Advance(2 * o.CoolDown)
	if err := s.Cool(t.Context(), id("cools")); err != nil {
		t.Fatal(err)
	}
	rows, err := rawDB(t, o.Path+"?mode=ro").Query(`SELECT namespace, name, ipv4, ipv6, state, pool, block, container, interface, host_interface FROM pods`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var got []string
	for rows.Next() {
		cols := make([]string, 10)
		ptrs := make([]any, len(cols))
		for i := range cols {
			ptrs[i] = &cols[i]
		}
		if err := rows.Scan(ptrs...); err != nil {
			t.Fatal(err)
		}
		got = append(got, strings.Join(cols, " "))
	}
	want := []string{
		"ns c0 10.0.0.0 fd00:: attached default default-0 c0 eth0 vethc0",
		"ns c1 10.0.0.1 fd00::1 attached default default-0 c1 eth0 vethc1",
		"ns leaves 10.0.0.4 fd00::4 releasing default default-0 leaves eth0 ",
		"ns cools 10.0.0.3 fd00::3 cooling default default-0 cools eth0 ",
		"ns gone 10.0.0.2 fd00::2 free default default-0 gone eth0 ",
	}
	if !slices.Equal(got, want) {
		t.Errorf("pods are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

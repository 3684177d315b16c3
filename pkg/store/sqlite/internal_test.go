package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

func testStore(t *testing.T, scripts []string, path string) (*Store, OpenResult) {
	t.Helper()
	s, res, err := open(t.Context(), Options{Path: path, BootID: "boot", CoolDown: time.Minute}, scripts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, res
}

func mustMigrations(t *testing.T) []string {
	t.Helper()
	scripts, err := migrations()
	if err != nil {
		t.Fatal(err)
	}
	return scripts
}

// Pragmas are per connection: each one must have them.
func TestPragmas(t *testing.T) {
	s, _ := testStore(t, mustMigrations(t), filepath.Join(t.TempDir(), "db"))
	for name, pool := range map[string]struct {
		db        *sql.DB
		n         int
		queryOnly string
	}{"writer": {s.writer.DB, 1, "0"}, "reader": {s.reader.DB, readers, "1"}} {
		want := map[string]string{
			"busy_timeout": "5000", "journal_mode": "wal", "synchronous": "1", "foreign_keys": "1", "journal_size_limit": "4194304",
			"cache_size": "-512", "temp_store": "2", "trusted_schema": "0", "cell_size_check": "1", "query_only": pool.queryOnly,
		}
		var wg sync.WaitGroup
		held := make(chan struct{})
		for range pool.n {
			c, err := pool.db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				for pragma, w := range want {
					var got string
					if err := c.QueryRowContext(t.Context(), "PRAGMA "+pragma).Scan(&got); err != nil || got != w {
						t.Errorf("%s: %s is %s, %v; want %s", name, pragma, got, err, w)
					}
				}
				<-held
				if err := c.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		close(held)
		wg.Wait()
	}
	if _, err := s.reader.ExecContext(t.Context(), `DELETE FROM meta`); err == nil {
		t.Error("a connection for reading writes")
	}
}

// No statement of the daily work reads the whole table.
func TestQueryPlans(t *testing.T) {
	s, _ := testStore(t, mustMigrations(t), filepath.Join(t.TempDir(), "db"))
	for name, q := range map[string]string{
		"find": findSQL, "findAddress": findAddressSQL, "nextUnused": nextUnusedSQL, "oldestCooling": oldestCoolingSQL,
		"newestCooling": newestCoolingSQL, "firstCooling": firstCoolingSQL, "reuse": reuseSQL, "readdress": readdressSQL, "attach": attachSQL, "adopt": adoptSQL, "release": releaseSQL,
		"cool": coolSQL, "delete": deleteSQL, "list": listSQL, "usage": usageSQL, "records": recordsSQL,
	} {
		args := make([]any, strings.Count(q, "?"))
		for n := range 9 { // numbered ones, which may be used several times
			if strings.Contains(q, fmt.Sprint("?", n+1)) {
				args = make([]any, n+1)
			}
		}
		rows, err := s.writer.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+q, args...)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for rows.Next() {
			var a, b, c int
			var detail string
			if err := rows.Scan(&a, &b, &c, &detail); err != nil {
				t.Fatal(err)
			}
			// Blocks are few; b is their alias.
			scan := strings.HasPrefix(detail, "SCAN") && detail != "SCAN CONSTANT ROW" && !strings.HasPrefix(detail, "SCAN b")
			if scan && !(strings.HasSuffix(detail, "USING INDEX attachments") && (name == "list" || name == "usage")) {
				t.Errorf("%s: %s", name, detail)
			}
			if strings.Contains(detail, "TEMP B-TREE") && name != "list" && name != "usage" {
				t.Errorf("%s: %s", name, detail)
			}
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
		if err := rows.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// The schema refuses what the code should never do.
func TestConstraints(t *testing.T) {
	s, _ := testStore(t, mustMigrations(t), filepath.Join(t.TempDir(), "db"))
	row := map[string]any{
		"ipv4": "10.0.0.1", "ipv6": nil, "state": "pending", "since": "2026-03-01T12:00:00.000Z", "boot_id": "boot", "pool": "p", "block": "b",
		"block_id": nil, "block_offset": nil, "container_id": "c", "ifname": "eth0", "pod_namespace": "", "pod_name": "", "pod_uid": "",
		"netns_path": "", "netns_inode": 0, "host_ifname": "", "host_ifindex": 0, "result": nil, "freed_seq": nil, "freed_boottime_ms": nil,
	}
	insert := func(change map[string]any) error {
		var cols, marks []string
		var args []any
		for c, v := range row {
			if w, is := change[c]; is {
				v = w
			}
			cols, marks, args = append(cols, c), append(marks, "?"), append(args, v)
		}
		_, err := s.writer.ExecContext(t.Context(), "INSERT INTO addresses ("+strings.Join(cols, ",")+") VALUES ("+strings.Join(marks, ",")+")", args...)
		return err
	}
	if err := insert(nil); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]map[string]any{
		"same IPv4":              {"container_id": "d"},
		"same attachment":        {"ipv4": "10.0.0.2"},
		"no address":             {"container_id": "d", "ipv4": nil},
		"unknown state":          {"container_id": "d", "ipv4": "10.0.0.2", "state": "free"},
		"time of another form":   {"container_id": "d", "ipv4": "10.0.0.2", "since": "2026-03-01 12:00:00"},
		"time that is a number":  {"container_id": "d", "ipv4": "10.0.0.2", "since": 7},
		"no boot":                {"container_id": "d", "ipv4": "10.0.0.2", "boot_id": ""},
		"no container":           {"container_id": "", "ipv4": "10.0.0.2"},
		"no interface":           {"container_id": "d", "ipv4": "10.0.0.2", "ifname": ""},
		"unknown block":          {"container_id": "d", "ipv4": "10.0.0.2", "block_id": 7, "block_offset": 0},
		"offset without block":   {"container_id": "d", "ipv4": "10.0.0.2", "block_offset": 0},
		"cooling without a time": {"container_id": "d", "ipv4": "10.0.0.2", "state": "cooling"},
		"freed but attached":     {"container_id": "d", "ipv4": "10.0.0.2", "state": "attached", "freed_seq": 1, "freed_boottime_ms": 1},
		"text for a number":      {"container_id": "d", "ipv4": "10.0.0.2", "host_ifindex": "x"},
	} {
		if err := insert(change); code(err)&0xff != sqlite3.SQLITE_CONSTRAINT {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := insert(map[string]any{"container_id": "c", "ipv4": "10.0.0.2", "state": "cooling", "freed_seq": 1, "freed_boottime_ms": 1}); err != nil {
		t.Errorf("an attachment that had another address: %v", err)
	}
}

func TestMigrate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	released := mustMigrations(t)
	s, _ := testStore(t, released, path)
	b := store.Block{Name: "default-0", Pool: "default"}
	b.IPv4 = mustPrefix(t, "10.0.0.0/30")
	if err := s.SetBlocks(t.Context(), []store.Block{b}); err != nil {
		t.Fatal(err)
	}
	r := store.Request{ID: attachment.ID{ContainerID: "c", IfName: "eth0"}, Pool: "default", Blocks: []string{"default-0"}}
	if _, err := s.Reserve(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if err := s.Rebuilt(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	// A step that fails leaves the file as it was, and says so each time.
	newer := append(append([]string(nil), released...), `ALTER TABLE addresses ADD COLUMN note TEXT NOT NULL DEFAULT 'none'`)
	failing := append(append([]string(nil), newer...), `INSERT INTO meta (key, value) VALUES ('x', 'y'); INSERT INTO nowhere VALUES (1)`)
	s, res := testStore(t, newer, path)
	if res != (OpenResult{}) {
		t.Errorf("Open with a newer schema: %+v", res)
	}
	var note string
	if err := s.reader.QueryRowContext(t.Context(), `SELECT note FROM addresses`).Scan(&note); err != nil || note != "none" {
		t.Errorf("the new column has %q, %v", note, err)
	}
	if as, err := s.List(t.Context()); err != nil || len(as) != 1 {
		t.Errorf("after the migration: %v, %v", as, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	copies, err := filepath.Glob(fmt.Sprintf("%s.*-v%d", path, len(released)))
	if err != nil || len(copies) != 1 {
		t.Fatalf("copies before the migration: %v, %v", copies, err)
	}

	// The copy is a whole record of the older version.
	if s, res = testStore(t, released, copies[0]); res != (OpenResult{}) {
		t.Errorf("the copy: %+v", res)
	}
	if as, err := s.List(t.Context()); err != nil || len(as) != 1 {
		t.Errorf("the copy has %v, %v", as, err)
	}

	// The older program can't read the newer file.
	if s, res = testStore(t, released, path); res.Reason != NewerSchema || !res.Fresh || res.SetAside == "" {
		t.Errorf("Open with an older program: %+v", res)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(res.SetAside, path); err != nil {
		t.Fatal(err)
	}

	// A step that fails changes nothing.
	db, err := connect(path, false, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := migrate(t.Context(), db, path, failing, time.Now()); err == nil {
		t.Fatal("a failing step is no error")
	}
	var version, rows int
	if err := db.QueryRowContext(t.Context(), `SELECT (SELECT user_version FROM pragma_user_version), (SELECT count(*) FROM meta WHERE key = 'x')`).
		Scan(&version, &rows); err != nil || version != len(newer) || rows != 0 {
		t.Errorf("after a failed step: version %d, %d rows of it, %v", version, rows, err)
	}
}

// A record of each version that was released becomes one of the newest.
func TestMigrateFromEachVersion(t *testing.T) {
	released := mustMigrations(t)
	for version := 1; version < len(released); version++ {
		path := filepath.Join(t.TempDir(), "db")
		if err := createFile(path); err != nil {
			t.Fatal(err)
		}
		db, err := connect(path, false, 1)
		if err != nil {
			t.Fatal(err)
		}
		err = migrate(t.Context(), db, path, released[:version], time.Now())
		if err == nil {
			_, err = db.ExecContext(t.Context(), `UPDATE meta SET value = '2026-01-01T00:00:00.000Z' WHERE key = 'rebuilt_at';
				INSERT INTO addresses (ipv4, state, since, boot_id, pool, block, container_id, ifname, pod_namespace, pod_name, pod_uid,
					netns_path, netns_inode, host_ifname, host_ifindex)
				VALUES ('10.0.0.1', 'attached', '2026-01-01T00:00:00.000Z', 'b', 'default', 'default-0', 'c', 'eth0', 'ns', 'p', '', '/n', 7, 'v', 3)`)
		}
		if err := errors.Join(err, db.Close()); err != nil {
			t.Fatal(err)
		}
		s, res := testStore(t, released, path)
		if res != (OpenResult{}) {
			t.Errorf("version %d: %+v", version, res)
		}
		if as, err := s.List(t.Context()); err != nil || len(as) != 1 {
			t.Errorf("version %d: allocations %v, %v", version, as, err)
		}
		if cs, err := s.ListClients(t.Context()); err != nil || len(cs) != 0 {
			t.Errorf("version %d: clients %v, %v", version, cs, err)
		}
	}
}

// A caller stops waiting for a writer that another process holds up, and what it
// asked for still happens, whole.
func TestCallerStopsWaiting(t *testing.T) {
	path := filepath.Join(t.TempDir(), "db")
	s, _ := testStore(t, mustMigrations(t), path)
	b := store.Block{Name: "default-0", Pool: "default"}
	b.IPv4 = mustPrefix(t, "10.0.0.0/30")
	if err := s.SetBlocks(t.Context(), []store.Block{b}); err != nil {
		t.Fatal(err)
	}
	other, err := sql.Open("sqlite", "file:"+path+"?_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	tx, err := other.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	r := store.Request{ID: attachment.ID{ContainerID: "c", IfName: "eth0"}, Pool: "default", Blocks: []string{"default-0"}}
	begin := time.Now()
	if _, err := s.Reserve(ctx, r); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Reserve: %v", err)
	}
	if d := time.Since(begin); d > 3*time.Second {
		t.Errorf("waited for %s", d)
	}
	if _, err := s.Get(t.Context(), r.ID); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("reading while the other process writes: %v", err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if a, err := s.Release(t.Context(), r.ID); err != nil || a.State != store.Releasing {
		t.Errorf("what the caller gave up: %+v, %v", a, err)
	}
}

// A row that meta lacks while the record is open is damage: the record is opened anew.
func TestMetaLacksARow(t *testing.T) {
	s, _ := testStore(t, mustMigrations(t), filepath.Join(t.TempDir(), "db"))
	if _, err := s.writer.ExecContext(t.Context(), `DELETE FROM meta WHERE key = 'cooled_seq'`); err != nil {
		t.Fatal(err)
	}
	b := store.Block{Name: "default-0", Pool: "default"}
	b.IPv4 = mustPrefix(t, "10.0.0.0/30")
	// A new block makes the writer read its memory again at the next change.
	if err := s.SetBlocks(t.Context(), []store.Block{b}); err != nil {
		t.Fatal(err)
	}
	if err := s.SetBlocks(t.Context(), []store.Block{b}); !errors.Is(err, ErrDamaged) {
		t.Errorf("SetBlocks: %v, want that the record is damaged", err)
	}
	if err := s.Writable(t.Context()); !errors.Is(err, ErrDamaged) {
		t.Errorf("Writable: %v, want that the record is damaged", err)
	}
}

func TestClassify(t *testing.T) {
	s, _ := testStore(t, mustMigrations(t), filepath.Join(t.TempDir(), "db"))
	c, err := s.writer.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.ExecContext(t.Context(), `PRAGMA query_only = 1`); err != nil {
		t.Fatal(err)
	}
	_, err = c.ExecContext(t.Context(), `DELETE FROM meta`)
	if !errors.Is(classify(err), store.ErrReadOnly) {
		t.Errorf("SQLITE_READONLY: %v", classify(err))
	}
	if e, ok := errors.AsType[*sqlite.Error](classify(err)); !ok || e.Code()&0xff != sqlite3.SQLITE_READONLY {
		t.Errorf("the cause is lost: %v", err)
	}
	if _, err := c.ExecContext(t.Context(), `PRAGMA query_only = 0; PRAGMA max_page_count = 1`); err != nil {
		t.Fatal(err)
	}
	_, err = c.ExecContext(t.Context(), `CREATE TABLE big AS WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9999) SELECT i, hex(zeroblob(100)) FROM n`)
	if code(err) != sqlite3.SQLITE_FULL || !errors.Is(classify(err), store.ErrReadOnly) {
		t.Errorf("SQLITE_FULL: %v", classify(err))
	}
	_, err = c.ExecContext(t.Context(), `SELECT * FROM nowhere`)
	if err == nil || errors.Is(classify(err), store.ErrReadOnly) || errors.Is(classify(err), ErrDamaged) {
		t.Errorf("SQLITE_ERROR: %v", classify(err))
	}
	if classify(nil) != nil || classifyOS(nil) != nil {
		t.Error("nil is an error")
	}
}

func mustPrefix(t *testing.T, s string) netip.Prefix {
	t.Helper()
	p, err := netip.ParsePrefix(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A disk that would be full with a copy has none made, and the record stays writable.
func TestCopyNeedsRoom(t *testing.T) {
	s, _ := testStore(t, mustMigrations(t), filepath.Join(t.TempDir(), "db"))
	if _, err := s.copy(t.Context(), 1<<30, 1<<60); !errors.Is(err, ErrNoRoom) {
		t.Errorf("without room: %v", err)
	}
	c, err := s.copy(t.Context(), 1<<30, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for range readers { // each connection, one of which has made the copy
		conn, err := s.reader.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.ExecContext(t.Context(), `DELETE FROM meta`); err == nil {
			t.Error("a connection for reading writes after a copy")
		}
	}
}

package sqlite_test

import (
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

const copyLimit = 16 << 20

// saved writes a copy of the record into a file, and returns its path.
func saved(t *testing.T, s *sqlite.Store) string {
	t.Helper()
	c := testkit.Must(s.Copy(t.Context(), copyLimit))(t)
	path := filepath.Join(t.TempDir(), "copy.db")
	f := testkit.Must(os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600))(t)
	n, err := io.Copy(f, c)
	testkit.Check(t, err, f.Close(), c.Close())
	if n != c.Size || n == 0 {
		t.Fatalf("the copy has %d bytes, and is said to have %d", n, c.Size)
	}
	return path
}

// containers are the rows of a file that has passed SQLite's check, as "container state" in the order in which they were made.
func containers(t *testing.T, path string) (all []string) {
	t.Helper()
	db := testkit.Must(sql.Open("sqlite", "file:"+path+"?mode=ro"))(t)
	defer db.Close()
	var verdict string
	if err := db.QueryRowContext(t.Context(), `PRAGMA integrity_check`).Scan(&verdict); err != nil || verdict != "ok" {
		t.Fatalf("integrity_check: %q, %v", verdict, err)
	}
	rows := testkit.Must(db.QueryContext(t.Context(), `SELECT container_id || ' ' || state FROM addresses ORDER BY address_id`))(t)
	defer rows.Close()
	for rows.Next() {
		var text string
		testkit.Check(t, rows.Scan(&text))
		all = append(all, text)
	}
	testkit.Check(t, rows.Err())
	return all
}

// Copies that are made while 1,000 changes go on are whole, each one is the record after some of the changes, and has all that were done before it was asked for.
func TestCopyWhileWriting(t *testing.T) {
	const pods = 500
	s, _ := mustOpen(t, options(t))
	four := "10.0.0.0/22"
	b := store.Block{Name: "default-0", Pool: "default", Block: testkit.Must(ipam.ParseBlock(&four, nil))(t)}
	testkit.Check(t, s.SetBlocks(t.Context(), []store.Block{b}))
	var done atomic.Int64
	wrote := make(chan error, 1)
	go func() {
		for i := range pods {
			name := fmt.Sprint("c", i)
			_, err := s.Reserve(t.Context(), request(name, b))
			if err == nil {
				done.Add(1)
				err = s.Attach(t.Context(), id(name), store.Wiring{HostIfName: "veth" + name, HostIfIndex: i, Result: []byte("{}")})
			}
			if err != nil {
				wrote <- err
				return
			}
			done.Add(1)
		}
		wrote <- nil
	}()
	copies, within := 0, 0
	for ended := false; !ended; copies++ {
		select {
		case err := <-wrote:
			testkit.Check(t, err)
			ended = true // and one more copy
		default:
		}
		before := done.Load()
		path := saved(t, s)
		got := containers(t, path)
		changes := 0
		for i, text := range got {
			switch {
			case text == fmt.Sprint("c", i, " attached"):
				changes += 2
			case text == fmt.Sprint("c", i, " pending") && i == len(got)-1:
				changes++
			default:
				t.Fatalf("copy %d: row %d of %d is %s", copies, i, len(got), text)
			}
		}
		if int64(changes) < before {
			t.Fatalf("copy %d has %d changes, and %d were done before", copies, changes, before)
		}
		if changes > 0 && changes < 2*pods {
			within++
		}
		testkit.Check(t, os.Remove(path))
	}
	if within == 0 {
		t.Errorf("none of %d copies was made in between", copies)
	}
	t.Logf("%d copies, %d of them in between", copies, within)
}

// A copy is a record of its own: coild can open it. Nothing of it stays in the folder, and what a process has left behind there is removed at the next start.
func TestCopyLeavesNothing(t *testing.T) {
	o := options(t)
	left := []string{o.Path + "-copy", o.Path + "-copy-journal"}
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/27", "fd00::/123")
	fill(t, s, b, 3)
	want := mustList(t, s)
	c := testkit.Must(s.Copy(t.Context(), copyLimit))(t)
	if _, err := s.Copy(t.Context(), copyLimit); !errors.Is(err, sqlite.ErrCopying) {
		t.Errorf("a second copy: %v, want ErrCopying", err)
	}
	for _, path := range left {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s while there is a copy: %v", path, err)
		}
	}
	testkit.Check(t, c.Close())
	copied := o
	copied.Path = saved(t, s)
	twin, res := mustOpen(t, copied)
	if got := mustList(t, twin); res.Fresh || res.SetAside != "" || len(got) != len(want) || got[0].Address != want[0].Address {
		t.Errorf("the copy is opened as %+v, with %d of %d allocations", res, len(got), len(want))
	}
	mustClose(t, twin)
	mustClose(t, s)
	for _, path := range left {
		testkit.Check(t, os.WriteFile(path, []byte("left"), 0o600))
	}
	s, res = mustOpen(t, o)
	if res.Fresh {
		t.Errorf("with a copy beside it the record is opened as %+v", res)
	}
	for _, path := range left {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s after a start: %v", path, err)
		}
	}
	mustClose(t, s)
}

// What can't be copied is refused, with the reason, and coild works on.
func TestCopyRefused(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/27", "fd00::/123")
	fill(t, s, b, 3)
	if _, err := s.Copy(t.Context(), 4096); !errors.Is(err, sqlite.ErrTooLarge) {
		t.Errorf("of a record that is too large: %v", err)
	}
	if got := len(containers(t, saved(t, s))); got != 3 {
		t.Errorf("after a refusal the copy has %d rows", got)
	}
	testkit.Check(t, os.Rename(o.Path, o.Path+".gone"))
	for what, do := range map[string]func() error{
		"copy":     func() error { _, err := s.Copy(t.Context(), copyLimit); return err },
		"contents": func() error { _, err := s.Contents(t.Context()); return err },
	} {
		if err := do(); !errors.Is(err, sqlite.ErrDamaged) || !strings.Contains(err.Error(), "removed or replaced") {
			t.Errorf("%s of a record that is gone: %v", what, err)
		}
	}
	testkit.Check(t, os.Rename(o.Path+".gone", o.Path))
	testkit.Check(t, s.Writable(t.Context())) // a question changes nothing
}

// A record that can't be read gives no copy, and nothing is left of the attempt. That somebody has asked changes nothing: coild finds the damage by itself.
func TestCopyOfDamaged(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/24", "fd00::/120")
	fill(t, s, b, 200)
	testkit.Check(t, s.Checkpoint(t.Context()))
	f := testkit.Must(os.OpenFile(o.Path, os.O_RDWR, 0))(t)
	size := testkit.Must(f.Stat())(t).Size()
	for at := int64(4096); at < size; at += 4096 {
		testkit.Must(f.WriteAt(make([]byte, 4096), at))(t)
	}
	testkit.Check(t, f.Close())
	if _, err := s.Copy(t.Context(), copyLimit); !errors.Is(err, sqlite.ErrDamaged) {
		t.Errorf("copy: %v, want ErrDamaged", err)
	}
	if _, err := os.Stat(o.Path + "-copy"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of the attempt is left: %v", err)
	}
	testkit.Check(t, s.Writable(t.Context()))
}

// Contents are the values of all rows, also of those that no program would write.
func TestContents(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/27", "fd00::/123")
	fill(t, s, b, 2)
	testkit.Must(s.Release(t.Context(), id("c1")))(t)
	testkit.Check(t, s.Cool(t.Context(), id("c1")))
	db := testkit.Must(sql.Open("sqlite", "file:"+o.Path))(t)
	testkit.Must(db.ExecContext(t.Context(), `UPDATE addresses SET ipv4 = 'nonsense' WHERE container_id = 'c0'`))(t)
	testkit.Must(db.ExecContext(t.Context(), `UPDATE addresses SET block_id = 99 WHERE container_id = 'c1'`))(t)
	testkit.Check(t, db.Close())

	d := testkit.Must(s.Contents(t.Context()))(t)
	if d.Schema != d.Newest || d.Schema == 0 || d.Meta["node_name"] != testNode.NodeName || len(d.Blocks) != 1 || d.Blocks[0].IPv6 != "fd00::/123" {
		t.Errorf("%+v", d)
	}
	if !slices.Equal(d.Damage, []string{"addresses has row 2 of a row of blocks that is missing"}) {
		t.Errorf("damage: %q", d.Damage)
	}
	if len(d.Addresses) != 2 || d.Addresses[0].IPv4 != "nonsense" || d.Addresses[0].State != "attached" || d.Addresses[0].HostLink != "vethc0" ||
		d.Addresses[1].State != "cooling" || d.Addresses[1].Pod != "c1" || d.Addresses[1].Offset != 1 || d.Addresses[1].BlockID != 99 {
		t.Errorf("addresses: %+v", d.Addresses)
	}
	if _, ok := d.Addresses[1].Entered(); !ok {
		t.Errorf("since %q isn't understood", d.Addresses[1].Since)
	}
}

package sqlite_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
	"github.com/coil-net/coil/pkg/testkit"
)

// inMountNamespace runs the test in a process with a mount namespace of its own,
// so that no mount is left behind however it ends. It returns true in that process.
func inMountNamespace(t *testing.T) bool {
	t.Helper()
	testkit.Need(t, testkit.Netns)
	const env = "COIL_TEST_SQLITE_MOUNTS"
	if os.Getenv(env) == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), env+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// tmpfs mounts a small filesystem and returns the options of a record in it.
func tmpfs(t *testing.T, size int) sqlite.Options {
	t.Helper()
	o := options(t)
	dir := filepath.Dir(o.Path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", size)); err != nil {
		t.Fatalf("mount tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	o.BallastBytes = 256 << 10
	return o
}

// fillDisk takes all space that is left on the filesystem of the record.
func fillDisk(t *testing.T, o sqlite.Options) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(filepath.Dir(o.Path), "filler"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for {
		if _, err := f.Write(make([]byte, 4096)); errors.Is(err, unix.ENOSPC) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func emptyDisk(t *testing.T, o sqlite.Options) {
	t.Helper()
	if err := os.Remove(filepath.Join(filepath.Dir(o.Path), "filler")); err != nil {
		t.Fatal(err)
	}
}

// reserveUntilFull reserves addresses until the disk takes no more.
func reserveUntilFull(t *testing.T, s *sqlite.Store, b store.Block, prefix string) []attachment.ID {
	t.Helper()
	var ids []attachment.ID
	for i := range 3000 {
		r := request(fmt.Sprintf("%s%d", prefix, i), b)
		_, err := s.Reserve(t.Context(), r)
		if errors.Is(err, store.ErrReadOnly) {
			return ids
		}
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, r.ID)
	}
	t.Fatal("the disk never gets full")
	return nil
}

func TestFullDisk(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	o := tmpfs(t, 8<<20)
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/20", "fd00::/116")
	fill(t, s, b, 100)
	if err := s.Writable(t.Context()); err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		fillDisk(t, o)
		if err := s.Writable(t.Context()); !errors.Is(err, store.ErrReadOnly) {
			t.Errorf("Writable on a full disk: %v", err)
		}
		more := reserveUntilFull(t, s, b, fmt.Sprintf("r%d-", round))

		// A recorded address can be read and answered.
		if a, err := s.Reserve(t.Context(), request("c99", b)); err != nil || a.State != store.Attached {
			t.Errorf("Reserve of what is recorded: %+v, %v", a, err)
		}
		if len(more) > 0 {
			if err := s.Attach(t.Context(), more[0], store.Wiring{}); !errors.Is(err, store.ErrReadOnly) {
				t.Errorf("Attach on a full disk: %v", err)
			}
		}
		if err := s.SetBlocks(t.Context(), []store.Block{mustBlock(t, "other-0", "10.9.0.0/30", "")}); !errors.Is(err, store.ErrReadOnly) {
			t.Errorf("SetBlocks on a full disk: %v", err)
		}
		if us, err := s.Usage(t.Context()); err != nil || us[0].Allocated == 0 {
			t.Errorf("Usage on a full disk: %v, %v", us, err)
		}

		// All that goes can go, also when others take what is freed.
		for i := 30 * round; i < 30*(round+1); i++ {
			more = append(more, id(fmt.Sprintf("c%d", i)))
		}
		for i, x := range more {
			if _, err := s.Release(t.Context(), x); err != nil {
				t.Fatalf("round %d: Release %d of %d: %v", round, i, len(more), err)
			}
			fillDisk(t, o)
			if err := s.Cool(t.Context(), x); err != nil {
				t.Fatalf("round %d: Cool %d of %d: %v", round, i, len(more), err)
			}
			if i%10 == 0 {
				if err := s.Checkpoint(t.Context()); err != nil && !errors.Is(err, store.ErrReadOnly) {
					t.Fatal(err)
				}
			}
			fillDisk(t, o)
		}
		if got, want := len(mustList(t, s)), 100-30*(round+1); got != want {
			t.Errorf("%d allocations, want %d", got, want)
		}
		if err := s.Writable(t.Context()); !errors.Is(err, store.ErrReadOnly) {
			t.Errorf("Writable on a full disk: %v", err)
		}

		// It recovers by itself, whoever asks first.
		emptyDisk(t, o)
		if round == 1 {
			if err := s.Writable(t.Context()); err != nil {
				t.Errorf("Writable after space returned: %v", err)
			}
		}
		x := fmt.Sprintf("after%d", round)
		if _, err := s.Reserve(t.Context(), request(x, b)); err != nil {
			t.Fatalf("Reserve after space returned: %v", err)
		}
		if _, err := s.Release(t.Context(), id(x)); err != nil {
			t.Fatal(err)
		}
		if err := s.Cool(t.Context(), id(x)); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(o.Path + "-ballast"); err != nil || st.Size() != o.BallastBytes || st.Sys().(*syscall.Stat_t).Blocks*512 < o.BallastBytes {
			t.Errorf("the ballast isn't there again: %v, %v", st, err)
		}
		if err := s.Writable(t.Context()); err != nil {
			t.Errorf("Writable after space returned: %v", err)
		}
	}
	mustClose(t, s)
	s, res := mustOpen(t, o)
	if res != (sqlite.OpenResult{}) || len(mustList(t, s)) != 10 {
		t.Errorf("after all that: %+v", res)
	}
}

// A disk that is full when the process starts.
func TestOpenOnFullDisk(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	o := tmpfs(t, 1<<20)
	fillDisk(t, o)
	for range 2 {
		if s, _, err := sqlite.Open(t.Context(), o); !errors.Is(err, store.ErrReadOnly) {
			t.Fatalf("first Open on a full disk: %v, %v", s, err)
		}
	}
	emptyDisk(t, o)
	s, res := mustOpen(t, o)
	if res != fresh {
		t.Errorf("first Open after space returned: %+v", res)
	}
	b := mustBlock(t, "default-0", "10.0.0.0/28", "")
	fill(t, s, b, 5)
	mustClose(t, s)
	fillDisk(t, o)

	s, res = mustOpen(t, o)
	if res != (sqlite.OpenResult{}) {
		t.Errorf("Open on a full disk: %+v", res)
	}
	if err := s.Writable(t.Context()); !errors.Is(err, store.ErrReadOnly) {
		t.Errorf("Writable: %v", err)
	}
	if _, err := s.Reserve(t.Context(), request("new", b)); !errors.Is(err, store.ErrReadOnly) {
		t.Errorf("Reserve: %v", err)
	}
	for i := range 5 {
		x := id(fmt.Sprintf("c%d", i))
		if _, err := s.Release(t.Context(), x); err != nil {
			t.Fatal(err)
		}
		if err := s.Cool(t.Context(), x); err != nil {
			t.Fatal(err)
		}
	}
	emptyDisk(t, o)
	if err := s.Writable(t.Context()); err != nil {
		t.Errorf("Writable after space returned: %v", err)
	}
	if _, err := s.Reserve(t.Context(), request("new", b)); err != nil {
		t.Errorf("Reserve after space returned: %v", err)
	}
}

func TestOpenReadOnly(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	o := tmpfs(t, 4<<20)
	remount := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", filepath.Dir(o.Path), "", unix.MS_REMOUNT|flags, "size=4m"); err != nil {
			t.Fatal(err)
		}
	}
	remount(unix.MS_RDONLY)
	if s, _, err := sqlite.Open(t.Context(), o); !errors.Is(err, store.ErrReadOnly) {
		t.Fatalf("first Open: %v, %v", s, err)
	}
	remount(0)
	s, _ := mustOpen(t, o)
	fill(t, s, mustBlock(t, "default-0", "10.0.0.0/28", ""), 5)
	mustClose(t, s)
	remount(unix.MS_RDONLY)
	if s, _, err := sqlite.Open(t.Context(), o); !errors.Is(err, store.ErrReadOnly) {
		t.Fatalf("Open: %v, %v", s, err)
	}
	// A file that can't be used can't be set aside either.
	remount(0)
	if err := os.Rename(o.Path, o.Path+"-good"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.Path, make([]byte, 8192), 0o600); err != nil {
		t.Fatal(err)
	}
	remount(unix.MS_RDONLY)
	if s, _, err := sqlite.Open(t.Context(), o); !errors.Is(err, store.ErrReadOnly) {
		t.Fatalf("Open of a damaged file: %v, %v", s, err)
	}
	remount(0)
	if err := os.Rename(o.Path+"-good", o.Path); err != nil {
		t.Fatal(err)
	}
	s, res := mustOpen(t, o)
	if res != (sqlite.OpenResult{}) || len(mustList(t, s)) != 5 {
		t.Errorf("%+v", res)
	}
}

// A record that a process left open can be read on a read-only disk, and is written
// again when the disk lets it.
func TestOpenReadOnlyAfterKill(t *testing.T) {
	if !inMountNamespace(t) {
		return
	}
	o := tmpfs(t, 4<<20)
	dir := filepath.Dir(o.Path)
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/28", "")
	fill(t, s, b, 5)
	if err := s.Rebuilt(t.Context()); err != nil {
		t.Fatal(err)
	}
	kept := map[string][]byte{}
	for _, suffix := range []string{"", "-wal", "-shm"} {
		content, err := os.ReadFile(o.Path + suffix)
		if err != nil {
			t.Fatal(err)
		}
		kept[o.Path+suffix] = content
	}
	mustClose(t, s)
	for path, content := range kept {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	remount := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|flags, "size=4m"); err != nil {
			t.Fatal(err)
		}
	}
	remount(unix.MS_RDONLY)
	s, res := mustOpen(t, o)
	defer mustClose(t, s)
	all := mustList(t, s)
	if res != (sqlite.OpenResult{}) || len(all) != 5 {
		t.Fatalf("%+v, %d records; want the record as it was left", res, len(all))
	}
	for range 2 {
		if err := s.Writable(t.Context()); !errors.Is(err, store.ErrReadOnly) {
			t.Errorf("Writable: %v", err)
		}
		if _, err := s.Reserve(t.Context(), request("new", b)); !errors.Is(err, store.ErrReadOnly) {
			t.Errorf("Reserve: %v", err)
		}
		if _, err := s.Release(t.Context(), all[0].ID); !errors.Is(err, store.ErrReadOnly) {
			t.Errorf("Release: %v", err)
		}
	}
	remount(0)
	if err := s.Writable(t.Context()); err != nil {
		t.Fatalf("Writable when the disk is: %v", err)
	}
	if _, err := s.Release(t.Context(), all[0].ID); err != nil {
		t.Errorf("Release: %v", err)
	}
	if _, err := s.Reserve(t.Context(), request("new", b)); err != nil {
		t.Errorf("Reserve: %v", err)
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Errorf("Checkpoint: %v", err)
	}
	if n := len(mustList(t, s)); n != 6 {
		t.Errorf("%d records, want 6", n)
	}
}

// The file is removed under an open Store: what is written then is lost.
func TestFileRemoved(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	fill(t, s, mustBlock(t, "default-0", "10.0.0.0/28", ""), 5)
	if err := os.Rename(o.Path, o.Path+"-away"); err != nil {
		t.Fatal(err)
	}
	if err := s.Writable(t.Context()); !errors.Is(err, sqlite.ErrDamaged) {
		t.Errorf("Writable of a removed file: %v", err)
	}
	if err := os.WriteFile(o.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Writable(t.Context()); !errors.Is(err, sqlite.ErrDamaged) {
		t.Errorf("Writable of a replaced file: %v", err)
	}
	if err := os.Rename(o.Path+"-away", o.Path); err != nil {
		t.Fatal(err)
	}
	if err := s.Writable(t.Context()); err != nil {
		t.Errorf("Writable of the file in its place: %v", err)
	}
}

// A reader that stays open keeps the log from being emptied; then it grows, and is
// emptied when the reader ends. The writer never waits for it.
func TestLongReader(t *testing.T) {
	o := options(t)
	s, _ := mustOpen(t, o)
	b := mustBlock(t, "default-0", "10.0.0.0/20", "")
	fill(t, s, b, 10)
	if left, err := checkpoint(t, s, o.Path); err != nil || left != 0 {
		t.Fatalf("Checkpoint leaves %d bytes, %v", left, err)
	}
	reader, err := rawDB(t, o.Path+"?mode=ro").BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	if err := reader.QueryRowContext(t.Context(), `SELECT count(*) FROM pods`).Scan(&n); err != nil || n != 10 {
		t.Fatalf("%d, %v", n, err)
	}
	before := int64(0)
	for round := range 5 {
		for i := range 20 {
			if _, err := s.Reserve(t.Context(), request(fmt.Sprintf("r%d-%d", round, i), b)); err != nil {
				t.Fatal(err)
			}
		}
		begin := time.Now()
		left, err := checkpoint(t, s, o.Path)
		if err != nil || left <= before {
			t.Errorf("Checkpoint leaves %d bytes after %d, %v", left, before, err)
		}
		if d := time.Since(begin); d > testkit.Limit(2*time.Second) {
			t.Errorf("Checkpoint waited for the reader: %s", d)
		}
		before = left
	}
	if err := reader.Rollback(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if left, err := checkpoint(t, s, o.Path); err != nil || left != 0 {
			t.Errorf("Checkpoint after the reader ended leaves %d bytes, %v", left, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Checkpoint(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Checkpoint with a context that has ended: %v", err)
	}
}

// checkpoint does a Checkpoint, and returns the size of the log that it leaves.
func checkpoint(t *testing.T, s *sqlite.Store, path string) (int64, error) {
	t.Helper()
	if err := s.Checkpoint(t.Context()); err != nil {
		return 0, err
	}
	st, err := os.Stat(path + "-wal")
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return st.Size(), nil
}

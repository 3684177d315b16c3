package atomicfile_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestWriteSetsContentAndModeWhateverTheUmask(t *testing.T) {
	old := syscall.Umask(0o077)
	t.Cleanup(func() { syscall.Umask(old) })
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for _, content := range []string{"first", "second, which is longer", ""} {
		if err := atomicfile.Write(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != content {
			t.Errorf("content is %q, want %q", got, content)
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o755 {
		t.Errorf("mode is %v, want 0755", info.Mode().Perm())
	}
	if got := testkit.FilesIn(t, dir); len(got) != 1 {
		t.Errorf("folder holds %q, want only f", got)
	}
}

func TestWriteNeverShowsHalfAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	a, b := bytes.Repeat([]byte("a"), 1<<20), bytes.Repeat([]byte("b"), 1<<19)
	if err := atomicfile.Write(path, a, 0o644); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		for i := range 40 {
			content := a
			if i%2 == 0 {
				content = b
			}
			if err := atomicfile.Write(path, content, 0o644); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for reads := 0; ; reads++ {
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatalf("read %d: %v", reads, err)
		}
		if !bytes.Equal(got, a) && !bytes.Equal(got, b) {
			t.Fatalf("read %d saw %d bytes that are neither content", reads, len(got))
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}

func TestWriteThatCannotRenameLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.MkdirAll(filepath.Join(path, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := atomicfile.Write(path, []byte("x"), 0o644); err == nil {
		t.Fatal("a folder was replaced by a file")
	}
	if got := testkit.FilesIn(t, dir); len(got) != 1 || got[0] != "f" {
		t.Errorf("folder holds %q, want only f", got)
	}
}

func TestWriteWantsTheFolder(t *testing.T) {
	err := atomicfile.Write(filepath.Join(t.TempDir(), "missing", "f"), nil, 0o644)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error is %v, want one that is fs.ErrNotExist", err)
	}
}

func TestCheckSaysWhatWriteWould(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "folder"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, fails := range map[string]bool{"new": false, "folder": true, "none/new": true} {
		path := filepath.Join(dir, name)
		if err := atomicfile.Check(path); (err != nil) != fails {
			t.Errorf("%s: Check returns %v", name, err)
		}
		if got := testkit.FilesIn(t, dir); len(got) != 1 {
			t.Errorf("%s: Check leaves %v", name, got)
		}
		if err := atomicfile.Write(path, nil, 0o644); (err != nil) != fails {
			t.Errorf("%s: Write returns %v", name, err)
		}
		os.Remove(filepath.Join(dir, "new"))
	}
}

func TestEnsureWritesOnlyWhatDiffers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, step := range []struct {
		name    string
		harm    func() error
		changed bool
	}{
		{"absent", func() error { return nil }, true},
		{"as it should be", func() error { return nil }, false},
		{"of another mode", func() error { return os.Chmod(path, 0o600) }, true},
		{"of another content", func() error { return os.Truncate(path, 1) }, true},
		{"a link to the same", func() error { return errors.Join(os.Rename(path, path+"2"), os.Symlink(path+"2", path)) }, true},
	} {
		if err := step.harm(); err != nil {
			t.Fatal(err)
		}
		changed, err := atomicfile.Ensure(path, []byte("content"), 0o644)
		info, statErr := os.Lstat(path)
		if err != nil || changed != step.changed || statErr != nil || info.Mode() != 0o644 || info.Size() != 7 {
			t.Errorf("%s: changed %v, %v; the file is %v, %v", step.name, changed, err, info, statErr)
		}
	}
}

func TestRemoveStaleTakesOnlyOldFilesOfThisName(t *testing.T) {
	dir := t.TempDir()
	old := time.Now().Add(-time.Hour)
	for name, mtime := range map[string]time.Time{
		".f.tmp-1": old, ".f.tmp-2": time.Now(), ".g.tmp-3": old, "f": old,
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, mtime, mtime); err != nil {
			t.Fatal(err)
		}
	}
	if err := atomicfile.RemoveStale(filepath.Join(dir, "f"), time.Minute); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, ".f.tmp-1")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the stale file is still there: %v", err)
	}
	if got := testkit.FilesIn(t, dir); len(got) != 3 {
		t.Errorf("folder holds %q, want the three others", got)
	}
	if err := atomicfile.RemoveStale(filepath.Join(dir, "gone", "f"), 0); err != nil {
		t.Errorf("without the folder: %v", err)
	}
	if !atomicfile.IsTemp(".f.tmp-2") || atomicfile.IsTemp("f") || atomicfile.IsTemp("f.tmp-1") {
		t.Error("IsTemp takes the wrong names")
	}
}

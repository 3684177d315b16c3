package scratch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNewRemovesOnlyAbandonedDirectories(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	used, err := New("x-")
	if err != nil {
		t.Fatal(err)
	}
	abandoned, err := New("x-")
	if err != nil {
		t.Fatal(err)
	}
	abandoned.lock.Close() // as the end of its process does
	starting := filepath.Join(os.TempDir(), "x-starting")
	other := filepath.Join(os.TempDir(), "y-other")
	for _, d := range []string{starting, other} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	fresh, err := New("x-")
	if err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]bool{
		used.Path(): true, abandoned.Path(): false, starting: true, other: true, fresh.Path(): true,
	} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("%s exists: %t, want %t", filepath.Base(dir), err == nil, want)
		}
	}
	for range 2 {
		if err := fresh.Remove(); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if _, err := os.Stat(fresh.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is left: %v", err)
	}
}

func TestFilesThatAreLeft(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("nowhere", filepath.Join(dir, "pod")); err != nil {
		t.Fatal(err)
	}
	got := files(dir)
	if len(got) != 2 || !strings.HasPrefix(got[1], filepath.Join(dir, "pod")+" Lrwxrwxrwx ") {
		t.Errorf("files = %q, want the directory and the link in it", got)
	}
}

package testkit

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestFilesIn(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b", ".a"} {
		Check(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	if got := FilesIn(t, dir); !slices.Equal(got, []string{".a", "b"}) {
		t.Errorf("%q", got)
	}
	if got := FilesIn(t, filepath.Join(dir, "none")); len(got) > 0 {
		t.Errorf("of no folder: %q", got)
	}
}

package testkit

import (
	"errors"
	"io/fs"
	"os"
	"testing"
)

// FilesIn are the names in a folder, sorted; none of a folder that isn't there.
func FilesIn(tb testing.TB, dir string) []string {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		tb.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

package cache

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/coil-net/coil/pkg/testkit"
)

func TestOnce(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	ctx := t.Context()
	made := 0
	fill := func(path string) error {
		made++
		return os.WriteFile(path, []byte("whole"), 0o600)
	}
	killed := func(path string) error {
		return errors.Join(os.WriteFile(path, []byte("half"), 0o600), errors.New("no space"))
	}
	if _, err := Once(ctx, "thing", nil, killed); err == nil {
		t.Fatal("the error of fill is lost")
	}
	dir := testkit.Must(Dir())(t)
	// A process that is killed leaves what it has begun.
	testkit.Check(t, os.WriteFile(filepath.Join(dir, "thing.new"), []byte("half"), 0o600))
	for range 2 {
		path := testkit.Must(Once(ctx, "thing", nil, fill))(t)
		if content := testkit.Must(os.ReadFile(path))(t); string(content) != "whole" {
			t.Errorf("content is %q", content)
		}
	}
	if made != 1 {
		t.Errorf("made %d times, want once", made)
	}
	if _, err := os.Stat(filepath.Join(dir, "thing.new")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unfinished one is left: %v", err)
	}
}

func TestLockGivesUpWithItsContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock := testkit.Must(Lock(t.Context(), path, nil))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Lock(ctx, path, t.Output()); err == nil {
		t.Fatal("a held lock was taken")
	}
	unlock()
	unlock, err := Lock(t.Context(), path, nil)
	if err != nil {
		t.Fatalf("lock after release: %v", err)
	}
	unlock()
}

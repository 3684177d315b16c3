// Package cache keeps files and folders that the lab makes once, in the user's cache folder. It owns that folder
// and its locks: of several processes that need the same entry at once, one makes it. It knows nothing of
// the entries.
package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Dir returns the folder, which it makes if it isn't there. It is safe to delete while no lab runs.
func Dir() (string, error) {
	user, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache folder: %w; set HOME or XDG_CACHE_HOME", err)
	}
	dir := filepath.Join(user, "coil-lab")
	return dir, os.MkdirAll(dir, 0o755)
}

// Once returns the path of an entry, a file or a folder. fill makes it if it isn't there. The path that fill gets is a
// temporary one, and the entry is renamed at the end: an entry with its name is complete. log gets a line when another
// process makes the entry; it may be nil.
func Once(ctx context.Context, name string, log io.Writer, fill func(path string) error) (path string, err error) {
	dir, err := Dir()
	if err != nil {
		return "", err
	}
	path = filepath.Join(dir, name)
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return path, err
	}
	unlock, err := Lock(ctx, path+".lock", log)
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return path, err
	}
	unfinished := path + ".new"
	if err := os.RemoveAll(unfinished); err != nil { // of a process that was killed
		return "", err
	}
	if err := fill(unfinished); err != nil {
		return "", errors.Join(err, os.RemoveAll(unfinished))
	}
	return path, os.Rename(unfinished, path)
}

// Lock takes the file lock at path. log gets a line when another process has it; it may be nil.
func Lock(ctx context.Context, path string, log io.Writer) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		return func() { f.Close() }, nil
	}
	if log != nil {
		fmt.Fprintf(log, "waiting for another process to release %s\n", path)
	}
	locked := make(chan error, 1)
	go func() { locked <- flockBlocking(int(f.Fd())) }()
	select {
	case err := <-locked:
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		return func() { f.Close() }, nil
	case <-ctx.Done():
		// flock(2) can't be interrupted from here; the goroutine gives the lock back when it
		// comes.
		go func() { <-locked; f.Close() }()
		return nil, fmt.Errorf("lock %s: %w", path, ctx.Err())
	}
}

func flockBlocking(fd int) error {
	for {
		if err := unix.Flock(fd, unix.LOCK_EX); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Package scratch makes temporary directories that don't outlive their process for long: each is
// locked while it is in use, and whoever makes the next one removes those that nobody holds any
// more. It knows nothing of what is in them.
package scratch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const lockFile = "lock"

// Dir is a temporary directory in use.
type Dir struct {
	path string
	lock *os.File
}

// New makes a directory in os.TempDir whose name begins with prefix, having removed the abandoned
// ones of this prefix.
func New(prefix string) (*Dir, error) {
	if err := sweep(os.TempDir(), prefix); err != nil {
		return nil, err
	}
	path, err := os.MkdirTemp("", prefix)
	if err != nil {
		return nil, err
	}
	lock, err := lockDir(path)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(path))
	}
	return &Dir{path: path, lock: lock}, nil
}

// Path returns the absolute path, optionally of a file in it.
func (d *Dir) Path(elem ...string) string {
	return filepath.Join(append([]string{d.path}, elem...)...)
}

// Remove removes the directory. It can be called more than once. The error says what is left in it.
func (d *Dir) Remove() error {
	err := os.RemoveAll(d.path)
	if err != nil {
		err = fmt.Errorf("%w; left is %q", err, files(d.path))
	}
	d.lock.Close() // a second close fails and changes nothing
	return err
}

// files lists what is in a directory and in those in it, each with its mode and when it was changed.
func files(dir string) (all []string) {
	_ = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			all = append(all, err.Error())
			return nil
		}
		if info, err := e.Info(); err == nil {
			all = append(all, fmt.Sprint(path, " ", info.Mode(), " ", info.ModTime().Format(time.RFC3339Nano)))
		}
		return nil
	})
	return all
}

// sweep removes the directories whose owner is gone. One without a lock file may be coming into
// being right now and is left alone.
func sweep(parent, prefix string) error {
	dirs, err := filepath.Glob(filepath.Join(parent, prefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR, 0)
		if err != nil {
			continue // no lock yet, or another user's
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			errs = append(errs, os.RemoveAll(dir))
		}
		f.Close()
	}
	return errors.Join(errs...)
}

// lockDir makes the lock file under another name and gives it its own once it is locked, so that
// no sweep finds it free.
func lockDir(dir string) (*os.File, error) {
	tmp := filepath.Join(dir, lockFile+".new")
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", tmp, err)
	}
	if err := os.Rename(tmp, filepath.Join(dir, lockFile)); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

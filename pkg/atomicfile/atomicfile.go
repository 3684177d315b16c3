// Package atomicfile replaces whole files so that a reader, at any moment and after
// a power cut, sees the old content or the new one, complete.
//
// It owns the order of write, fsync, rename and fsync of the folder. It must not
// know what the files contain.
package atomicfile

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// tempMark is in the names of temporary files, which begin with a dot. No
// container runtime reads such a file in its configuration folder.
const tempMark = ".tmp-"

// staleTemp is the age at which a temporary file has no writer any more.
const staleTemp = 10 * time.Minute

// Ensure makes path a regular file with this content and mode, as Write does it. It changes nothing when path is one
// already. Old temporary files of path are removed.
func Ensure(path string, content []byte, mode fs.FileMode) (changed bool, err error) {
	if err := RemoveStale(path, staleTemp); err != nil {
		return false, err
	}
	if info, err := os.Lstat(path); err == nil && info.Mode().IsRegular() && info.Mode().Perm() == mode {
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, content) {
			return false, nil
		}
	}
	err = Write(path, content, mode)
	return err == nil, err
}

// Write replaces path by a file with this content and mode, whatever the umask.
// When it returns nil, the new file survives a power cut; when it returns an
// error, path is as before, or already new. The folder must exist.
func Write(path string, content []byte, mode fs.FileMode) error {
	dir, name := filepath.Split(path)
	tmp, err := os.CreateTemp(dir, "."+name+tempMark+"*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = tmp.Write(content)
	if err = errors.Join(err, tmp.Chmod(mode), tmp.Sync(), tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
		return fmt.Errorf("write %s: %w", path, err)
	}
	return SyncDir(filepath.Dir(path))
}

// Check returns why Write can't make path: its folder takes no file, or path is a folder. It leaves everything as it was.
func Check(path string) error {
	if info, err := os.Lstat(path); err == nil && info.IsDir() {
		return fmt.Errorf("write %s: %w", path, syscall.EISDIR)
	}
	dir, name := filepath.Split(path)
	tmp, err := os.CreateTemp(dir, "."+name+tempMark+"*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return errors.Join(tmp.Close(), os.Remove(tmp.Name()))
}

// SyncDir makes renames and removals in a folder survive a power cut. A file
// system that can't sync folders is taken as it is.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder %s: %w", dir, err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("sync folder %s: %w", dir, err)
	}
	return nil
}

// IsTemp tells whether a file of this name is a temporary file of Write.
func IsTemp(name string) bool {
	return strings.HasPrefix(name, ".") && strings.Contains(name, tempMark)
}

// RemoveStale removes the temporary files that a Write to path left when its
// process was killed. Files younger than age may belong to a living writer and stay.
// Without the folder there are none.
func RemoveStale(path string, age time.Duration) error {
	dir, name := filepath.Split(path)
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove temporary files of %s: %w", path, err)
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "."+name+tempMark) {
			errs = append(errs, RemoveIfStale(dir, e, age))
		}
	}
	return errors.Join(errs...)
}

// RemoveIfStale is RemoveStale for one temporary file of a folder.
func RemoveIfStale(dir string, e fs.DirEntry, age time.Duration) error {
	info, err := e.Info()
	if err != nil || time.Since(info.ModTime()) < age {
		return nil // gone already, or in use
	}
	if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

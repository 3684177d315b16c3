package sqlite

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/coil-net/coil/pkg/store"
)

// Retired is a record that no process has open, nor opens until Close.
type Retired struct {
	path string
	lock *os.File // nil if there was never a record
}

// Retire keeps every process from opening the record; it needn't exist. ErrLocked while one
// has it open.
func Retire(path string) (*Retired, error) {
	f, err := locked(os.Open(path + "-lock")) // unlike lock, it makes no file
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("lock the record %s: %w", path, err)
	}
	return &Retired{path, f}, nil
}

// Close lets others open the record again.
func (r *Retired) Close() error {
	if r.lock == nil {
		return nil
	}
	return r.lock.Close()
}

// List returns the allocations of the record, as Store.List does; none if there is no record.
func (r *Retired) List(ctx context.Context) (all []store.Allocation, err error) {
	if st, err := os.Lstat(r.path); errors.Is(err, fs.ErrNotExist) || err == nil && st.Size() == 0 {
		return nil, nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("list allocations of %s: %w", r.path, classify(err))
		}
	}()
	p, err := connect(r.path, true, 1)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return query(ctx, p, allocation, listSQL)
}

// Remove removes the record and the records that were set aside, and returns the names of the files.
func (r *Retired) Remove() (removed []string, err error) {
	entries, err := os.ReadDir(filepath.Dir(r.path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("remove the record: %w", err)
	}
	var errs []error
	for _, e := range entries {
		rest, ours := strings.CutPrefix(e.Name(), filepath.Base(r.path))
		if !ours || rest != "" && !strings.HasPrefix(rest, "-") && !strings.HasPrefix(rest, ".") {
			continue
		}
		file := filepath.Join(filepath.Dir(r.path), e.Name())
		switch err := os.Remove(file); {
		case err == nil:
			removed = append(removed, file)
		case !errors.Is(err, fs.ErrNotExist):
			errs = append(errs, fmt.Errorf("remove the record: %w", err))
		}
	}
	return removed, errors.Join(errs...)
}

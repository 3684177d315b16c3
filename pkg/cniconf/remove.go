package cniconf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/coil-net/coil/pkg/atomicfile"
)

// ErrNotCoils: the file has the name of Coil's, but no plugin of type coil.
var ErrNotCoils = errors.New("network configuration isn't Coil's")

// Remove removes the configuration, in use and staged, and returns the names of the files that
// were there. A configuration in use that isn't Coil's stays: ErrNotCoils.
func Remove(dir, name string) (removed []string, err error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	live, staged := filepath.Join(dir, name), filepath.Join(dir, name+stagedSuffix)
	var errs []error
	content, err := os.ReadFile(live)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		errs = append(errs, fmt.Errorf("look at the network configuration: %w", err))
	default:
		if _, err := Validate(content); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w: %w", live, ErrNotCoils, err))
			break
		}
		errs = append(errs, remove(live, &removed))
	}
	errs = append(errs, remove(staged, &removed), atomicfile.RemoveStale(live, 0), atomicfile.RemoveStale(staged, 0))
	return removed, errors.Join(errs...)
}

func remove(file string, removed *[]string) error {
	err := os.Remove(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		*removed = append(*removed, file)
	}
	return err
}

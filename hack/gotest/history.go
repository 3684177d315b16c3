package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/coil-net/coil/pkg/atomicfile"
)

// remembered is how many runs of a test the history knows.
const remembered = 20

// The outcomes of a test in a run.
const (
	steady   = '.'
	unsteady = 'u'
	failing  = 'F'
)

// history says how tests ended in their last runs on this machine, of all checkouts.
type history struct {
	// Packages is how often all tests of a package ran, up to remembered: how often a test was steady
	// of which Tests has nothing.
	Packages map[string]int `json:"packages"`
	// Tests has a letter for each run of those that were unsteady of late, the last one last.
	Tests map[string]string `json:"tests"`
}

// historyPath is a file outside of the checkout.
func historyPath() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "coil-gotest", "history.json"), nil
}

// updateHistory adds a run to the file and returns what it has then. The history is right for this
// run also if the file can't be read or written; the error says why.
func updateHistory(path string, add func(*history)) (*history, error) {
	h := &history{}
	err := func() error {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		defer lock.Close()
		if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
			return fmt.Errorf("lock %s: %w", lock.Name(), err)
		}
		readErr := h.read(path)
		h.grow(add)
		content, err := json.MarshalIndent(h, "", " ")
		if err != nil {
			return err
		}
		return errors.Join(readErr, atomicfile.Write(path, append(content, '\n'), 0o644))
	}()
	if h.Tests == nil {
		h.grow(add)
	}
	return h, err
}

// read takes the content of the file. One that doesn't exist is empty, and so is one that can't be
// understood, which the error names.
func (h *history) read(path string) error {
	content, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(content, h)
	}
	if err != nil {
		*h = history{}
		return fmt.Errorf("begun anew: %s: %w", path, err)
	}
	return nil
}

// grow adds a run, and forgets the runs that are too old.
func (h *history) grow(add func(*history)) {
	if h.Packages == nil {
		h.Packages = map[string]int{}
	}
	if h.Tests == nil {
		h.Tests = map[string]string{}
	}
	add(h)
	for name, n := range h.Packages {
		h.Packages[name] = min(n, remembered)
	}
	for name, runs := range h.Tests {
		runs = runs[max(len(runs)-remembered, 0):]
		if h.Tests[name] = runs; !strings.ContainsRune(runs, unsteady) {
			delete(h.Tests, name)
		}
	}
}

// add adds how a test of a package ended.
func (h *history) add(pkg, test string, outcome rune) {
	name := pkg + " " + test
	runs, known := h.Tests[name]
	if !known {
		if outcome != unsteady {
			return
		}
		runs = strings.Repeat(string(steady), min(max(h.Packages[pkg], 0), remembered))
	}
	h.Tests[name] = runs + string(outcome)
}

// rate is how often a test was unsteady, and of how many runs.
func (h *history) rate(pkg, test string) (n, of int) {
	runs := h.Tests[pkg+" "+test]
	return strings.Count(runs, string(unsteady)), len(runs)
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestHistory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "history.json")
	run := func(outcome rune) *history {
		t.Helper()
		h, err := updateHistory(path, func(h *history) {
			h.add("p", "TestX", outcome)
			h.Packages["p"]++
		})
		if err != nil {
			t.Error(err)
		}
		return h
	}
	want := func(h *history, n, of int) {
		t.Helper()
		if gotN, gotOf := h.rate("p", "TestX"); gotN != n || gotOf != of {
			t.Errorf("unsteady in %d of %d runs, want %d of %d", gotN, gotOf, n, of)
		}
	}
	for range 3 {
		want(run(steady), 0, 0)
	}
	want(run(failing), 0, 0) // nobody asks of a test that fails, or is steady
	want(run(unsteady), 1, 5)
	want(run(steady), 1, 6)
	want(run(unsteady), 2, 7)
	want(run(failing), 2, 8)
	for range 12 {
		run(steady)
	}
	h := run(steady)
	want(h, 2, 20)
	for range 20 {
		h = run(steady)
	}
	if len(h.Tests) != 0 || h.Packages["p"] != remembered {
		t.Errorf("%+v after %d steady runs", h, remembered)
	}
	want(run(unsteady), 1, 20)
}

func TestHistoryIsDamaged(t *testing.T) {
	for name, content := range map[string]string{
		"cut": `{"tests": {"p TestX": "u`, "empty": "", "null": "null", "of another kind": `{"tests": [1]}`, "negative": `{"packages": {"p": -3}}`,
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "history.json")
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			for n := range 2 {
				h, err := updateHistory(path, func(h *history) { h.add("p", "TestX", unsteady) })
				if got, _ := h.rate("p", "TestX"); got != n+1 {
					t.Errorf("unsteady in %d runs, want %d", got, n+1)
				}
				if n > 0 && err != nil {
					t.Errorf("the next run: %v", err)
				}
			}
		})
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := updateHistory(filepath.Join(file, "history.json"), func(h *history) { h.add("p", "TestX", unsteady) })
	if n, of := h.rate("p", "TestX"); err == nil || n != 1 || of != 1 {
		t.Errorf("%d of %d, %v; want the run, and an error", n, of, err)
	}
}

func TestHistoryOfRunsAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.json")
	var wg sync.WaitGroup
	for range 15 {
		wg.Go(func() {
			if _, err := updateHistory(path, func(h *history) { h.add("p", "TestX", unsteady) }); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	h, err := updateHistory(path, func(*history) {})
	if got := h.Tests["p TestX"]; err != nil || got != strings.Repeat("u", 15) {
		t.Errorf("%q, %v; want each of 15 runs", got, err)
	}
}

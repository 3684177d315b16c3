package observe

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
)

// errStarting is why a program isn't ready before it says anything.
var errStarting = errors.New("starting")

// Health is the content of /healthz and /readyz. A program is ready when each of its
// named conditions holds. The zero Health is not usable.
type Health struct {
	mu      sync.Mutex
	reasons map[string]error // by condition; nil for one that holds
	started chan struct{}    // closed when Set was called for each condition
}

// NewHealth returns a Health whose conditions don't hold yet.
func NewHealth(conditions ...string) *Health {
	h := &Health{reasons: map[string]error{}, started: make(chan struct{})}
	for _, c := range conditions {
		h.reasons[c] = errStarting
	}
	return h
}

// Set says that a condition holds, with a nil reason, or why it doesn't.
func (h *Health) Set(condition string, reason error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	was := h.reasons[condition]
	h.reasons[condition] = reason
	starting := func(reason error) bool { return reason == errStarting }
	if starting(was) && !slices.ContainsFunc(slices.Collect(maps.Values(h.reasons)), starting) {
		close(h.started)
	}
}

// Started is closed when something was said about each condition. Until then the program is busy with its start.
func (h *Health) Started() <-chan struct{} { return h.started }

// Ready is nil when every condition holds, else it names those that don't and why.
func (h *Health) Ready() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, c := range slices.Sorted(maps.Keys(h.reasons)) {
		if err := h.reasons[c]; err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", c, err))
		}
	}
	return errors.Join(errs...)
}

func (h *Health) serveLive(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }

func (h *Health) serveReady(w http.ResponseWriter, _ *http.Request) {
	if err := h.Ready(); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

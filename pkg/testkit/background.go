package testkit

import (
	"context"
	"sync"
	"testing"
)

// Background has run work beside the test until the returned function is called, at the latest when the test ends. That ends the context of run, and waits for it.
// The test fails if run returns an error.
func Background(ctx context.Context, tb testing.TB, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		tb.Helper()
		cancel()
		if err := <-ended; err != nil {
			tb.Errorf("what ran in the background ended with: %v", err)
		}
	})
	tb.Cleanup(stop)
	return stop
}

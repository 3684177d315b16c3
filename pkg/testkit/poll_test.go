package testkit

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// A condition that takes long to look gets half of the time, and not nearly all of it.
func TestPollLeavesTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 1950*time.Millisecond)
		defer cancel()
		calls := 0
		err := Poll(ctx, time.Millisecond, func() error {
			calls++
			time.Sleep(100 * time.Millisecond)
			return errors.ErrUnsupported
		})
		if !errors.Is(err, errors.ErrUnsupported) || !errors.Is(err, context.DeadlineExceeded) || calls != 10 {
			t.Errorf("%d calls, want 10: %v", calls, err)
		}
	})
}

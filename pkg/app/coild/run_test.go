package coild

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// An API server may be away for hours; coild waits for it rather than to end.
func TestUntilDoneNeverGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		tries := 0
		err := untilDone(t.Context(), func(context.Context) (bool, error) {
			tries++
			return time.Since(start) > time.Hour, nil
		})
		if took := time.Since(start); err != nil || took > time.Hour+15*time.Second || tries < 300 {
			t.Errorf("%d tries in %s: %v", tries, took, err)
		}
	})
}

func TestUntilDoneEnds(t *testing.T) {
	failed := errors.New("failed")
	if err := untilDone(t.Context(), func(context.Context) (bool, error) { return false, failed }); !errors.Is(err, failed) {
		t.Errorf("error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := untilDone(ctx, func(context.Context) (bool, error) { cancel(); return false, nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v after the context ended", err)
	}
}

package heal

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestRunRepeatsWhateverComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		runs := 0
		done := make(chan error, 1)
		go func() {
			done <- Run(ctx, Task{Name: "test", Every: time.Minute, Run: func(context.Context) error {
				runs++
				return errors.New("not this time")
			}})
		}()
		time.Sleep(time.Hour)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		// With up to a tenth more than a minute between two.
		if runs < 54 || runs > 60 {
			t.Errorf("%d runs in an hour, want 54 to 60", runs)
		}
	})
}

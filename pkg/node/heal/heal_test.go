package heal

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coil-net/coil/pkg/testkit"
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
		if runs < 59 || runs > 60 {
			t.Errorf("%d runs in an hour, want 59 or 60", runs)
		}
	})
}

// Tasks that run as often as another, or half as often, run when it does.
func TestRunTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex
		at := map[time.Time]int{}
		var wg sync.WaitGroup
		for _, every := range []time.Duration{2, 2, 4, 4} {
			time.Sleep(300 * time.Millisecond)
			wg.Go(func() {
				_ = Run(ctx, Task{Name: "test", Every: every * time.Second, Run: func(context.Context) error {
					mu.Lock()
					defer mu.Unlock()
					at[time.Now()]++
					return nil
				}})
			})
		}
		time.Sleep(time.Minute)
		cancel()
		wg.Wait()
		if len(at) < 28 || len(at) > 31 {
			t.Errorf("the process woke up %d times in a minute, want about 30", len(at))
		}
	})
}

// What was lost before the first run waits no longer than what is lost later.
func TestFirstRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 20 {
			time.Sleep(1700 * time.Millisecond)
			ctx, cancel := context.WithCancel(t.Context())
			began := time.Now()
			var took time.Duration
			testkit.Check(t, Run(ctx, Task{Name: "test", Every: 4 * time.Second, Run: func(context.Context) error {
				took = time.Since(began)
				cancel()
				return nil
			}}))
			if took > 4*time.Second {
				t.Errorf("the first run was after %s", took)
			}
		}
	})
}

func TestPause(t *testing.T) {
	for range 1000 {
		if d := pause(time.Second); d < time.Second/2 || d >= 3*time.Second/2 {
			t.Fatalf("a second's task waits %s", d)
		}
	}
}

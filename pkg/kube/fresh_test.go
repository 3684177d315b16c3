package kube

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Who asks gets what was read after that. A read takes a second, and each one finds another number.
func TestFresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reads := map[string]int{}
		var mu sync.Mutex
		f := &Fresh[int]{Read: func(_ context.Context, name string) (*int, error) {
			mu.Lock()
			reads[name]++
			n := reads[name]
			mu.Unlock()
			time.Sleep(time.Second)
			if name == "bad" {
				return nil, errors.New("no")
			}
			return &n, nil
		}}
		var all sync.WaitGroup
		ask := func(after time.Duration, name string, want int) {
			all.Go(func() {
				time.Sleep(after)
				got, err := f.Get(t.Context(), name)
				switch {
				case name == "bad" && err == nil, name != "bad" && err != nil:
					t.Errorf("%s after %s: error is %v", name, after, err)
				case err == nil && *got != want:
					t.Errorf("%s after %s: read %d, want %d", name, after, *got, want)
				}
			})
		}
		ask(0, "a", 1)
		for range 8 {
			ask(100*time.Millisecond, "a", 2)
			ask(900*time.Millisecond, "a", 2)
		}
		ask(100*time.Millisecond, "b", 1)
		ask(1500*time.Millisecond, "a", 3)
		ask(10*time.Second, "a", 4)
		ask(0, "bad", 0)
		ask(0, "bad", 0)
		all.Wait()
		if reads["a"] != 4 || reads["b"] != 1 || reads["bad"] > 2 {
			t.Errorf("reads are %v, want 4 of a, 1 of b, and 2 of bad at most", reads)
		}
		synctest.Wait()
		if len(f.next) > 0 {
			t.Errorf("%d are left", len(f.next))
		}
	})
}

// Who doesn't want it any more doesn't wait.
func TestFreshCanceled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end := make(chan struct{})
		f := &Fresh[int]{Read: func(context.Context, string) (*int, error) { <-end; return new(int), nil }}
		defer synctest.Wait()
		defer close(end)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := f.Get(ctx, "a"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error is %v", err)
		}
	})
}

package egress

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// works lets so many works of a namespace begin, which last until ctx ends, and returns how many have begun.
func (t *turns) works(ctx context.Context, namespace string, n int) int {
	for range n {
		go func() {
			_ = t.do(ctx, namespace, func() error {
				<-ctx.Done()
				return nil
			})
		}()
	}
	synctest.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.of[namespace]
}

func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turns := newTurns(8)
		ctx, cancel := context.WithCancel(t.Context())
		first, endFirst := context.WithCancel(ctx)
		turns.works(first, "ns0", 1)
		for i, want := range []int{4, 2, 1, 1, 0} {
			if got := turns.works(ctx, fmt.Sprint("ns", i), 20); got != want {
				t.Errorf("%d works of namespace %d go on, want %d", got, i, want)
			}
		}
		// A work that doesn't wait any longer has no turn.
		impatient, end := context.WithTimeout(t.Context(), time.Second)
		defer end()
		if err := turns.do(impatient, "impatient", func() error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("begun with %v", err)
		}
		// The next turn is of a namespace that has none.
		endFirst()
		synctest.Wait()
		turns.mu.Lock()
		if turns.of["ns4"] != 1 {
			t.Errorf("after a work has ended, %v go on", turns.of)
		}
		turns.mu.Unlock()
		cancel()
		synctest.Wait()
		turns.mu.Lock()
		defer turns.mu.Unlock()
		if len(turns.waiting)+len(turns.of)+turns.working > 0 {
			t.Errorf("in the end %d work, %v, and %v wait", turns.working, turns.of, turns.waiting)
		}
	})
}

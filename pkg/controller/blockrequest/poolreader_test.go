package blockrequest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestPoolReader(t *testing.T) {
	const takes = 10 * time.Millisecond
	setup := func() (*poolReader, *int) {
		reads := 0
		var mu sync.Mutex
		return newPoolReader(time.Now, func(ctx context.Context, _ string) (*v2.AddressPool, error) {
			mu.Lock()
			reads++
			mu.Unlock()
			select {
			case <-time.After(takes):
				return &v2.AddressPool{}, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}), &reads
	}
	t.Run("requests known before share a read", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r, reads := setup()
			since := time.Now()
			var wg sync.WaitGroup
			for range 100 {
				wg.Go(func() {
					if _, err := r.read(t.Context(), "p", since); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if *reads != 1 {
				t.Errorf("%d reads", *reads)
			}
		})
	})
	t.Run("a request seen after a read began needs another", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r, reads := setup()
			var wg sync.WaitGroup
			for range 3 {
				since := time.Now()
				wg.Go(func() {
					if _, err := r.read(t.Context(), "p", since); err != nil {
						t.Error(err)
					}
				})
				time.Sleep(takes / 5)
			}
			wg.Wait()
			if *reads != 3 {
				t.Errorf("%d reads, want 3", *reads)
			}
		})
	})
	t.Run("a read is not used for long", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r, reads := setup()
			since := time.Now()
			for range 3 {
				if _, err := r.read(t.Context(), "p", since); err != nil {
					t.Fatal(err)
				}
				time.Sleep(maxReadAge)
			}
			if *reads != 3 {
				t.Errorf("%d reads, want 3", *reads)
			}
		})
	})
	t.Run("who waits doesn't suffer from another's end", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r, reads := setup()
			since := time.Now()
			ctx, cancel := context.WithCancel(t.Context())
			first := make(chan error)
			go func() { _, err := r.read(ctx, "p", since); first <- err }()
			synctest.Wait()
			second := make(chan error)
			go func() { _, err := r.read(t.Context(), "p", since); second <- err }()
			synctest.Wait()
			cancel()
			if err := <-first; !errors.Is(err, context.Canceled) {
				t.Errorf("the first got %v", err)
			}
			if err := <-second; err != nil || *reads != 2 {
				t.Errorf("the second got %v after %d reads, want an answer of its own", err, *reads)
			}
		})
	})
}

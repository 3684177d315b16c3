package reconcile

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/pkg/testkit"
)

func start(t *testing.T, l *Loop[string]) (stop func()) {
	return testkit.Background(t.Context(), t, func(ctx context.Context) error { return l.Run(ctx, 2) })
}

func TestLoopRetriesForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int32
		l := New("test", func(context.Context, string) error {
			if calls.Add(1) <= 40 {
				return errors.New("not yet")
			}
			return nil
		}, nil)
		stop := start(t, l)
		l.Add("key")
		time.Sleep(time.Hour)
		stop()
		if got := calls.Load(); got != 41 {
			t.Errorf("sync was called %d times in an hour, want 41: 40 failures, one success", got)
		}
	})
}

// As many keys are synced at once as there may be workers, and an idle loop has none.
func TestLoopHasWorkersWhileTheyWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const workers = 1000
		var working, most atomic.Int32
		l := New("test", func(context.Context, int) error {
			most.Store(max(most.Load(), working.Add(1)))
			time.Sleep(time.Second)
			working.Add(-1)
			return nil
		}, nil)
		before := runtime.NumGoroutine()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- l.Run(ctx, workers) }()
		idle := func(when string) {
			t.Helper()
			synctest.Wait()
			more := func() int { return runtime.NumGoroutine() - before }
			// A goroutine that has left the bubble counts until the runtime has destroyed it.
			for tries := 0; more() > 10 && tries < 100_000; tries++ {
				runtime.Gosched()
			}
			if n := more(); n > 10 {
				t.Errorf("%s the loop has %d goroutines", when, n)
			}
		}
		idle("at first")
		for key := range 2 * workers {
			l.Add(key)
		}
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		if n := working.Load(); n != workers || most.Load() != workers {
			t.Errorf("%d keys are synced at once, %d at most; want %d", n, most.Load(), workers)
		}
		time.Sleep(time.Second)
		idle("when all is done")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestLoopErrors(t *testing.T) {
	tests := []struct {
		name   string
		err    error
		want   int32 // calls within 10 s
		counts string
	}{
		{"success is forgotten", nil, 1, "success"},
		{"later comes again after its time", Later(4 * time.Second), 3, "success"},
		{"a retry as well, and is told", Retry(errors.New("no"), 4*time.Second), 3, "error"},
		{"a retry of nothing", Retry(nil, 4*time.Second), 3, "success"},
		// 0, 0.05, 0.15, 0.35, 0.75, 1.55, 3.15, 6.35
		{"failure backs off", errors.New("no"), 8, "error"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var calls atomic.Int32
				l := New("test", func(context.Context, string) error { calls.Add(1); return tt.err }, nil)
				stop := start(t, l)
				l.Add("key")
				time.Sleep(10 * time.Second)
				stop()
				if got := calls.Load(); got != tt.want {
					t.Errorf("sync was called %d times, want %d", got, tt.want)
				}
				if got := testutil.ToFloat64(l.metrics.total.WithLabelValues("test", tt.counts)); got != float64(tt.want) {
					t.Errorf("%v syncs count as %s, want %d", got, tt.counts, tt.want)
				}
			})
		})
	}
}

func TestLoopSurvivesPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var good atomic.Int32
		l := New("test", func(_ context.Context, key string) error {
			if key == "bad" {
				panic("a fault of sync")
			}
			good.Add(1)
			return nil
		}, nil)
		stop := start(t, l)
		l.Add("bad")
		l.Add("good")
		time.Sleep(time.Second)
		stop()
		if good.Load() != 1 {
			t.Error("a panic for one key kept another from being synced")
		}
	})
}

func TestLoopNeverSyncsAKeyTwiceAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var running, most, calls atomic.Int32
		l := New("test", func(context.Context, string) error {
			most.Store(max(most.Load(), running.Add(1)))
			calls.Add(1)
			time.Sleep(time.Second)
			running.Add(-1)
			return nil
		}, nil)
		stop := start(t, l)
		for range 10 {
			l.Add("key")
			time.Sleep(300 * time.Millisecond)
		}
		time.Sleep(5 * time.Second)
		stop()
		if most.Load() != 1 || calls.Load() < 2 {
			t.Errorf("%d syncs of one key at once, %d in all; want 1 at once and at least 2", most.Load(), calls.Load())
		}
	})
}

func TestHandler(t *testing.T) {
	var got []string
	h := Handler(func(n *metav1.PartialObjectMetadata) { got = append(got, n.Name) })
	object := func(name, version string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version}}
	}
	h.OnAdd(object("added", "1"), true)
	h.OnUpdate(object("changed", "1"), object("changed", "2"))
	h.OnUpdate(object("resynced", "1"), object("resynced", "1"))
	h.OnDelete(object("deleted", "1"))
	h.OnDelete(cache.DeletedFinalStateUnknown{Key: "missed", Obj: object("missed", "1")})
	h.OnDelete("something else")
	if want := []string{"added", "changed", "deleted", "missed"}; !slices.Equal(got, want) {
		t.Errorf("passed on %v, want %v", got, want)
	}
}

func TestChanges(t *testing.T) {
	var got []string
	h := Changes(func(before, after *metav1.PartialObjectMetadata) {
		if before == nil {
			before = &metav1.PartialObjectMetadata{}
		}
		if after == nil {
			after = &metav1.PartialObjectMetadata{}
		}
		got = append(got, before.Name+">"+after.Name)
	})
	object := func(name string) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	h.OnAdd(object("added"), true)
	h.OnUpdate(object("a"), object("a"))
	h.OnDelete(object("deleted"))
	h.OnDelete(cache.DeletedFinalStateUnknown{Key: "missed", Obj: object("missed")})
	h.OnDelete("something else")
	if want := []string{">added", "a>a", "deleted>", "missed>"}; !slices.Equal(got, want) {
		t.Errorf("passed on %v, want %v", got, want)
	}
}

func TestChangeHandler(t *testing.T) {
	var got []string
	h := ChangeHandler(func(n *metav1.PartialObjectMetadata) { got = append(got, n.Name) },
		func(old, now *metav1.PartialObjectMetadata) bool { return old.Generation == now.Generation })
	object := func(name, version string, generation int64, uid types.UID) *metav1.PartialObjectMetadata {
		return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version, Generation: generation, UID: uid}}
	}
	h.OnUpdate(object("the same", "1", 1, "a"), object("the same", "2", 1, "a"))
	h.OnUpdate(object("other", "2", 1, "a"), object("other", "3", 2, "a"))
	h.OnUpdate(object("made again", "3", 1, "a"), object("made again", "4", 1, "b"))
	if want := []string{"other", "made again"}; !slices.Equal(got, want) {
		t.Errorf("passed on %v, want %v", got, want)
	}
}

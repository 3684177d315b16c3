package blocks

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

var errRefused = errors.New("no block for this node")

// A pool was deleted by force while pods had addresses of its block 0, and made again with another
// subnet. The node goes on with other blocks until these pods have ended.
func TestDisputedBlock(t *testing.T) {
	before := store.Block{Name: "default-0", Pool: "default", Block: ipam.Block{IPv4: netip.MustParsePrefix("10.99.0.0/27")}}
	b := runAged(t, time.Minute, nil)
	b.record.set(store.Usage{Block: before, Allocated: 1})
	if _, err := b.client.CoilV2().AddressBlocks().Create(t.Context(), newBlock("default", 0), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 1)
	generation := b.Generation("default")
	go func() { told <- b.Ask(t.Context(), "default", generation) }()
	testkit.Eventually(t, 5*time.Second, "the node asks for another block, and gets one", func() error {
		if b.answer(t, 1, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if err := <-told; err != nil {
		t.Errorf("Ask: %v", err)
	}
	if got := b.exporter.exported(); got != "default-0 default-1" {
		t.Errorf("exported %q, want each once", got)
	}
	if w := b.warned(); len(w) != 1 || !strings.HasPrefix(w[0], "BlockDisputed: ") || !strings.Contains(w[0], "10.99.0.0/27") {
		t.Errorf("warnings: %q, want one that names the range in use", w)
	}
	generation = b.Generation("default")
	b.record.set(store.Usage{Block: before})
	b.Changed("default")
	testkit.Eventually(t, 5*time.Second, "default-0 is told of when the pods have ended", func() error {
		if b.Generation("default") == generation {
			return errors.New("no news")
		}
		return nil
	})
	testkit.Eventually(t, 5*time.Second, "the former range is withdrawn", func() error {
		if err := b.Export(t.Context()); err != nil {
			return err
		}
		if got := b.exporter.exported(); got != "default-0 default-1" {
			return fmt.Errorf("exported %q", got)
		}
		return nil
	})
}

// The block that answered a request went to another node, or to another request, before this node
// saw it.
func TestAnswerThatIsAnothers(t *testing.T) {
	other := newBlock("default", 0)
	other.Labels[v2.LabelNode] = "other"
	r := &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{Name: requestName("node", nodeUID, "default", 0), UID: "early", Labels: map[string]string{v2.LabelNode: "node"}},
		Spec:       v2.BlockRequestSpec{NodeName: "node", PoolName: "default"},
		Status: v2.BlockRequestStatus{AddressBlockName: other.Name, Conditions: []v2.BlockRequestCondition{
			{Type: v2.BlockRequestComplete, Status: corev1.ConditionTrue, Reason: "Complete"},
		}},
	}
	b := runAged(t, time.Minute, nil, other, r)
	told := make(chan error, 1)
	go func() { told <- b.Ask(t.Context(), "default", b.Generation("default")) }()
	testkit.Eventually(t, 5*time.Second, "the node asks again, and gets a block", func() error {
		if b.answer(t, 1, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if err := <-told; err != nil {
		t.Errorf("Ask: %v", err)
	}
	if got := b.Usable("default"); !slices.Equal(got, []string{"default-1"}) {
		t.Errorf("usable: %v", got)
	}
}

// A pool that refuses is asked ahead of need less and less often, until there is a block.
func TestPauseOfRefusedPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaiters()
		if _, pause := w.state("default"); pause != 0 {
			t.Errorf("a pause of %s without a refusal", pause)
		}
		for i, want := range []time.Duration{30 * time.Second, time.Minute, 2 * time.Minute, 4 * time.Minute, 8 * time.Minute, 15 * time.Minute, 15 * time.Minute} {
			w.tell("default", errRefused)
			_, pause := w.state("default")
			if pause < want || pause > want+want/4 {
				t.Errorf("refusal %d: a pause of %s, want %s and up to a quarter more", i, pause, want)
			}
			time.Sleep(pause)
			if _, pause := w.state("default"); pause != 0 {
				t.Errorf("refusal %d: the pause doesn't end: %s", i, pause)
			}
		}
		w.tell("default", errRefused)
		w.tell("default", nil)
		if _, pause := w.state("default"); pause != 0 {
			t.Errorf("a pause of %s after a block came", pause)
		}
		w.tell("default", errRefused)
		if _, pause := w.state("default"); pause > 38*time.Second {
			t.Errorf("a pause of %s at the first refusal since a block came", pause)
		}
	})
}

// A pool that has refused is looked at before it is asked ahead of need again, and asked only if it may
// give a block: all nodes of a cluster ask an exhausted pool, and each refusal is four writes.
func TestExhaustedPoolIsLookedAt(t *testing.T) {
	suspended, exhausted := metav1.Condition{Type: v2.PoolSuspended, Status: metav1.ConditionTrue}, metav1.Condition{Type: v2.PoolExhausted, Status: metav1.ConditionTrue}
	available := metav1.Condition{Type: v2.PoolExhausted, Status: metav1.ConditionFalse}
	pool := func(generation, observed int64, conditions ...metav1.Condition) *v2.AddressPool {
		return &v2.AddressPool{
			ObjectMeta: metav1.ObjectMeta{Name: "default", Generation: generation},
			Status:     v2.AddressPoolStatus{ObservedGeneration: observed, Conditions: conditions},
		}
	}
	draining := pool(2, 1, available)
	draining.Spec.Drain = true
	deleting := pool(1, 1, available)
	deleting.DeletionTimestamp, deleting.Finalizers = &nodeCreated, []string{v2.Finalizer}
	for _, tt := range []struct {
		name   string
		pool   *v2.AddressPool // nil: it is gone
		broken error           // of reading it
		asks   bool
	}{
		{name: "exhausted", pool: pool(1, 1, exhausted)},
		{name: "suspended", pool: pool(1, 1, available, suspended)},
		{name: "deleting", pool: deleting},
		{name: "draining", pool: draining},
		{name: "gone"},
		{name: "it has blocks", pool: pool(1, 1, available), asks: true},
		{name: "a subnet was appended just now", pool: pool(2, 1, exhausted), asks: true},
		{name: "no status yet", pool: pool(1, 0), asks: true},
		{name: "it can't be read", pool: pool(1, 1, exhausted), broken: errors.New("forbidden"), asks: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := runAged(t, 24*time.Hour, map[string]int{"default-0": 30}, newBlock("default", 0))
				if tt.pool != nil {
					if err := b.client.Tracker().Add(tt.pool); err != nil {
						t.Fatal(err)
					}
				}
				if tt.broken != nil {
					b.unreadable.Store(&tt.broken)
				}
				began := time.Now()
				for time.Since(began) < time.Hour {
					time.Sleep(time.Second)
					synctest.Wait()
					b.answer(t, 0, v2.ReasonPoolExhausted)
				}
				// With pauses of 30 s, doubled up to 15 min, and up to a quarter more: 6 to 8 turns in an hour.
				if n := b.creates(); !tt.asks && n != 1 || tt.asks && (n < 6 || n > 9) {
					t.Errorf("asked %d times in an hour, want again: %t", n, tt.asks)
				}
				if looks := b.count("get", "addresspools"); looks < 5 || looks > 8 {
					t.Errorf("looked %d times in an hour", looks)
				}
			})
		})
	}
}

// A caller that waits is in no pause.
func TestWaiterAsksRefusedPool(t *testing.T) {
	b := runAged(t, time.Minute, map[string]int{"default-0": 30}, newBlock("default", 0))
	testkit.Eventually(t, 5*time.Second, "the node asks ahead, and is refused", func() error {
		if b.answer(t, 0, v2.ReasonPoolExhausted) == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	testkit.Eventually(t, 5*time.Second, "the refusal is known", func() error {
		if _, pause := b.news.state("default"); pause == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	b.record.allocate("default-0", 32)
	b.Changed("default")
	told := make(chan error, 1)
	go func() { told <- b.Ask(t.Context(), "default", b.Generation("default")) }()
	testkit.Eventually(t, 5*time.Second, "the node asks for who waits", func() error {
		if b.answer(t, 1, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if err := <-told; err != nil {
		t.Errorf("Ask: %v", err)
	}
}

// The names of pools come from annotations of namespaces: nothing is left of those that don't exist.
func TestRefusedPoolsAreForgotten(t *testing.T) {
	b := runAged(t, time.Minute, nil)
	for i := range 5 {
		pool := fmt.Sprint("none-", i)
		told := make(chan error, 2)
		for range cap(told) {
			go func() { told <- b.Ask(t.Context(), pool, b.Generation(pool)) }()
		}
		testkit.Eventually(t, 5*time.Second, "the request is refused", func() error {
			if waiting, _ := b.news.state(pool); waiting < cap(told) {
				return fmt.Errorf("%d wait", waiting)
			}
			if b.answer(t, 0, v2.ReasonPoolNotFound) == 0 {
				return errors.New("no open request")
			}
			return nil
		})
		for range cap(told) {
			if err := <-told; err == nil {
				t.Errorf("pool %s wasn't refused", pool)
			}
		}
	}
	testkit.Eventually(t, 5*time.Second, "nothing is remembered of them", func() error {
		b.news.mu.Lock()
		defer b.news.mu.Unlock()
		if n := len(b.news.pools) + len(b.asked.sequence.Copy()) + len(b.asked.latest.Copy()); n > 0 {
			return fmt.Errorf("%d things", n)
		}
		return nil
	})
}

// A caller that was told doesn't count as waiting, even before it goes on: nothing more is asked for it.
func TestWhoWasToldDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaiters()
		done := make(chan error, 2)
		since := w.generation("default")
		for _, ctx := range []context.Context{t.Context(), canceledAfter(t, time.Second)} {
			go func() { done <- w.wait(ctx, "default", since, func() {}) }()
		}
		synctest.Wait()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if err := <-done; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("wait: %v, want the deadline", err)
		}
		if n, _ := w.state("default"); n != 1 {
			t.Errorf("%d wait, want the one that isn't told yet", n)
		}
		n := w.pools["default"]
		w.tell("default", errRefused)
		if n.waiting != 0 {
			t.Errorf("%d wait after all were told", n.waiting)
		}
		synctest.Wait()
		if err := <-done; err == nil || n.waiting != 0 {
			t.Errorf("wait: %v, want the refusal; %d wait", err, n.waiting)
		}
	})
}

func canceledAfter(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A generation from before a pool was forgotten is never one of later.
func TestForgottenPoolHasNews(t *testing.T) {
	w := newWaiters()
	before := w.generation("default")
	w.tell("default", nil)
	if !w.forget("default") {
		t.Fatal("the pool wasn't forgotten though nobody waits")
	}
	if err := w.wait(t.Context(), "default", before, func() { t.Error("it waits") }); err != nil {
		t.Errorf("wait: %v, want the news", err)
	}
}

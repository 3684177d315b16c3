package blocks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

func TestManyWaitersAskOnce(t *testing.T) {
	const waiting = 32 // as many as a block has
	b := runAged(t, time.Minute, nil)
	errs := make(chan error, waiting)
	generation := b.Generation("default")
	for range waiting {
		go func() { errs <- b.Ask(t.Context(), "default", generation) }()
	}
	testkit.Eventually(t, 5*time.Second, "the request is answered", func() error {
		if b.answer(t, 0, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	for range waiting {
		if err := <-errs; err != nil {
			t.Errorf("Ask: %v", err)
		}
	}
	if got := b.creates(); got != 1 {
		t.Errorf("%d BlockRequests were created for %d waiters of one block, want 1", got, waiting)
	}
	if got := b.Usable("default"); !slices.Equal(got, []string{"default-0"}) {
		t.Errorf("usable blocks: %v", got)
	}
	if got := b.exporter.exported(); got != "default-0" {
		t.Errorf("exported %q when the waiters were told, want default-0", got)
	}
	testkit.Eventually(t, 5*time.Second, "the answered request is deleted", func() error {
		if rs := b.requests(t); len(rs) > 0 {
			return fmt.Errorf("%d requests left", len(rs))
		}
		return nil
	})
}

// A caller that finds no address in the block that came waits for the next one.
func TestMoreWaitersThanABlockHas(t *testing.T) {
	const waiting = 33 // one more than a block has
	b := run(t)
	errs := make(chan error, waiting)
	var mu sync.Mutex
	take := func() bool {
		mu.Lock()
		defer mu.Unlock()
		usage, err := b.record.Usage(t.Context())
		i := slices.IndexFunc(usage, func(u store.Usage) bool { return u.Allocated < u.Size() })
		if err != nil || i < 0 {
			return false
		}
		b.record.allocate(usage[i].Name, usage[i].Allocated+1)
		b.Changed("default")
		return true
	}
	for range waiting {
		go func() {
			for {
				generation := b.Generation("default")
				if take() {
					errs <- nil
					return
				}
				if err := b.Ask(t.Context(), "default", generation); err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	for n := range int32(2) {
		testkit.Eventually(t, 5*time.Second, "a request is answered", func() error {
			if b.answer(t, n, "") == 0 {
				return errors.New("no open request")
			}
			return nil
		})
	}
	for range waiting {
		if err := <-errs; err != nil {
			t.Errorf("Ask: %v", err)
		}
	}
	if got := b.creates(); got != 2 {
		t.Errorf("%d BlockRequests were created for %d waiters, want 2", got, waiting)
	}
}

func TestRequestSaysWhoAsks(t *testing.T) {
	b := run(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go b.Ask(ctx, "default", b.Generation("default"))
	testkit.Eventually(t, 5*time.Second, "a request is made", func() error {
		if len(b.requests(t)) == 0 {
			return errors.New("none")
		}
		return nil
	})
	r := b.requests(t)[0]
	if r.Spec != (v2.BlockRequestSpec{NodeName: "node", PoolName: "default"}) || r.Labels[v2.LabelNode] != "node" {
		t.Errorf("spec %+v, labels %v", r.Spec, r.Labels)
	}
	if len(r.OwnerReferences) != 1 || r.OwnerReferences[0].UID != nodeUID || r.OwnerReferences[0].Kind != "Node" {
		t.Errorf("owner %+v, want the Node", r.OwnerReferences)
	}
}

// The block arrives after the look for an address and before the wait.
func TestNewsBeforeTheWaitIsNotLost(t *testing.T) {
	b := run(t)
	generation := b.Generation("default")
	if _, err := b.client.CoilV2().AddressBlocks().Create(t.Context(), newBlock("default", 3), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 5*time.Second, "there is news", func() error {
		if b.Generation("default") == generation {
			return errors.New("no news")
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(time.Second))
	defer cancel()
	if err := b.Ask(ctx, "default", generation); err != nil {
		t.Errorf("Ask: %v", err)
	}
	if b.creates() != 0 {
		t.Error("a request was made though a block had come")
	}
}

func TestRefusal(t *testing.T) {
	b := run(t)
	err := make(chan error, 1)
	go func() { err <- b.Ask(t.Context(), "none", b.Generation("none")) }()
	testkit.Eventually(t, 5*time.Second, "the request is refused", func() error {
		if b.answer(t, 0, v2.ReasonPoolNotFound) == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	got := <-err
	if got == nil || got.Error() != "no AddressPool none" {
		t.Errorf("Ask: %v, want a refusal that names the pool", got)
	}
	// The next pod asks anew: the pool may exist by then.
	go func() { err <- b.Ask(t.Context(), "none", b.Generation("none")) }()
	testkit.Eventually(t, 5*time.Second, "the second request is answered", func() error {
		if b.answer(t, 7, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if got := <-err; got != nil {
		t.Errorf("second Ask: %v", got)
	}
}

func TestAskEndsWithItsContext(t *testing.T) {
	b := run(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := b.Ask(ctx, "default", b.Generation("default")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Ask: %v, want the deadline", err)
	}
}

// A request of an earlier run that is still open is waited for, not repeated.
func TestOpenRequestOfEarlierRun(t *testing.T) {
	r := &v2.BlockRequest{
		ObjectMeta: metav1.ObjectMeta{Name: requestName("node", nodeUID, "default", 0), UID: "early", Labels: map[string]string{v2.LabelNode: "node"}},
		Spec:       v2.BlockRequestSpec{NodeName: "node", PoolName: "default"},
	}
	b := run(t, r)
	err := make(chan error, 1)
	go func() { err <- b.Ask(t.Context(), "default", b.Generation("default")) }()
	testkit.Eventually(t, 5*time.Second, "the early request is answered", func() error {
		if waiting, _ := b.news.state("default"); waiting == 0 {
			return errors.New("nobody waits yet")
		}
		if b.answer(t, 0, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if e := <-err; e != nil {
		t.Fatal(e)
	}
	if b.creates() != 0 {
		t.Error("a second request was made for the same need")
	}
}

// The answer to a create is lost: the next try must find the request, not make another.
func TestLostAnswerOfCreate(t *testing.T) {
	b := run(t)
	var once sync.Once
	b.client.PrependReactor("create", "blockrequests", func(a clienttesting.Action) (bool, runtime.Object, error) {
		lost := false
		once.Do(func() {
			r := a.(clienttesting.CreateAction).GetObject().(*v2.BlockRequest).DeepCopy()
			r.UID = "lost"
			if err := b.client.Tracker().Add(r); err != nil {
				t.Error(err)
			}
			lost = true
		})
		return lost, nil, apierrors.NewServerTimeout(v2.Resource("blockrequests"), "create", 1)
	})
	err := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(30*time.Second))
	defer cancel()
	go func() { err <- b.Ask(ctx, "default", b.Generation("default")) }()
	testkit.Eventually(t, 5*time.Second, "a request is answered", func() error {
		if b.answer(t, 0, "") == 0 {
			return errors.New("no open request")
		}
		return nil
	})
	if e := <-err; e != nil {
		t.Fatal(e)
	}
	l, e := b.client.CoilV2().AddressBlocks().List(t.Context(), metav1.ListOptions{})
	if e != nil || len(l.Items) != 1 {
		t.Errorf("%d blocks for one need, %v", len(l.Items), e)
	}
}

func TestReservedAndDeletingBlocksGiveNothing(t *testing.T) {
	reservedBlock, deletingBlock := newBlock("default", 0), newBlock("default", 1)
	reservedBlock.Labels[v2.LabelReserved] = v2.ReservedValue
	now := metav1.Now()
	deletingBlock.DeletionTimestamp = &now
	b := runWith(t, map[string]int{"default-1": 1}, reservedBlock, deletingBlock)
	if got := b.Usable("default"); len(got) != 0 {
		t.Errorf("usable: %v, want none", got)
	}
	testkit.Eventually(t, 5*time.Second, "both are exported", func() error {
		if got := b.exporter.exported(); got != "default-0 default-1" {
			return fmt.Errorf("exported: %s", got)
		}
		return nil
	})
}

func TestUsageIsReported(t *testing.T) {
	b := runWith(t, map[string]int{"default-0": 5}, newBlock("default", 0))
	testkit.Eventually(t, 10*time.Second, "usage is in the status", func() error {
		b.Changed("default")
		blk, err := b.client.CoilV2().AddressBlocks().Get(t.Context(), "default-0", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if blk.Status.Allocated != 5 {
			return fmt.Errorf("allocated: %d", blk.Status.Allocated)
		}
		return nil
	})
}

func TestWithdraw(t *testing.T) {
	b := runWith(t, map[string]int{"default-0": 1}, newBlock("default", 0))
	if err := b.Withdraw(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	b.Changed("default")
	if got := b.exporter.exported(); got != "" {
		t.Errorf("exported %q while the Node is gone", got)
	}
	if err := b.Withdraw(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if got := b.exporter.exported(); got != "default-0" {
		t.Errorf("exported %q after the Node came back", got)
	}
}

// Only news of the Node is a reason to export, and one until it has succeeded.
func TestWithdrawExportsNews(t *testing.T) {
	exports, broken := 0, errors.New("no table")
	e := &exporter{}
	e.slow = func() { exports++ }
	m := &Manager{
		record: &record{blocks: map[string]store.Usage{}}, exporter: e,
		blocks: kube.Cache[v2.AddressBlock]{Indexer: cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)},
	}
	for i, step := range []struct {
		gone    bool
		fails   error
		exports int // by now
	}{
		{gone: false, exports: 0}, {gone: true, fails: broken, exports: 1}, {gone: true, exports: 2}, {gone: true, exports: 2},
		{gone: false, fails: broken, exports: 3}, {gone: true, fails: broken, exports: 4}, {gone: true, exports: 5}, {gone: false, exports: 6}, {gone: false, exports: 6},
	} {
		e.err = step.fails
		if err := m.Withdraw(t.Context(), step.gone); !errors.Is(err, step.fails) || exports != step.exports {
			t.Errorf("step %d: %d exports, %v; want %d, %v", i, exports, err, step.exports, step.fails)
		}
	}
}

// One that read what is held before a block came, and writes afterwards, would withdraw the
// block: it must not be overtaken by one that has read it.
func TestStaleExportWithdrawsNothing(t *testing.T) {
	reading, release := make(chan struct{}), make(chan struct{})
	var calls atomic.Int32
	e := &exporter{}
	e.slow = func() {
		if calls.Add(1) == 1 {
			close(reading)
			<-release
		}
	}
	r := &record{blocks: map[string]store.Usage{}}
	allocate := func(name string) {
		r.allocate(name, 1)
		u := r.blocks[name]
		u.Block.Name = name
		r.blocks[name] = u
	}
	allocate("default-0")
	m := &Manager{record: r, exporter: e, blocks: kube.Cache[v2.AddressBlock]{Indexer: cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)}}
	export := func() <-chan error {
		done := make(chan error, 1)
		go func() { done <- m.Export(t.Context()) }()
		return done
	}
	stale := export()
	<-reading
	allocate("default-1")
	fresh := export()
	select {
	case err := <-fresh:
		t.Errorf("the second export didn't wait for the first: %v", err)
		close(release)
	case <-time.After(50 * time.Millisecond):
		close(release)
		if err := <-fresh; err != nil {
			t.Error(err)
		}
	}
	if err := <-stale; err != nil {
		t.Error(err)
	}
	if got := e.exported(); got != "default-0 default-1" {
		t.Errorf("exported %q", got)
	}
}

func TestRequestNamesDiffer(t *testing.T) {
	names := map[string]bool{}
	for _, n := range []string{
		requestName("c", "u1", "a-b", 0), requestName("b-c", "u2", "a", 0), requestName("c", "u3", "a-b", 0), requestName("c", "u1", "a-b", 1),
	} {
		names[n] = true
	}
	if len(names) != 4 {
		t.Errorf("names collide: %v", names)
	}
	long := strings.Repeat("x", 253)
	if n := requestName(long, "u", long, 1<<30); len(n) > 253 {
		t.Errorf("name of %d characters", len(n))
	}
}

func TestCollector(t *testing.T) {
	r := &record{blocks: map[string]store.Usage{}}
	for _, h := range []held{h("a", 5, 3, 2, 0), h("b", 5, 1, 0, 0)} {
		h.Pool = "default"
		r.blocks[h.Name] = h.Usage
	}
	want := `
# HELP coil_node_addresses Addresses of the blocks that the node holds, by pool and state: allocated, cooling or free. An address of each family together counts as one.
# TYPE coil_node_addresses gauge
coil_node_addresses{pool="default",state="allocated"} 4
coil_node_addresses{pool="default",state="cooling"} 2
coil_node_addresses{pool="default",state="free"} 58
`
	if err := testutil.CollectAndCompare(NewCollector(t.Context(), r), strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

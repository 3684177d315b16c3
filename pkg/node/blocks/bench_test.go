package blocks

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2/ktesting"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// record is a Record in memory.
type record struct {
	mu     sync.Mutex
	blocks map[string]store.Usage
}

func (r *record) SetBlocks(_ context.Context, bs []store.Block) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var err error
	for _, b := range bs {
		u := r.blocks[b.Name]
		if u.IPv4.IsValid() && u.Block != b && u.Allocated+u.Cooling > 0 {
			err = store.ErrInUse
			continue
		}
		u.Block = b
		r.blocks[b.Name] = u
	}
	return err
}

func (r *record) ForgetBlock(_ context.Context, name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if u := r.blocks[name]; u.Allocated+u.Cooling > 0 {
		return store.ErrInUse
	}
	delete(r.blocks, name)
	return nil
}

func (r *record) Usage(context.Context) ([]store.Usage, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var us []store.Usage
	for _, u := range r.blocks {
		us = append(us, u)
	}
	return us, nil
}

func (r *record) allocate(name string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	u := r.blocks[name]
	if pool, index, ok := strings.Cut(name, "-"); ok && u.Name == "" {
		i, _ := strconv.Atoi(index)
		u.Block, _ = Recorded(newBlock(pool, int32(i)))
	}
	u.Name, u.Allocated = name, n
	r.blocks[name] = u
}

// set makes the record have a block as it is given.
func (r *record) set(u store.Usage) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blocks[u.Name] = u
}

// exporter remembers what is exported.
type exporter struct {
	mu   sync.Mutex
	held []string
	// slow is called before anything is written; it may be nil.
	slow func()
	// err is what comes of each export.
	err error
}

func (e *exporter) Export(_ context.Context, blocks []routes.HeldBlock) error {
	e.mu.Lock()
	slow := e.slow
	e.mu.Unlock()
	if slow != nil {
		slow()
	}
	if e.err != nil {
		return e.err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.held = nil
	for _, b := range blocks {
		e.held = append(e.held, b.Name)
	}
	slices.Sort(e.held)
	return nil
}

func (e *exporter) exported() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return strings.Join(e.held, " ")
}

// before sets what is called before anything is written.
func (e *exporter) before(slow func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.slow = slow
}

// bench is a manager at work on a fake API server.
type bench struct {
	*Manager
	client   *fake.Clientset
	record   *record
	exporter *exporter

	saw      sync.Mutex
	used     map[string]bool // blocks of which pods of this machine have addresses
	warnings []string
	// unreadable is why no pool can be read, nil if it can.
	unreadable atomic.Pointer[error]
}

// config is that of a manager of which the bench answers the questions.
func (b *bench) config(minAge time.Duration) Config {
	return Config{
		NodeName: "node", NodeUID: nodeUID, NodeCreated: nodeCreated, MinAge: minAge, StatusInterval: time.Millisecond,
		Uses: func(_ context.Context, block *v2.AddressBlock) (bool, error) {
			b.saw.Lock()
			defer b.saw.Unlock()
			return b.used[block.Name], nil
		},
		Warn: func(reason, format string, args ...any) {
			b.saw.Lock()
			defer b.saw.Unlock()
			b.warnings = append(b.warnings, reason+": "+fmt.Sprintf(format, args...))
		},
	}
}

func (b *bench) warned() []string {
	b.saw.Lock()
	defer b.saw.Unlock()
	return slices.Clone(b.warnings)
}

const nodeUID = types.UID("node-uid")

var nodeCreated = metav1.Date(2026, time.March, 1, 0, 0, 0, 0, time.UTC)

func run(t *testing.T, objects ...runtime.Object) *bench {
	t.Helper()
	return runWith(t, nil, objects...)
}

// runWith is run with addresses that are allocated from the start, by block.
func runWith(t *testing.T, allocated map[string]int, objects ...runtime.Object) *bench {
	t.Helper()
	return runAged(t, time.Millisecond, allocated, objects...)
}

// runAged is runWith that gives no block back before it has an age.
func runAged(t *testing.T, minAge time.Duration, allocated map[string]int, objects ...runtime.Object) *bench {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	b := &bench{client: fake.NewSimpleClientset(objects...), record: &record{blocks: map[string]store.Usage{}}, exporter: &exporter{}}
	for name, n := range allocated {
		b.record.allocate(name, n)
	}
	// As an API server does; an update without a new version is a resync's.
	var version atomic.Int64
	b.client.PrependReactor("*", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if w, ok := a.(interface{ GetObject() runtime.Object }); ok {
			o, err := meta.Accessor(w.GetObject())
			if err != nil {
				return true, nil, err
			}
			o.SetResourceVersion(fmt.Sprint(version.Add(1)))
		}
		return false, nil, nil
	})
	b.client.PrependReactor("get", "addresspools", func(clienttesting.Action) (bool, runtime.Object, error) {
		if err := b.unreadable.Load(); err != nil {
			return true, nil, *err
		}
		return false, nil, nil
	})
	uids := 0
	b.client.PrependReactor("create", "blockrequests", func(a clienttesting.Action) (bool, runtime.Object, error) {
		uids++
		a.(clienttesting.CreateAction).GetObject().(*v2.BlockRequest).UID = types.UID(fmt.Sprint("request-", uids))
		return false, nil, nil
	})
	// Unlike an API server the fake one loses what happens between an informer's list and its watch.
	var watches atomic.Int64
	b.client.PrependWatchReactor("*", func(a clienttesting.Action) (bool, watch.Interface, error) {
		w, err := b.client.Tracker().Watch(a.GetResource(), a.GetNamespace())
		watches.Add(1)
		return true, w, err
	})
	factory := externalversions.NewSharedInformerFactoryWithOptions(b.client, 0,
		externalversions.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = v2.LabelNode + "=node" }))
	api := factory.Coil().V2()
	var err error
	b.Manager, err = New(b.config(minAge),
		b.client.CoilV2(), api.AddressBlocks().Informer(), api.BlockRequests().Informer(), b.record, b.exporter, reconcile.NewMetrics(nil))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	factory.Start(ctx.Done())
	if err := kube.WaitForSync(ctx, b.Synced()...); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 10*time.Second, "the informers watch", func() error {
		if n := watches.Load(); n < 2 {
			return fmt.Errorf("%d watches", n)
		}
		return nil
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := b.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); factory.Shutdown() })
	return b
}

// idle returns a manager that isn't running, with a cache of blocks.
func idle(client *fake.Clientset, blocks cache.Indexer) *Manager {
	return &Manager{
		cfg: (&bench{}).config(time.Minute), client: client.CoilV2(),
		blocks:   kube.Cache[v2.AddressBlock]{Indexer: blocks},
		requests: kube.Cache[v2.BlockRequest]{Indexer: cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)},
		record:   &record{blocks: map[string]store.Usage{}}, exporter: &exporter{}, news: newWaiters(),
		status: reconcile.New("status", func(context.Context, struct{}) error { return nil }, nil),
		supply: reconcile.New("supply", func(context.Context, string) error { return nil }, nil),
		export: reconcile.New("export", func(context.Context, struct{}) error { return nil }, nil),
	}
}

func newBlock(pool string, index int32) *v2.AddressBlock {
	cidr := fmt.Sprintf("10.0.%d.0/27", index)
	return &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%d", pool, index), UID: types.UID(fmt.Sprintf("%s-%d-uid", pool, index)),
			Labels:     map[string]string{v2.LabelNode: "node", v2.LabelPool: pool},
			Finalizers: []string{v2.Finalizer}, CreationTimestamp: nodeCreated,
		},
		Index: index, IPv4: &cidr,
	}
}

// answer gives the open requests a block each, from an index on, or fails them.
func (b *bench) answer(t *testing.T, index int32, reason string) int {
	t.Helper()
	rs, err := b.client.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, r := range rs.Items {
		if isAnswered(&r) {
			continue
		}
		c := v2.BlockRequestCondition{Type: v2.BlockRequestComplete, Status: corev1.ConditionTrue, Reason: "Complete"}
		if reason != "" {
			c = v2.BlockRequestCondition{Type: v2.BlockRequestFailed, Status: corev1.ConditionTrue, Reason: reason, Message: "no AddressPool " + r.Spec.PoolName}
		} else {
			blk := newBlock(r.Spec.PoolName, index)
			blk.Labels[v2.LabelRequest] = string(r.UID)
			blk.UID = types.UID("block-of-" + string(r.UID)) // none that was there before
			index++
			if _, err := b.client.CoilV2().AddressBlocks().Create(t.Context(), blk, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			r.Status.AddressBlockName = blk.Name
		}
		r.Status.Conditions = []v2.BlockRequestCondition{c}
		if _, err := b.client.CoilV2().BlockRequests().UpdateStatus(t.Context(), &r, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		n++
	}
	return n
}

func (b *bench) creates() int { return b.count("create", "blockrequests") }

// count is how many requests were made.
func (b *bench) count(verb, resource string) int {
	n := 0
	for _, a := range b.client.Actions() {
		if a.Matches(verb, resource) {
			n++
		}
	}
	return n
}

func (b *bench) requests(t *testing.T) []v2.BlockRequest {
	t.Helper()
	rs, err := b.client.CoilV2().BlockRequests().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return rs.Items
}

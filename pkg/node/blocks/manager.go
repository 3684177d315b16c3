// Package blocks keeps the node supplied with AddressBlocks: it records those
// that the node holds, asks for more, gives empty ones back, and reports their
// usage.
//
// It owns the BlockRequests of the node and the finalizer of its blocks. It must
// not know pods or the kernel.
//
//	BlockRequest             action
//	none, one is needed      create it, named after node, pool and sequence
//	open                     wait
//	Complete, block cached   delete the request; the block is recorded and told of
//	Complete, block unknown  wait for the cache; if the block is gone, delete the request
//	Failed                   tell the waiting callers why, delete the request
//
// A recorded block that doesn't exist any more while pods have addresses of it is claimed
// by a BlockRequest of its own; see syncLost.
package blocks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	typed "github.com/coil-net/coil/generated/clientset/versioned/typed/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/syncmap"
)

// Record is the node's record, as far as the manager needs it; see store.Store.
type Record interface {
	SetBlocks(ctx context.Context, blocks []store.Block) error
	ForgetBlock(ctx context.Context, name string) error
	Usage(ctx context.Context) ([]store.Usage, error)
}

// Exporter announces blocks to routing daemons.
type Exporter interface {
	// Export makes the routes of exactly these blocks. It is idempotent.
	Export(ctx context.Context, blocks []routes.HeldBlock) error
}

// Config has the settings of a Manager, and the questions that it asks of others.
type Config struct {
	// NodeName, NodeUID and NodeCreated are of the Node that asks and holds.
	NodeName    string
	NodeUID     types.UID
	NodeCreated metav1.Time
	// Uses says whether pods of this machine have addresses of a block.
	Uses func(ctx context.Context, b *v2.AddressBlock) (bool, error)
	// Warn records an Event about the Node.
	Warn func(reason, format string, args ...any)
	// AnnouncedChanged is called when other blocks are announced on links than before; it must not block. It may be nil.
	AnnouncedChanged func()
	// MinAge is for how long an unused block is kept after it was acquired.
	MinAge time.Duration
	// StatusInterval is the shortest time between two reports of a block's usage.
	StatusInterval time.Duration
}

const (
	// settle is for how long changes of usage are collected.
	settle = 200 * time.Millisecond
	// recheck is how often blocks are looked at that wait for time to pass.
	recheck = 3 * time.Second
	// askAheadPause follows a refusal before the node looks again whether it can ask without need. It
	// doubles up to maxAskAheadPause as long as it can't: all nodes look at an exhausted pool.
	askAheadPause    = 30 * time.Second
	maxAskAheadPause = 15 * time.Minute
)

// Manager implements the package's task. Its methods may be called concurrently.
type Manager struct {
	cfg      Config
	client   typed.CoilV2Interface
	blocks   kube.Cache[v2.AddressBlock]
	requests kube.Cache[v2.BlockRequest]
	synced   []cache.DoneChecker
	record   Record
	exporter Exporter

	supply *reconcile.Loop[string]   // by pool
	export *reconcile.Loop[struct{}] // all blocks
	status *reconcile.Loop[struct{}] // all blocks
	search *reconcile.Loop[struct{}] // recorded blocks that the cache lacks
	news   *waiters
	asked  asked

	exportMu sync.Mutex // orders exports: reading the held blocks, and writing their routes

	// By name of a block. The first four are of recorded blocks; see forget.
	since    syncmap.Map[string, time.Time] // when it was first seen
	offered  syncmap.Map[string, bool]      // it was told that the block gives addresses
	disputed syncmap.Map[string, bool]      // recorded with another range or pool, and told of
	reported syncmap.Map[string, time.Time] // when its status was written
	lost     syncmap.Map[string, lostBlock] // recorded and in use, though not there any more

	// By UID of a block.
	gone    syncmap.Map[types.UID, bool]             // released, though maybe still in a cache
	unsure  syncmap.Map[types.UID, *v2.AddressBlock] // those of gone whose release has an unknown outcome
	claimed syncmap.Map[types.UID, bool]             // made the Node's, though maybe not yet in the cache

	withdrawn atomic.Bool // the Node is gone, or another machine's: nothing is exported
	failed    atomic.Bool // the last export of Withdraw failed
}

// New returns a manager that isn't running. The informers are those of AddressBlocks
// and BlockRequests, restricted to objects with the node's label.
func New(cfg Config, client typed.CoilV2Interface, blocks, requests cache.SharedIndexInformer,
	record Record, exporter Exporter, metrics *reconcile.Metrics) (*Manager, error) {
	m := &Manager{
		cfg:      cfg,
		client:   client,
		blocks:   kube.CacheOf[v2.AddressBlock](blocks),
		requests: kube.CacheOf[v2.BlockRequest](requests),
		record:   record,
		exporter: exporter,
		news:     newWaiters(),
	}
	m.supply = reconcile.New("blocks", m.syncPool, metrics)
	m.export = reconcile.New("export", func(ctx context.Context, _ struct{}) error { return m.Export(ctx) }, metrics)
	m.status = reconcile.New("block-status", m.syncStatus, metrics)
	m.search = reconcile.New("lost-blocks", m.syncAllLost, metrics)

	var err error
	m.synced, err = reconcile.Register(
		reconcile.On(blocks, reconcile.Handler(func(b *v2.AddressBlock) {
			m.supply.Add(b.Labels[v2.LabelPool])
			m.export.Add(struct{}{})
		})),
		reconcile.On(blocks, reconcile.Changes(m.announcedChanged)),
		reconcile.On(requests, reconcile.Handler(func(r *v2.BlockRequest) { m.supply.Add(r.Spec.PoolName) })),
	)
	return m, err
}

// Run works until ctx ends.
func (m *Manager) Run(ctx context.Context) error {
	m.search.Add(struct{}{})
	var group errgroup.Group
	group.Go(func() error { return m.supply.Run(ctx, 4, m.synced...) })
	for _, l := range []*reconcile.Loop[struct{}]{m.export, m.status, m.search} {
		group.Go(func() error { return l.Run(ctx, 1, m.synced...) })
	}
	return group.Wait()
}

// Synced are the functions that say whether the caches are filled.
func (m *Manager) Synced() []cache.DoneChecker { return m.synced }

// Generation counts the news about a pool; see Ask.
func (m *Manager) Generation(pool string) uint64 { return m.news.generation(pool) }

// Ask asks for one more block of a pool and waits. It returns nil when there is
// news since the given generation that makes it worth to look for an address
// again, the refusal when the pool gives none, or the error of ctx.
func (m *Manager) Ask(ctx context.Context, pool string, since uint64) error {
	err := m.news.wait(ctx, pool, since, func() { m.supply.Add(pool) })
	if err != nil {
		m.forgetPool(pool)
	}
	return err
}

// forgetPool forgets a pool for which nobody waits and of which the node has no block: its name
// may be anything that was ever in an annotation.
func (m *Manager) forgetPool(pool string) {
	if len(m.ofPool(pool)) == 0 && m.news.forget(pool) {
		m.asked.forget(pool)
	}
}

// Changed says that addresses of a pool were taken or freed.
func (m *Manager) Changed(pool string) { m.supply.AddAfter(pool, settle) }

// Usable returns the names of the node's blocks that give addresses of a pool, in
// the order in which they should be used up.
func (m *Manager) Usable(pool string) []string {
	if m.withdrawn.Load() {
		return nil
	}
	var names []string
	for _, b := range m.ofPool(pool) {
		if m.usable(b) {
			names = append(names, b.Name)
		}
	}
	return names
}

// usable says whether a block gives new addresses.
func (m *Manager) usable(b *v2.AddressBlock) bool {
	return b.DeletionTimestamp == nil && !reserved(b) && !closed(b) && !m.foreign(b) && m.standing(b) == granted
}

// standing is the relation of a block to the request that it was made for.
type standing int

const (
	granted standing = iota // its answer, or the request is of an earlier time
	awaited                 // not its answer yet
	surplus                 // another block is its answer: two controllers made one each
)

func (m *Manager) standing(b *v2.AddressBlock) standing {
	uid, pool := types.UID(b.Labels[v2.LabelRequest]), b.Labels[v2.LabelPool]
	if uid == "" {
		return granted
	}
	if h, ok := m.asked.handled.Find(uid); ok {
		if h.answer == b.Name {
			return granted
		}
		return surplus
	}
	if m.asked.isLatest(pool, uid) {
		return awaited
	}
	for _, r := range m.requests.All() { // the node's: few
		if r.UID == uid && r.Status.AddressBlockName != b.Name {
			return awaited
		}
	}
	return granted
}

func reserved(b *v2.AddressBlock) bool { return b.Labels[v2.LabelReserved] == v2.ReservedValue }

// closed says whether a block of a pool that drains, or that excludes addresses of it, gives none any more.
func closed(b *v2.AddressBlock) bool { return b.Labels[v2.LabelClosed] != "" }

// list returns the blocks of the cache that weren't released, by index.
func (m *Manager) list() []*v2.AddressBlock {
	all := slices.DeleteFunc(m.blocks.All(), func(b *v2.AddressBlock) bool { return m.gone.Get(b.UID) })
	slices.SortFunc(all, func(a, b *v2.AddressBlock) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), strings.Compare(a.Name, b.Name))
	})
	return all
}

func (m *Manager) ofPool(pool string) []*v2.AddressBlock {
	return slices.DeleteFunc(m.list(), func(b *v2.AddressBlock) bool { return b.Labels[v2.LabelPool] != pool })
}

// Recorded returns the store's value of an AddressBlock.
func Recorded(b *v2.AddressBlock) (store.Block, error) {
	r, err := ipam.ParseBlock(b.IPv4, b.IPv6)
	if err != nil {
		return store.Block{}, fmt.Errorf("AddressBlock %s: %w", b.Name, err)
	}
	return store.Block{Name: b.Name, Pool: b.Labels[v2.LabelPool], Block: r}, nil
}

// syncPool brings requests and blocks of one pool in order.
func (m *Manager) syncPool(ctx context.Context, pool string) error {
	if m.withdrawn.Load() {
		return reconcile.Later(m.cfg.StatusInterval) // requests and blocks are the machine's that the Node is of
	}
	answered, open, err := m.answers(ctx, pool)
	if err != nil {
		return err
	}
	errs := []error{m.forgetGone(ctx, pool), m.makeSure(ctx, pool)}
	unsettled, err := m.intake(ctx, pool)
	errs = append(errs, unsettled)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	if err := m.takeAnswers(ctx, pool, answered); err != nil {
		return err
	}
	// Usage is read before the news is told: callers that wait now take addresses that are free now, and if
	// these are too few the next block is asked for meanwhile.
	usage, err := m.record.Usage(ctx)
	if err != nil {
		return err
	}
	// Before a block is asked for: the next one might be one that this node has lost.
	claimed, lost, err := m.syncLost(ctx, pool, usage)
	errs = append(errs, err)
	open = open || claimed
	waiting, pause := m.news.state(pool)
	hs, young := m.held(pool, usage)
	if m.offer(hs) {
		m.news.tell(pool, nil)
		pause = 0
	}
	d := decide(hs, waiting, m.cfg.MinAge)
	if d.ask && !open && waiting == 0 && pause == 0 {
		pause = m.askInVain(ctx, pool)
	}
	paused := waiting == 0 && pause > 0
	if d.ask && !open && !paused {
		errs = append(errs, m.request(ctx, pool))
	}
	for _, name := range d.release {
		errs = append(errs, m.release(ctx, name))
	}
	m.status.Add(struct{}{})
	if err := errors.Join(errs...); err != nil {
		return err
	}
	cooling := lost || slices.ContainsFunc(hs, func(h held) bool { return h.Cooling > 0 })
	// A block in use is in nobody's way while its addresses cool: only its status changes.
	soon := slices.ContainsFunc(hs, func(h held) bool { return h.Cooling > 0 && (h.Allocated == 0 || waiting > 0) })
	switch {
	case soon || young || d.ask && !paused:
		return reconcile.Later(recheck)
	case cooling:
		return reconcile.Later(m.cfg.StatusInterval)
	case d.ask:
		return reconcile.Later(pause)
	}
	return nil
}

// intake records the blocks of a pool, and exports them if one is new in the cache. A block that
// can't be understood or recorded must not keep the others from use. unsettled is why it isn't known yet
// whose a block is, or one couldn't be given back: to be tried again.
func (m *Manager) intake(ctx context.Context, pool string) (unsettled, err error) {
	var recs []store.Block
	var errs []error
	fresh := false
	for _, b := range m.ofPool(pool) {
		if m.foreign(b) {
			unsettled = errors.Join(unsettled, m.settle(ctx, b))
		}
		if m.foreign(b) {
			continue
		}
		returned, err := m.returned(ctx, b)
		if err == nil && returned {
			err = m.release(ctx, b.Name)
		}
		unsettled = errors.Join(unsettled, err)
		if err != nil || returned {
			continue
		}
		rec, err := Recorded(b)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		recs = append(recs, rec)
		if _, ok := m.since.Find(b.Name); !ok {
			m.since.Set(b.Name, time.Now())
			fresh = true
		}
	}
	err = m.record.SetBlocks(ctx, recs)
	if err != nil && !errors.Is(err, store.ErrInUse) {
		return unsettled, err
	}
	errs = append(errs, err)
	if fresh {
		faultpoint.At(faultpoint.BlockRecorded)
		errs = append(errs, m.Export(ctx))
		faultpoint.At(faultpoint.BlockExported)
	}
	if err := errors.Join(errs...); err != nil {
		klog.FromContext(ctx).Error(err, "Some blocks can't be used", "pool", pool)
	}
	return unsettled, nil
}

// offer says whether one of the blocks gives addresses now and didn't before.
func (m *Manager) offer(hs []held) bool {
	news := false
	for _, h := range hs {
		if h.usable != m.offered.Get(h.Name) {
			m.offered.Set(h.Name, h.usable)
			news = news || h.usable
		}
	}
	return news
}

// held joins the facts about the blocks of a pool. young says that one of them
// is empty but too young to be released.
func (m *Manager) held(pool string, usage []store.Usage) (hs []held, young bool) {
	byName := map[string]store.Usage{}
	for _, u := range usage {
		byName[u.Name] = u
	}
	for _, b := range m.ofPool(pool) {
		u, ok := byName[b.Name]
		if !ok {
			continue
		}
		h := held{
			Usage:    u,
			usable:   m.usable(b) && m.agrees(b, u.Block),
			surplus:  m.standing(b) == surplus,
			deleting: b.DeletionTimestamp != nil,
			closed:   closed(b),
			reserved: reserved(b),
			age:      m.age(b.Name),
		}
		young = young || h.empty() && h.age < m.cfg.MinAge
		hs = append(hs, h)
	}
	return hs, young
}

// agrees says whether the record has a block as it is. If it doesn't, the node got a block of the
// name before that had another range, as of a pool that was deleted by force, and pods still have
// addresses of that one.
func (m *Manager) agrees(b *v2.AddressBlock, recorded store.Block) bool {
	now, err := Recorded(b)
	agree := err == nil && now == recorded
	told := m.disputed.Get(b.Name)
	m.disputed.Set(b.Name, err == nil && !agree)
	if err == nil && !agree && !told {
		m.cfg.Warn("BlockDisputed", "AddressBlock %s has %s, but pods of this node have addresses of %s of AddressPool %s, which had that name before: it gives no address until these pods have ended",
			b.Name, now.Block, recorded.Block, recorded.Pool)
	}
	return agree
}

// age is for how long the node has held a block in this run.
func (m *Manager) age(block string) time.Duration {
	if t, ok := m.since.Find(block); ok {
		return time.Since(t)
	}
	return 0
}

// Package pool keeps the status, the finalizer and the metrics of AddressPools, and the labels of their blocks that say how these are
// announced, and which of them give no address any more.
//
// It owns the status of AddressPools, Coil's finalizer on them, and these labels. It reads
// AddressPools, AddressBlocks, Nodes and ServiceCIDRs. It must not know how blocks
// are carved; a Carver tells what it has to know of that.
//
//	pool                               action
//	gone                               its metrics go
//	alive, without finalizer           add the finalizer
//	alive                              status, metrics, an Event when a condition becomes True;
//	                                   label the blocks as spec.announce, spec.exclude and
//	                                   spec.drain are
//	deleting, blocks in cache          mark those that aren't reserved deleted, so that their
//	                                   nodes take no new address from them; status says who
//	                                   holds them
//	deleting, no blocks, Carver busy   look again soon
//	deleting, no blocks                list them from the API server; none: remove the finalizer
//
// The status is written when it changes, at most about once a second per pool, however many
// blocks come and go.
package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	coreinformers "k8s.io/client-go/informers/core/v1"
	networkinginformers "k8s.io/client-go/informers/networking/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	informers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/syncmap"
)

const (
	// settle is for how long changes of blocks and nodes are collected.
	settle = time.Second
	// busyPause is how long a deleting pool waits for the Carver.
	busyPause = 100 * time.Millisecond
	workers   = 2
)

// Carver creates blocks.
type Carver interface {
	// LastIndex returns the index carved last, nil if it isn't known.
	LastIndex(*v2.AddressPool) *int32
	// Busy says whether a block of the pool may be about to be created by a request
	// that began before the cache showed the pool as it is now.
	Busy(pool string) bool
	// Claims returns the last claim of a block of a pool, and since when this process leads.
	Claims(pool string) pools.Claims
	// OnClaim makes the carver tell of each claim of a pool's block. It is called before the carver runs.
	OnClaim(tell func(pool string))
}

// Config is what the controller is made of.
type Config struct {
	Coil     versioned.Interface
	Pools    informers.AddressPoolInformer
	Blocks   informers.AddressBlockInformer
	Nodes    coreinformers.NodeInformer
	Services networkinginformers.ServiceCIDRInformer
	Carver   Carver
	Recorder kube.Recorder
	// LoopMetrics and Registry take metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	Registry    prometheus.Registerer
}

// Controller keeps AddressPools.
type Controller struct {
	cfg      Config
	pools    kube.Cache[v2.AddressPool]
	blocks   kube.Index[v2.AddressBlock] // by pool
	nodes    kube.Cache[corev1.Node]
	services kube.Cache[networkingv1.ServiceCIDR]
	synced   []cache.DoneChecker
	loop     *reconcile.Loop[string]
	now      func() metav1.Time

	// others counts the changes of the pools, Nodes and ServiceCIDRs that a pool may overlap.
	others atomic.Uint64
	// overlaps has the condition Overlapping of each pool, which is made of thousands of Nodes.
	overlaps syncmap.Map[string, overlap]

	maxBlocks, allocated, floating *prometheus.GaugeVec
}

// overlap is the condition Overlapping of a pool, and how many changes of others it has seen.
type overlap struct {
	seen      uint64
	condition metav1.Condition
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	metrics := promauto.With(cfg.Registry)
	c := &Controller{
		cfg:      cfg,
		pools:    kube.CacheOf[v2.AddressPool](cfg.Pools.Informer()),
		blocks:   kube.CacheOf[v2.AddressBlock](cfg.Blocks.Informer()).IndexBy(pools.BlockPools),
		nodes:    kube.CacheOf[corev1.Node](cfg.Nodes.Informer()),
		services: kube.CacheOf[networkingv1.ServiceCIDR](cfg.Services.Informer()),
		now:      metav1.Now,
		maxBlocks: metrics.NewGaugeVec(prometheus.GaugeOpts{
			Name: "coil_controller_max_blocks",
			Help: "Blocks that an AddressPool has, taken or not. Only the leader exports it.",
		}, []string{"pool"}),
		allocated: metrics.NewGaugeVec(prometheus.GaugeOpts{
			Name: "coil_controller_allocated_blocks",
			Help: "Blocks of an AddressPool that nodes hold, and floating addresses. Only the leader exports it.",
		}, []string{"pool"}),
		floating: metrics.NewGaugeVec(prometheus.GaugeOpts{
			Name: "coil_floating_addresses",
			Help: "Floating addresses of an AddressPool, pairs as one: used ones belong to an object, cooling ones were released. Only the leader exports it.",
		}, []string{"pool", "state"}),
	}
	c.loop = reconcile.New("pool", c.sync, cfg.LoopMetrics)
	cfg.Carver.OnClaim(c.loop.Add)
	var err error
	c.synced, err = reconcile.Register(
		reconcile.On(cfg.Pools.Informer(), reconcile.Changes(c.poolChanged)),
		reconcile.On(cfg.Blocks.Informer(), reconcile.Handler(func(b *v2.AddressBlock) {
			for _, p := range pools.BlockPools(b) {
				c.loop.AddAfter(p, settle)
			}
		})),
		// Heartbeats of Nodes don't matter.
		reconcile.On(cfg.Nodes.Informer(), reconcile.ChangeHandler(func(*corev1.Node) { c.allPools() },
			func(a, b *corev1.Node) bool { return slices.Equal(a.Status.Addresses, b.Status.Addresses) })),
		reconcile.On(cfg.Services.Informer(), reconcile.Handler(func(*networkingv1.ServiceCIDR) { c.allPools() })),
	)
	return c, err
}

// poolChanged looks at the pool at once, and soon at the others, which it may
// overlap. A change of no more than the status, most likely made here, can wait.
func (c *Controller) poolChanged(a, b *v2.AddressPool) {
	if a != nil && b != nil && a.Generation == b.Generation && slices.Equal(a.Finalizers, b.Finalizers) {
		c.loop.AddAfter(b.Name, settle)
		return
	}
	c.allPools()
	c.loop.Add(cmp.Or(b, a).Name)
}

// allPools looks soon at all pools, since one of the objects that they may overlap has changed.
func (c *Controller) allPools() {
	c.others.Add(1)
	for _, p := range c.pools.All() {
		c.loop.AddAfter(p.Name, settle)
	}
}

// Run keeps pools until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	defer c.maxBlocks.Reset()
	defer c.allocated.Reset()
	defer c.floating.Reset()
	return c.loop.Run(ctx, workers, c.synced...)
}

func (c *Controller) sync(ctx context.Context, name string) error {
	p := c.pools.Find(name)
	if p == nil {
		c.overlaps.Delete(name)
		c.maxBlocks.DeleteLabelValues(name)
		c.allocated.DeleteLabelValues(name)
		c.floating.DeletePartialMatch(prometheus.Labels{"pool": name})
		return nil
	}
	facts := c.facts(p)
	status := pools.Status(facts)
	c.maxBlocks.WithLabelValues(name).Set(float64(status.Blocks.Total))
	c.allocated.WithLabelValues(name).Set(float64(status.Blocks.Used))
	c.floating.WithLabelValues(name, "used").Set(float64(status.Floating.Used))
	c.floating.WithLabelValues(name, "cooling").Set(float64(status.Floating.Cooling))
	if p.DeletionTimestamp == nil && !slices.Contains(p.Finalizers, v2.Finalizer) {
		var err error
		if p, err = c.setFinalizers(ctx, p, append(slices.Clone(p.Finalizers), v2.Finalizer)); err != nil || p == nil {
			return err
		}
	}
	if p.DeletionTimestamp != nil && len(facts.Blocks) == 0 {
		gone, err := c.release(ctx, p)
		if gone || err != nil {
			return err
		}
	}
	if p.DeletionTimestamp != nil {
		// The status names the nodes that hold blocks, also after a failed write.
		return errors.Join(c.drain(ctx, facts.Blocks), c.writeStatus(ctx, p, status), c.label(ctx, p, facts.Blocks))
	}
	if err := errors.Join(c.writeStatus(ctx, p, status), c.label(ctx, p, facts.Blocks)); err != nil {
		return err
	}
	if _, left := pools.Suspended(p, facts.Claims, facts.Now.Time); left > 0 {
		return reconcile.Later(left)
	}
	return nil
}

// label makes the blocks of a pool say how they are announced, and whether they give addresses. A block that counts for the pool by its name
// only is another's.
func (c *Controller) label(ctx context.Context, p *v2.AddressPool, blocks []*v2.AddressBlock) error {
	var errs []error
	announce, closer := pools.AnnounceLabel(p), pools.NewCloser(p)
	for _, b := range blocks {
		if b.Labels[v2.LabelPool] != p.Name {
			continue
		}
		changes := map[string]any{}
		for key, want := range map[string]string{v2.LabelAnnounce: announce, v2.LabelClosed: closer.Label(b)} {
			have, labelled := b.Labels[key]
			switch {
			case want == "" && labelled:
				changes[key] = nil // removes it
			case want != have:
				changes[key] = want
			}
		}
		if len(changes) == 0 {
			continue
		}
		if _, err := kube.PatchMetadata(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b, map[string]any{"labels": changes}); err != nil {
			errs = append(errs, fmt.Errorf("label AddressBlock %s as spec of AddressPool %s is: %w", b.Name, p.Name, err))
		}
	}
	return errors.Join(errs...)
}

// drain marks the blocks of a deleted pool deleted. Their finalizers keep them until
// their nodes have no pod with an address of them. Reserved ones are an admin's.
func (c *Controller) drain(ctx context.Context, blocks []*v2.AddressBlock) error {
	var errs []error
	for _, b := range blocks {
		if b.DeletionTimestamp != nil || b.Labels[v2.LabelReserved] == v2.ReservedValue {
			continue
		}
		if err := kube.DeleteAsRead(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b); err != nil {
			errs = append(errs, fmt.Errorf("mark AddressBlock %s of a deleted pool deleted: %w", b.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (c *Controller) facts(p *v2.AddressPool) pools.Facts {
	return pools.Facts{
		Pool: p, Blocks: c.blocks.Under(p.Name), Overlapping: c.overlapping(p), LastIndex: c.cfg.Carver.LastIndex(p),
		Claims: c.cfg.Carver.Claims(p.Name), Now: c.now(),
	}
}

// overlapping returns the condition Overlapping of a pool. It is made again only after a change of others.
func (c *Controller) overlapping(p *v2.AddressPool) metav1.Condition {
	seen := c.others.Load() // before the caches are read, which may be newer
	if o, ok := c.overlaps.Find(p.Name); ok && o.seen == seen {
		return o.condition
	}
	cond := pools.Overlapping(p, pools.Others{Pools: c.pools.All(), Nodes: c.nodes.All(), Services: c.services.All()})
	c.overlaps.Set(p.Name, overlap{seen, cond})
	return cond
}

// release lets a deleted pool go, and says whether it went. The cache has no block
// of it.
func (c *Controller) release(ctx context.Context, p *v2.AddressPool) (gone bool, err error) {
	if !slices.Contains(p.Finalizers, v2.Finalizer) {
		return true, nil // others keep it
	}
	if c.cfg.Carver.Busy(p.Name) {
		return false, reconcile.Later(busyPause)
	}
	if left, err := c.hasBlocks(ctx, p.Name); left || err != nil {
		return false, err // the cache will show them
	}
	rest := slices.DeleteFunc(slices.Clone(p.Finalizers), func(f string) bool { return f == v2.Finalizer })
	if _, err := c.setFinalizers(ctx, p, rest); err != nil {
		return false, err
	}
	klog.FromContext(ctx).Info("Let a deleted pool go", "pool", p.Name)
	return true, nil
}

// hasBlocks asks the API server whether there are blocks of a pool. A name that can't be the value
// of a label, as pools of Coil 2.x may have, is no block's.
func (c *Controller) hasBlocks(ctx context.Context, pool string) (bool, error) {
	if len(validation.IsValidLabelValue(pool)) > 0 {
		return false, nil
	}
	l, err := c.cfg.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelPool + "=" + pool, Limit: 1})
	if err != nil {
		return false, fmt.Errorf("list the blocks of AddressPool %s: %w", pool, err)
	}
	return len(l.Items) > 0, nil
}

// setFinalizers replaces the finalizers of a pool that is as it was read, and
// returns what it is then; nil if it is gone.
func (c *Controller) setFinalizers(ctx context.Context, p *v2.AddressPool, finalizers []string) (*v2.AddressPool, error) {
	after, err := kube.PatchMetadata(ctx, c.cfg.Coil.CoilV2().AddressPools(), p, map[string]any{"finalizers": finalizers})
	if err != nil {
		return nil, fmt.Errorf("set the finalizers of AddressPool %s: %w", p.Name, err)
	}
	return after, nil
}

func (c *Controller) writeStatus(ctx context.Context, p *v2.AddressPool, status v2.AddressPoolStatus) error {
	if equality.Semantic.DeepEqual(p.Status, status) {
		return nil
	}
	after := p.DeepCopy()
	after.Status = status
	wrote, err := object.WriteStatus(ctx, c.cfg.Coil.CoilV2().AddressPools(), after, metav1.UpdateOptions{})
	if !wrote {
		return err
	}
	for _, is := range object.BecameTrue(p.Status.Conditions, status.Conditions,
		object.Warning{Condition: v2.PoolExhausted, Reason: v2.ReasonPoolExhausted},
		object.Warning{Condition: v2.PoolOverlapping, Reason: "PoolOverlapping"},
		object.Warning{Condition: v2.PoolTerminating, Reason: v2.ReasonPoolTerminating},
		object.Warning{Condition: v2.PoolSuspended, Reason: v2.ReasonPoolSuspended},
		object.Warning{Condition: v2.PoolExcludedInUse, Reason: "PoolExcludedInUse"},
	) {
		c.cfg.Recorder.Eventf(p, nil, corev1.EventTypeWarning, is.Reason, "Reconcile", "%s", is.Message)
		klog.FromContext(ctx).Info("A pool needs attention", "pool", p.Name, "reason", is.Reason, "message", is.Message)
	}
	return nil
}

// Package pool keeps the status, the finalizer and the metrics of AddressPools.
//
// It owns the status of AddressPools and Coil's finalizer on them. It reads
// AddressPools, AddressBlocks, Nodes and ServiceCIDRs. It must not know how blocks
// are carved; a Carver tells what it has to know of that.
//
//	pool                               action
//	gone                               its metrics go
//	alive, without finalizer           add the finalizer
//	alive                              status, metrics, an Event when a condition becomes True
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
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	coreinformers "k8s.io/client-go/informers/core/v1"
	networkinginformers "k8s.io/client-go/informers/networking/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	informers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	listers "github.com/coil-net/coil/generated/listers/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	byPool = "pool-blocks"
	// settle is for how long changes of blocks and nodes are collected.
	settle = time.Second
	// busyPause is how long a deleting pool waits for the Carver.
	busyPause = 100 * time.Millisecond
	workers   = 2
)

// Carver is who creates blocks.
type Carver interface {
	// LastIndex returns the index carved last, and false if it isn't known.
	LastIndex(*v2.AddressPool) (int32, bool)
	// Busy says whether a block of the pool may be about to be created by somebody
	// who does not know yet what the cache shows of the pool.
	Busy(pool string) bool
	// Claims returns what is known of the claims of a pool's blocks.
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
	coil     versioned.Interface
	pools    listers.AddressPoolLister
	blocks   cache.Indexer
	nodes    corelisters.NodeLister
	services networkinglisters.ServiceCIDRLister
	carver   Carver
	recorder kube.Recorder
	synced   []cache.DoneChecker
	loop     *reconcile.Loop[string]
	now      func() metav1.Time

	maxBlocks, allocated *prometheus.GaugeVec
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	c := &Controller{
		coil:     cfg.Coil,
		pools:    cfg.Pools.Lister(),
		blocks:   cfg.Blocks.Informer().GetIndexer(),
		nodes:    cfg.Nodes.Lister(),
		services: cfg.Services.Lister(),
		carver:   cfg.Carver,
		recorder: cfg.Recorder,
		now:      metav1.Now,
		maxBlocks: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "coil_controller_max_blocks",
			Help: "Blocks that an AddressPool has, taken or not. Only the leader exports it.",
		}, []string{"pool"}),
		allocated: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "coil_controller_allocated_blocks",
			Help: "Blocks of an AddressPool that nodes hold. Only the leader exports it.",
		}, []string{"pool"}),
	}
	if cfg.Registry != nil {
		for _, m := range []prometheus.Collector{c.maxBlocks, c.allocated} {
			if err := cfg.Registry.Register(m); err != nil {
				return nil, err
			}
		}
	}
	var opts []reconcile.Option
	if cfg.LoopMetrics != nil {
		opts = append(opts, reconcile.WithMetrics(cfg.LoopMetrics))
	}
	c.loop = reconcile.New("pool", c.sync, opts...)
	c.carver.OnClaim(c.loop.Add)
	return c, c.register(cfg)
}

func (c *Controller) register(cfg Config) error {
	if err := cfg.Blocks.Informer().AddIndexers(cache.Indexers{byPool: poolsOfBlock}); err != nil {
		return err
	}
	var err error
	c.synced, err = reconcile.Register(
		reconcile.On(cfg.Pools.Informer(), reconcile.Changes(c.poolChanged)),
		reconcile.On(cfg.Blocks.Informer(), reconcile.Handler(func(b *v2.AddressBlock) {
			for _, p := range pools.BlockPools(b) {
				c.loop.AddAfter(p, settle)
			}
		})),
		reconcile.On(cfg.Nodes.Informer(), reconcile.Changes(c.nodeChanged)),
		reconcile.On(cfg.Services.Informer(), reconcile.Changes(func(_, _ *networkingv1.ServiceCIDR) { c.allPools() })),
	)
	return err
}

func poolsOfBlock(obj any) ([]string, error) {
	if b, ok := obj.(*v2.AddressBlock); ok {
		return pools.BlockPools(b), nil
	}
	return nil, nil
}

// poolChanged looks at the pool at once, and soon at the others, which it may
// overlap. A change of no more than the status, most likely made here, can wait.
func (c *Controller) poolChanged(a, b *v2.AddressPool) {
	if a != nil && b != nil && a.Generation == b.Generation && slices.Equal(a.Finalizers, b.Finalizers) {
		c.loop.AddAfter(b.Name, settle)
		return
	}
	for _, p := range []*v2.AddressPool{a, b} {
		if p != nil {
			c.loop.Add(p.Name)
		}
	}
	c.allPools()
}

// nodeChanged ignores heartbeats.
func (c *Controller) nodeChanged(a, b *corev1.Node) {
	if a != nil && b != nil && slices.Equal(a.Status.Addresses, b.Status.Addresses) {
		return
	}
	c.allPools()
}

func (c *Controller) allPools() {
	all, err := c.pools.List(labels.Everything())
	if err != nil {
		return // an indexer in memory has no errors
	}
	for _, p := range all {
		c.loop.AddAfter(p.Name, settle)
	}
}

// Run keeps pools until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	defer c.maxBlocks.Reset()
	defer c.allocated.Reset()
	return c.loop.Run(ctx, workers, c.synced...)
}

func (c *Controller) sync(ctx context.Context, name string) error {
	p, err := c.pools.Get(name)
	if apierrors.IsNotFound(err) {
		c.maxBlocks.DeleteLabelValues(name)
		c.allocated.DeleteLabelValues(name)
		return nil
	}
	if err != nil {
		return err
	}
	facts, err := c.facts(p)
	if err != nil {
		return err
	}
	status := pools.Status(facts)
	c.maxBlocks.WithLabelValues(name).Set(float64(status.Blocks.Total))
	c.allocated.WithLabelValues(name).Set(float64(status.Blocks.Used))
	if p.DeletionTimestamp == nil && !slices.Contains(p.Finalizers, v2.Finalizer) {
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
		// The status says what is in the way, even if not all could be written.
		return errors.Join(c.drain(ctx, facts.Blocks), c.writeStatus(ctx, p, status))
	}
	if err := c.writeStatus(ctx, p, status); err != nil {
		return err
	}
	if _, left := pools.Suspended(p, facts.Claims, facts.Now.Time); left > 0 {
		return reconcile.Later(left)
	}
	return nil
}

// drain marks the blocks of a deleted pool deleted. Their finalizers keep them until
// their nodes have no pod with an address of them. Reserved ones are an admin's.
func (c *Controller) drain(ctx context.Context, blocks []*v2.AddressBlock) error {
	var errs []error
	for _, b := range blocks {
		if b.DeletionTimestamp != nil || b.Labels[v2.LabelReserved] == v2.ReservedValue {
			continue
		}
		err := c.coil.CoilV2().AddressBlocks().Delete(ctx, b.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &b.UID, ResourceVersion: &b.ResourceVersion},
		})
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("mark AddressBlock %s of a deleted pool deleted: %w", b.Name, err))
		}
	}
	return errors.Join(errs...)
}

func (c *Controller) facts(p *v2.AddressPool) (pools.Facts, error) {
	f := pools.Facts{Pool: p, Claims: c.carver.Claims(p.Name), Now: c.now()}
	if i, ok := c.carver.LastIndex(p); ok {
		f.LastIndex = &i
	}
	objs, err := c.blocks.ByIndex(byPool, p.Name)
	if err != nil {
		return f, err
	}
	for _, obj := range objs {
		if b, ok := obj.(*v2.AddressBlock); ok {
			f.Blocks = append(f.Blocks, b)
		}
	}
	if f.Pools, err = c.pools.List(labels.Everything()); err != nil {
		return f, err
	}
	if f.Nodes, err = c.nodes.List(labels.Everything()); err != nil {
		return f, err
	}
	f.Services, err = c.services.List(labels.Everything())
	return f, err
}

// release lets a deleted pool go, and says whether it went. The cache has no block
// of it.
func (c *Controller) release(ctx context.Context, p *v2.AddressPool) (gone bool, err error) {
	if !slices.Contains(p.Finalizers, v2.Finalizer) {
		return true, nil // others keep it
	}
	if c.carver.Busy(p.Name) {
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
	l, err := c.coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelPool + "=" + pool, Limit: 1})
	if err != nil {
		return false, fmt.Errorf("list the blocks of AddressPool %s: %w", pool, err)
	}
	return len(l.Items) > 0, nil
}

// setFinalizers replaces the finalizers of a pool that is as it was read, and
// returns what it is then; nil if it is gone. It sends nothing else of the pool: an
// old one may break a rule that came later.
func (c *Controller) setFinalizers(ctx context.Context, p *v2.AddressPool, finalizers []string) (*v2.AddressPool, error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": p.UID, "resourceVersion": p.ResourceVersion, "finalizers": finalizers,
	}})
	if err != nil {
		return nil, err
	}
	after, err := c.coil.CoilV2().AddressPools().Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
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
	wrote, err := object.WriteStatus(ctx, c.coil.CoilV2().AddressPools(), after, metav1.UpdateOptions{})
	if !wrote {
		return err
	}
	for _, is := range object.BecameTrue(p.Status.Conditions, status.Conditions,
		object.Warning{Condition: v2.PoolExhausted, Reason: v2.ReasonPoolExhausted},
		object.Warning{Condition: v2.PoolOverlapping, Reason: "PoolOverlapping"},
		object.Warning{Condition: v2.PoolTerminating, Reason: v2.ReasonPoolTerminating},
		object.Warning{Condition: v2.PoolSuspended, Reason: v2.ReasonPoolSuspended},
	) {
		c.recorder.Eventf(p, nil, corev1.EventTypeWarning, is.Reason, "Reconcile", "%s", is.Message)
		klog.FromContext(ctx).Info("A pool needs attention", "pool", p.Name, "reason", is.Reason, "message", is.Message)
	}
	return nil
}

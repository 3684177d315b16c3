// Package floating gives AddressClaims their floating addresses, and takes these back.
//
// It owns the status of AddressClaims, and AddressBlocks with the label coil.cybozu.com/floating from their creation to their end. It
// reads AddressPools, and Pods only to say who has an address. It must not know what addresses are for, nor where they are.
//
//	claim            its blocks                       action
//	gone             any that isn't released          note when: the cool-down begins
//	being deleted    any                              leave them until it is gone
//	there            fewer than it asks for           take back its own that cool down, then carve
//	there            more than it asks for            release the last ones
//	there            of an earlier claim of its name  they are its own now
//	any              released, cool-down over         delete, then remove the finalizer: the address is free
//	any              deleted by an admin              as if it were released
//
// A missing claim is looked for at the API server before anything is released. Before anything is carved, the pool is read there and, unless the claim is new, the claim
// and the pool's floating blocks: what the caches don't show yet is found, also after a crash, since a block names its claim. For new claims the blocks are listed once
// by each leader, which then knows the ones that it has made itself. Two leaders at once may carve one too many, never the same one twice, since its name is the lock.
// The surplus is released.
package floating

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	informers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	workers = 8
	// retry is how soon a claim that lacks addresses is looked at again, since not every address that gets free is told.
	retry = 30 * time.Second
	// settle is for how long blocks that are gone are collected before claims that lack addresses are looked at.
	settle = 2 * time.Second
)

// Config is what the controller is made of.
type Config struct {
	Coil   versioned.Interface
	Core   kubernetes.Interface
	Claims informers.AddressClaimInformer
	Blocks informers.AddressBlockInformer
	Pools  informers.AddressPoolInformer
	// Ledger knows which blocks are free. Somebody else keeps it.
	Ledger *ledger.Ledger
	// LostBlocks returns the last claim of a node on a block of a pool that it lost. It suspends the pool.
	LostBlocks func(pool string) pools.Claims
	Recorder   kube.Recorder
	// LoopMetrics and Registry take metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	Registry    prometheus.Registerer
}

// Controller serves AddressClaims.
type Controller struct {
	cfg    Config
	claims kube.Cache[v2.AddressClaim]
	byPool kube.Index[v2.AddressClaim]
	blocks kube.Cache[v2.AddressBlock]
	of     kube.Index[v2.AddressBlock] // by claims.Key
	pools  kube.Cache[v2.AddressPool]
	// fresh reads pools from the API server, once for many claims.
	fresh   kube.Fresh[v2.AddressPool]
	synced  []cache.DoneChecker
	loop    *reconcile.Loop[string]
	now     func() time.Time
	metrics *collector

	mu sync.Mutex // guards all below
	// attempts are blocks, by the key of the claim, whose creation had no clear answer.
	attempts map[string][]ledger.Candidate
	// seen is since when this process has seen a block released.
	seen   map[types.UID]released
	unseen unseen
}

// released is when a block was released, by the note in the block, and what this process knows of it.
type released struct {
	at time.Time
	claims.Release
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	all, blocks := kube.CacheOf[v2.AddressClaim](cfg.Claims.Informer()), kube.CacheOf[v2.AddressBlock](cfg.Blocks.Informer())
	c := &Controller{
		cfg:      cfg,
		claims:   all,
		byPool:   all.IndexBy(func(claim *v2.AddressClaim) []string { return []string{claim.Spec.Pool} }),
		blocks:   blocks,
		of:       blocks.IndexBy(keysOf),
		pools:    kube.CacheOf[v2.AddressPool](cfg.Pools.Informer()),
		now:      time.Now,
		attempts: map[string][]ledger.Candidate{},
		seen:     map[types.UID]released{},
		unseen:   unseen{map[string]bool{}, map[string]unseenBlock{}},
	}
	c.fresh.Read = func(ctx context.Context, name string) (*v2.AddressPool, error) {
		return cfg.Coil.CoilV2().AddressPools().Get(ctx, name, metav1.GetOptions{})
	}
	c.loop = reconcile.New("addressclaim", c.sync, cfg.LoopMetrics)
	c.metrics = newCollector(c)
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(c.metrics)
	}
	var err error
	c.synced, err = reconcile.Register(
		reconcile.On(cfg.Claims.Informer(), reconcile.Handler(func(claim *v2.AddressClaim) { c.loop.Add(keyOf(claim)) })),
		reconcile.On(cfg.Blocks.Informer(), reconcile.Changes(c.blockChanged)),
		reconcile.On(cfg.Pools.Informer(), reconcile.ChangeHandler(func(p *v2.AddressPool) { c.poolChanged(p.Name) }, sameForClaims)),
	)
	return c, err
}

// keyOf is namespace/name of a claim, as claims.Key is of its blocks.
func keyOf(claim *v2.AddressClaim) string { return claim.Namespace + "/" + claim.Name }

func keysOf(b *v2.AddressBlock) []string {
	if key := claims.Key(b); key != "" {
		return []string{key}
	}
	return nil
}

// sameForClaims says whether a change of a pool is none for claims. Its counts change all the time.
func sameForClaims(a, b *v2.AddressPool) bool {
	suspended := func(p *v2.AddressPool) bool { return meta.IsStatusConditionTrue(p.Status.Conditions, v2.PoolSuspended) }
	return a.UID == b.UID && a.Generation == b.Generation && (a.DeletionTimestamp == nil) == (b.DeletionTimestamp == nil) &&
		a.Annotations[v2.AnnotationSuspend] == b.Annotations[v2.AnnotationSuspend] && suspended(a) == suspended(b)
}

// blockChanged looks at the claim of the block. When a block is gone, others may be waiting for its addresses.
func (c *Controller) blockChanged(before, b *v2.AddressBlock) {
	for _, o := range []*v2.AddressBlock{before, b} {
		if o != nil && claims.Key(o) != "" {
			c.shown(o.Name)
			c.loop.Add(claims.Key(o))
		}
	}
	if b == nil {
		c.mu.Lock()
		delete(c.seen, before.UID)
		c.mu.Unlock()
		for _, claim := range c.byPool.Under(before.Labels[v2.LabelPool]) {
			if !meta.IsStatusConditionTrue(claim.Status.Conditions, v2.ClaimReady) {
				c.loop.AddAfter(keyOf(claim), settle)
			}
		}
		return
	}
	if before != nil && before.UID == b.UID && before.Floating != nil && before.Floating.ReleasedAt == nil && b.Floating != nil && b.Floating.ReleasedAt != nil {
		c.mu.Lock()
		c.seen[b.UID] = released{b.Floating.ReleasedAt.Time, claims.Release{Seen: c.now(), Fresh: true}}
		c.mu.Unlock()
	}
}

// poolChanged looks at the claims of a pool.
func (c *Controller) poolChanged(pool string) {
	for _, claim := range c.byPool.Under(pool) {
		c.loop.Add(keyOf(claim))
	}
}

// Run serves claims until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	if err := c.cfg.Ledger.WaitComplete(ctx); err != nil {
		return nil // ctx ended
	}
	c.metrics.leading.Store(true)
	defer c.metrics.leading.Store(false)
	return c.loop.Run(ctx, workers, c.synced...)
}

func (c *Controller) sync(ctx context.Context, key string) error {
	claim := c.claims.Find(key)
	if claim == nil {
		return c.gone(ctx, key)
	}
	if claim.DeletionTimestamp != nil {
		return nil // whoever keeps it may use its addresses
	}
	g, err := c.gather(ctx, claim)
	if err == nil {
		err = c.writeStatus(ctx, g)
	}
	blocks := c.of.Under(key)
	if g != nil {
		has := map[string]bool{}
		for _, b := range g.has {
			has[b.Name] = true
		}
		// The cache may still show one that was taken back as released.
		blocks = slices.DeleteFunc(blocks, func(b *v2.AddressBlock) bool { return has[b.Name] })
	}
	wait, e := c.free(ctx, blocks)
	if err := errors.Join(err, e); err != nil {
		return err
	}
	if len(g.problems) > 0 && (wait == 0 || wait > retry) {
		wait = retry
	}
	if wait > 0 {
		return reconcile.Later(wait)
	}
	return nil
}

// gone releases the blocks of a claim that isn't there any more.
func (c *Controller) gone(ctx context.Context, key string) error {
	c.mu.Lock()
	delete(c.attempts, key) // their marks end by themselves
	c.mu.Unlock()
	blocks := c.of.Under(key)
	if len(blocks) == 0 {
		return nil
	}
	namespace, name, err := cache.SplitMetaNamespaceKey(key)
	if err != nil {
		return err
	}
	_, err = c.cfg.Coil.CoilV2().AddressClaims(namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil:
		return reconcile.Later(time.Second) // the cache will show it, or its end
	case !apierrors.IsNotFound(err):
		return fmt.Errorf("read AddressClaim %s: %w", key, err)
	}
	var errs []error
	for _, b := range blocks {
		if b.Floating.ReleasedAt == nil && b.DeletionTimestamp == nil {
			errs = append(errs, c.release(ctx, b, b.Floating.CoolDownSeconds))
		}
	}
	wait, err := c.free(ctx, blocks)
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	if wait > 0 {
		return reconcile.Later(wait)
	}
	return nil
}

// writeStatus tells what the claim has, and by an Event why it lacks something.
func (c *Controller) writeStatus(ctx context.Context, g *gathered) error {
	status := claims.Status(g.claim, g.decision, g.has, g.lost, g.problems, metav1.NewTime(c.now()))
	if equality.Semantic.DeepEqual(g.claim.Status, status) {
		return nil
	}
	after := g.claim.DeepCopy()
	after.Status = status
	wrote, err := object.WriteStatus(ctx, c.cfg.Coil.CoilV2().AddressClaims(after.Namespace), after, metav1.UpdateOptions{})
	if !wrote {
		return err
	}
	faultpoint.At(faultpoint.FloatingTold)
	was, is := meta.FindStatusCondition(g.claim.Status.Conditions, v2.ClaimReady), meta.FindStatusCondition(status.Conditions, v2.ClaimReady)
	if is.Status == metav1.ConditionFalse && is.Reason != v2.ReasonWaitsForOpenStack && (was == nil || was.Status != is.Status || was.Reason != is.Reason) {
		c.cfg.Recorder.Eventf(g.claim, nil, corev1.EventTypeWarning, is.Reason, "GiveAddresses", "%s", is.Message)
		klog.FromContext(ctx).Info("A claim lacks addresses", "claim", klog.KObj(g.claim), "reason", is.Reason, "message", is.Message)
	}
	return nil
}

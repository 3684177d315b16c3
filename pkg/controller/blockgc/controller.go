// Package blockgc frees the AddressBlocks of Nodes that are gone.
//
// It owns blocks from the moment when their Node is gone. It reads AddressBlocks,
// Nodes and AddressPools. It must not know how blocks are used or given back by a node
// that is alive.
//
//	block                      Node of the name, read live      action
//	reserved, not deleting     any                              leave it to an admin
//	any                        can't be read                    try again
//	UID is the Node's          exists                           leave it to coild, deleting or not
//	no UID (Coil 2.x), other   exists                           leave it: its coild claims or disowns the block
//	the same, disowned         exists, it disowned the block    as if the Node were gone
//	not deleting               gone                             note the time, mark deleted
//	deleting, no time noted    gone                             note the time
//	deleting, in quarantine    gone                             wait
//	deleting, quarantine over  gone                             remove the finalizer: the name is free
//	deleting, in quarantine    exists again, said nothing yet   leave it: the quarantine begins anew when that is gone
//
// Every write carries the UID and the resourceVersion of the block that was looked at: a
// block that its coild claims at that moment stays. As long as the finalizer is there the
// name is taken, so no address of the block can be given to anybody else; the quarantine
// is for a machine that still runs although its Node object is gone.
//
// A Node that is gone sees nothing wrong with addresses any more: its lines in the conditions of AddressBlocks go, too.
//
// BlockRequests are owned by their Node; Kubernetes' garbage collector deletes them.
package blockgc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	informers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/syncmap"
)

const (
	// settle lets a new block and its Node both arrive in the caches.
	settle  = time.Second
	workers = 2
)

// Defaults of Config.
const (
	DefaultInterval   = time.Hour
	DefaultQuarantine = 10 * time.Minute
)

// Config is what the controller is made of.
type Config struct {
	Coil   versioned.Interface
	Core   kubernetes.Interface
	Blocks informers.AddressBlockInformer
	Pools  informers.AddressPoolInformer
	Nodes  coreinformers.NodeInformer
	// Recorder takes Events about blocks.
	Recorder kube.Recorder
	// LoopMetrics takes metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	// Interval is how often all blocks are looked at, beside those whose Node was
	// deleted just now.
	Interval time.Duration
	// Quarantine is for how long the name of a block stays taken after its Node was
	// found gone.
	Quarantine time.Duration
}

// Controller frees blocks.
type Controller struct {
	cfg    Config
	blocks kube.Cache[v2.AddressBlock]
	byNode kube.Index[v2.AddressBlock]
	// byTeller has blocks under the nodes that have a line in their conditions.
	byTeller kube.Index[v2.AddressBlock]
	pools    kube.Cache[v2.AddressPool]
	nodes    kube.Cache[corev1.Node]
	synced   []cache.DoneChecker
	loop     *reconcile.Loop[string] // by node name
	now      func() time.Time
	// active is false as long as another replica leads: nothing is queued then.
	active atomic.Bool

	// seen is since when this process has seen a block in quarantine and no Node that may use it.
	seen syncmap.Map[types.UID, time.Time]
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	c := &Controller{
		cfg:    cfg,
		blocks: kube.CacheOf[v2.AddressBlock](cfg.Blocks.Informer()),
		pools:  kube.CacheOf[v2.AddressPool](cfg.Pools.Informer()),
		nodes:  kube.CacheOf[corev1.Node](cfg.Nodes.Informer()),
		now:    time.Now,
	}
	c.byNode = c.blocks.IndexBy(func(b *v2.AddressBlock) []string { return []string{b.Labels[v2.LabelNode]} })
	c.byTeller = c.blocks.IndexBy(plan.Tellers)
	c.loop = reconcile.New("blockgc", c.sync, cfg.LoopMetrics)
	synced, err := reconcile.Register(
		reconcile.On(cfg.Blocks.Informer(), reconcile.Changes(c.blockChanged)),
		// Heartbeats don't matter, only that a Node comes or goes.
		reconcile.On(cfg.Nodes.Informer(), reconcile.ChangeHandler(c.nodeChanged, func(_, _ *corev1.Node) bool { return true })),
	)
	c.synced = append(synced, cfg.Pools.Informer().HasSyncedChecker())
	return c, err
}

// blockChanged doesn't look at how a block is used: that doesn't matter here, and changes most.
func (c *Controller) blockChanged(a, b *v2.AddressBlock) {
	if b == nil {
		c.seen.Delete(a.UID)
		return
	}
	c.firstSeen(b) // also while another replica leads, which may end
	if !c.active.Load() {
		return
	}
	if a == nil || !a.DeletionTimestamp.Equal(b.DeletionTimestamp) || a.UID != b.UID ||
		a.Annotations[v2.AnnotationNodeUID] != b.Annotations[v2.AnnotationNodeUID] ||
		a.Annotations[v2.AnnotationDisowned] != b.Annotations[v2.AnnotationDisowned] {
		c.loop.AddAfter(b.Labels[v2.LabelNode], settle)
	}
	for _, node := range plan.Tellers(b) {
		if c.nodes.Find(node) == nil {
			c.loop.AddAfter(node, settle)
		}
	}
}

// firstSeen returns since when this process has seen a block in quarantine, now for one that isn't.
func (c *Controller) firstSeen(b *v2.AddressBlock) time.Time {
	now := c.now()
	if !inQuarantine(b) {
		c.seen.Delete(b.UID)
		return now
	}
	if since, ok := c.seen.Find(b.UID); ok {
		return since
	}
	c.seen.Set(b.UID, now)
	return now
}

// nodeSeen makes the quarantine of a block begin anew if a Node of its node's name is there, or was until now, and
// hasn't disowned it: pods on that machine may use the block although its coild hasn't claimed it yet.
func (c *Controller) nodeSeen(b *v2.AddressBlock, n *corev1.Node) {
	if inQuarantine(b) && !disowned(b, n) {
		c.seen.Set(b.UID, c.now())
	}
}

// nodeChanged is called when a Node comes or goes.
func (c *Controller) nodeChanged(n *corev1.Node) {
	for _, b := range c.byNode.Under(n.Name) {
		c.nodeSeen(b, n) // also while another replica leads, which may end
	}
	if c.active.Load() {
		c.loop.Add(n.Name)
	}
}

// Run frees blocks until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	if !cache.WaitFor(ctx, "", c.synced...) {
		return nil
	}
	c.active.Store(true)
	defer c.active.Store(false)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { wait.NonSlidingUntilWithContext(ctx, c.all, c.cfg.Interval) })
	return c.loop.Run(ctx, workers)
}

// all looks at every block.
func (c *Controller) all(ctx context.Context) {
	for _, node := range append(c.byNode.Keys(), c.byTeller.Keys()...) {
		c.loop.Add(node)
	}
	for _, b := range c.blocks.All() {
		c.explain(ctx, b)
	}
}

// explain tells of a block that nobody will free by himself.
func (c *Controller) explain(ctx context.Context, b *v2.AddressBlock) {
	pool := b.Labels[v2.LabelPool]
	if b.Floating != nil && pools.IsFloating(b) {
		return // its claim has it, or its cool-down ends
	}
	if b.Labels[v2.LabelNode] == "" {
		c.warn(ctx, b, "NoHolder", fmt.Sprintf("The label %s is missing: no node uses the block or gives it back; delete it and its finalizer if nothing has its addresses", v2.LabelNode))
		return
	}
	n := c.nodes.Find(b.Labels[v2.LabelNode])
	if n != nil && ofEarlier(b, n) && !disowned(b, n) && c.now().Sub(n.CreationTimestamp.Time) > c.cfg.Quarantine {
		c.warn(ctx, b, "NotClaimed", fmt.Sprintf("Node %s was made again, and its coild hasn't said yet whether pods there use the block: look at coild there", n.Name))
	}
	if c.pools.Find(pool) == nil {
		c.warn(ctx, b, "PoolGone", fmt.Sprintf("There is no AddressPool %q: the block goes when no pod on node %s has an address of it", pool, b.Labels[v2.LabelNode]))
	}
}

func (c *Controller) warn(ctx context.Context, b *v2.AddressBlock, reason, message string) {
	c.cfg.Recorder.Eventf(b, nil, corev1.EventTypeWarning, reason, "CollectGarbage", "%s", message)
	klog.FromContext(ctx).V(2).Info("A block needs attention", "block", b.Name, "reason", reason, "message", message)
}

// sync looks at the blocks of one node, and at those with its lines.
func (c *Controller) sync(ctx context.Context, node string) error {
	blocks, told := c.byNode.Under(node), c.byTeller.Under(node)
	if node == "" || c.nothingToDo(node, blocks, told) {
		return nil
	}
	live, err := c.cfg.Core.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		live, err = nil, nil
	}
	if err != nil {
		return fmt.Errorf("read Node %s: %w", node, err)
	}
	latest := live
	if live == nil {
		latest = c.nodes.Find(node) // its deletion is so new that no event has told of it; nil if there is none
	}
	var errs []error
	var next time.Duration
	for _, b := range blocks {
		if latest != nil {
			c.nodeSeen(b, latest)
		}
		a, wait := decide(b, live, c.firstSeen(b), c.now(), c.cfg.Quarantine)
		if err := c.act(ctx, b, a, node); err != nil {
			errs = append(errs, err)
		}
		if wait > 0 && (next == 0 || wait < next) {
			next = wait
		}
	}
	if live == nil {
		for _, b := range told {
			errs = append(errs, c.tellsNoMore(ctx, b, node))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if next > 0 {
		return reconcile.Later(next)
	}
	return nil
}

// nothingToDo spares the API server: the cache is believed as long as it shows that
// all is well.
func (c *Controller) nothingToDo(node string, blocks, told []*v2.AddressBlock) bool {
	n := c.nodes.Find(node)
	return len(blocks)+len(told) == 0 || n != nil && !slices.ContainsFunc(blocks, func(b *v2.AddressBlock) bool {
		return ofEarlier(b, n) || disowned(b, n)
	})
}

func (c *Controller) act(ctx context.Context, b *v2.AddressBlock, a action, node string) error {
	switch a {
	case quarantine:
		return c.startQuarantine(ctx, b, node)
	case release:
		rest := slices.DeleteFunc(slices.Clone(b.Finalizers), func(f string) bool { return f == v2.Finalizer })
		if len(rest) == len(b.Finalizers) {
			return nil // somebody else keeps it
		}
		if _, err := kube.PatchMetadata(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b, map[string]any{"finalizers": rest}); err != nil {
			return fmt.Errorf("release AddressBlock %s: %w", b.Name, err)
		}
		klog.FromContext(ctx).Info("Released a block of a node that is gone", "block", b.Name, "node", node)
	}
	return nil
}

func (c *Controller) startQuarantine(ctx context.Context, b *v2.AddressBlock, node string) error {
	api := c.cfg.Coil.CoilV2().AddressBlocks()
	if _, ok := goneSince(b); !ok {
		metadata := map[string]any{"annotations": map[string]string{v2.AnnotationNodeGone: goneNote(b, c.now())}}
		if b.DeletionTimestamp == nil && !slices.Contains(b.Finalizers, v2.Finalizer) {
			// Without it the name would be free at once.
			metadata["finalizers"] = append(slices.Clone(b.Finalizers), v2.Finalizer)
		}
		noted, err := kube.PatchMetadata(ctx, api, b, metadata)
		if err != nil {
			return fmt.Errorf("note on AddressBlock %s that its node is gone: %w", b.Name, err)
		}
		if noted == nil {
			return nil
		}
		b = noted
	}
	if b.DeletionTimestamp != nil {
		return nil
	}
	if err := kube.DeleteAsRead(ctx, api, b); err != nil {
		return fmt.Errorf("delete AddressBlock %s: %w", b.Name, err)
	}
	c.warn(ctx, b, "NodeGone", fmt.Sprintf("Node %s is gone: the block can be carved again after %s", node, c.cfg.Quarantine))
	klog.FromContext(ctx).Info("A node is gone, its block is in quarantine", "block", b.Name, "node", node, "for", c.cfg.Quarantine)
	return nil
}

// tellsNoMore takes the lines of a node that is gone out of the conditions of a block.
func (c *Controller) tellsNoMore(ctx context.Context, b *v2.AddressBlock, node string) error {
	conditions := plan.WithoutTeller(b, node, "the Node is gone")
	status := map[string]any{"status": map[string]any{"conditions": conditions}}
	if _, err := kube.PatchAsRead(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b, status, "status"); err != nil {
		return fmt.Errorf("take the lines of Node %s out of the conditions of AddressBlock %s: %w", node, b.Name, err)
	}
	return nil
}

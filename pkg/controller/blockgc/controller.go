// Package blockgc frees the AddressBlocks of Nodes that are gone.
//
// It owns blocks from the moment when their Node is gone. It reads AddressBlocks,
// Nodes and AddressPools. It must not know how blocks are used or given back by a node
// that is alive.
//
//	block                      Node of the name, read live      action
//	reserved                   any                              leave it to an admin
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
// BlockRequests are owned by their Node; Kubernetes' garbage collector deletes them.
package blockgc

import (
	"context"
	"encoding/json"
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
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	informers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	listers "github.com/coil-net/coil/generated/listers/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	byNode = "blockgc-node"
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
	coil       versioned.Interface
	core       kubernetes.Interface
	blocks     cache.Indexer
	pools      listers.AddressPoolLister
	nodes      corelisters.NodeLister
	recorder   kube.Recorder
	synced     []cache.DoneChecker
	loop       *reconcile.Loop[string] // by node name
	interval   time.Duration
	quarantine time.Duration
	now        func() time.Time
	// active is false as long as another replica leads: nothing is queued then.
	active atomic.Bool

	mu   sync.Mutex
	seen map[types.UID]time.Time // since when this process has seen a block in quarantine and no Node that may use it
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	c := &Controller{
		coil:       cfg.Coil,
		core:       cfg.Core,
		blocks:     cfg.Blocks.Informer().GetIndexer(),
		pools:      cfg.Pools.Lister(),
		nodes:      cfg.Nodes.Lister(),
		recorder:   cfg.Recorder,
		interval:   cfg.Interval,
		quarantine: cfg.Quarantine,
		now:        time.Now,
		seen:       map[types.UID]time.Time{},
	}
	var opts []reconcile.Option
	if cfg.LoopMetrics != nil {
		opts = append(opts, reconcile.WithMetrics(cfg.LoopMetrics))
	}
	c.loop = reconcile.New("blockgc", c.sync, opts...)
	if err := cfg.Blocks.Informer().AddIndexers(cache.Indexers{byNode: nodeOfBlock}); err != nil {
		return nil, err
	}
	synced, err := reconcile.Register(
		reconcile.On(cfg.Blocks.Informer(), reconcile.Changes(c.blockChanged)),
		reconcile.On(cfg.Nodes.Informer(), cache.ResourceEventHandlerFuncs{
			AddFunc:    c.nodeChanged,
			DeleteFunc: c.nodeChanged,
			UpdateFunc: func(before, after any) {
				a, okA := before.(*corev1.Node)
				b, okB := after.(*corev1.Node)
				if okA && okB && a.UID != b.UID {
					c.nodeChanged(after)
				}
			},
		}),
	)
	c.synced = append(synced, cfg.Pools.Informer().HasSyncedChecker())
	return c, err
}

func nodeOfBlock(obj any) ([]string, error) {
	if b, ok := obj.(*v2.AddressBlock); ok {
		return []string{b.Labels[v2.LabelNode]}, nil
	}
	return nil, nil
}

// blockChanged doesn't look at how a block is used: that doesn't matter here, and changes most.
func (c *Controller) blockChanged(a, b *v2.AddressBlock) {
	if b == nil {
		c.forget(a)
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
}

// firstSeen returns since when this process has seen a block in quarantine, now for one that isn't.
func (c *Controller) firstSeen(b *v2.AddressBlock) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !inQuarantine(b) {
		delete(c.seen, b.UID)
		return c.now()
	}
	if _, ok := c.seen[b.UID]; !ok {
		c.seen[b.UID] = c.now()
	}
	return c.seen[b.UID]
}

// nodeSeen makes the quarantine of a block begin anew if a Node of its node's name is there, or was until now, and
// hasn't disowned it: pods on that machine may use the block although its coild hasn't claimed it yet.
func (c *Controller) nodeSeen(b *v2.AddressBlock, n *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if inQuarantine(b) && !disowned(b, n) {
		c.seen[b.UID] = c.now()
	}
}

func (c *Controller) forget(b *v2.AddressBlock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.seen, b.UID)
}

// nodeChanged is called when a Node comes or goes.
func (c *Controller) nodeChanged(obj any) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	n, ok := obj.(*corev1.Node)
	if !ok {
		return
	}
	blocks, err := c.blocks.ByIndex(byNode, n.Name)
	if err != nil {
		return // the index exists
	}
	for _, obj := range blocks {
		if b, ok := obj.(*v2.AddressBlock); ok {
			c.nodeSeen(b, n) // also while another replica leads, which may end
		}
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
	wg.Go(func() {
		tick := time.NewTicker(c.interval)
		defer tick.Stop()
		for {
			c.all(ctx)
			select {
			case <-tick.C:
			case <-ctx.Done():
				return
			}
		}
	})
	return c.loop.Run(ctx, workers)
}

// all looks at every block.
func (c *Controller) all(ctx context.Context) {
	for _, node := range c.blocks.ListIndexFuncValues(byNode) {
		c.loop.Add(node)
	}
	for _, obj := range c.blocks.List() {
		if b, ok := obj.(*v2.AddressBlock); ok {
			c.explain(ctx, b)
		}
	}
}

// explain tells of a block that nobody will free by himself.
func (c *Controller) explain(ctx context.Context, b *v2.AddressBlock) {
	pool := b.Labels[v2.LabelPool]
	if b.Labels[v2.LabelNode] == "" {
		c.warn(ctx, b, "NoHolder", fmt.Sprintf("The label %s is missing: no node uses the block or gives it back; delete it and its finalizer if nothing has its addresses", v2.LabelNode))
		return
	}
	n, err := c.nodes.Get(b.Labels[v2.LabelNode])
	if err == nil && ofEarlier(b, n) && !disowned(b, n) && c.now().Sub(n.CreationTimestamp.Time) > c.quarantine {
		c.warn(ctx, b, "NotClaimed", fmt.Sprintf("Node %s was made again, and its coild hasn't said yet whether pods there use the block: look at coild there", n.Name))
	}
	if _, err := c.pools.Get(pool); apierrors.IsNotFound(err) {
		c.warn(ctx, b, "PoolGone", fmt.Sprintf("There is no AddressPool %q: the block goes when no pod on node %s has an address of it", pool, b.Labels[v2.LabelNode]))
	}
}

func (c *Controller) warn(ctx context.Context, b *v2.AddressBlock, reason, message string) {
	c.recorder.Eventf(b, nil, corev1.EventTypeWarning, reason, "CollectGarbage", "%s", message)
	klog.FromContext(ctx).V(2).Info("A block needs attention", "block", b.Name, "reason", reason, "message", message)
}

// sync looks at the blocks of one node.
func (c *Controller) sync(ctx context.Context, node string) error {
	objs, err := c.blocks.ByIndex(byNode, node)
	if err != nil {
		return err
	}
	if node == "" || c.nothingToDo(node, objs) {
		return nil
	}
	live, err := c.core.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		live, err = nil, nil
	}
	if err != nil {
		return fmt.Errorf("read Node %s: %w", node, err)
	}
	latest := live
	if live == nil {
		latest, _ = c.nodes.Get(node) // its deletion is so new that no event has told of it; nil if there is none
	}
	var errs []error
	var next time.Duration
	for _, obj := range objs {
		b, ok := obj.(*v2.AddressBlock)
		if !ok {
			continue
		}
		if latest != nil {
			c.nodeSeen(b, latest)
		}
		a, wait := decide(b, live, c.firstSeen(b), c.now(), c.quarantine)
		if err := c.act(ctx, b, a, node); err != nil {
			errs = append(errs, err)
		}
		if wait > 0 && (next == 0 || wait < next) {
			next = wait
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
func (c *Controller) nothingToDo(node string, blocks []any) bool {
	n, err := c.nodes.Get(node)
	return len(blocks) == 0 || err == nil && !slices.ContainsFunc(blocks, func(obj any) bool {
		b, ok := obj.(*v2.AddressBlock)
		return ok && (ofEarlier(b, n) || disowned(b, n))
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
		if _, err := c.patch(ctx, b, map[string]any{"finalizers": rest}); err != nil {
			return fmt.Errorf("release AddressBlock %s: %w", b.Name, err)
		}
		klog.FromContext(ctx).Info("Released a block of a node that is gone", "block", b.Name, "node", node)
	}
	return nil
}

func (c *Controller) startQuarantine(ctx context.Context, b *v2.AddressBlock, node string) error {
	if _, ok := goneSince(b); !ok {
		metadata := map[string]any{"annotations": map[string]string{v2.AnnotationNodeGone: goneNote(b, c.now())}}
		if b.DeletionTimestamp == nil && !slices.Contains(b.Finalizers, v2.Finalizer) {
			// Without it the name would be free at once.
			metadata["finalizers"] = append(slices.Clone(b.Finalizers), v2.Finalizer)
		}
		noted, err := c.patch(ctx, b, metadata)
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
	err := c.coil.CoilV2().AddressBlocks().Delete(ctx, b.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &b.UID, ResourceVersion: &b.ResourceVersion},
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete AddressBlock %s: %w", b.Name, err)
	}
	c.warn(ctx, b, "NodeGone", fmt.Sprintf("Node %s is gone: the block can be carved again after %s", node, c.quarantine))
	klog.FromContext(ctx).Info("A node is gone, its block is in quarantine", "block", b.Name, "node", node, "for", c.quarantine)
	return nil
}

// patch changes the metadata of a block that is as it was read, and returns what it
// is then; nil if it is gone.
func (c *Controller) patch(ctx context.Context, b *v2.AddressBlock, metadata map[string]any) (*v2.AddressBlock, error) {
	metadata["uid"], metadata["resourceVersion"] = b.UID, b.ResourceVersion
	patch, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return nil, err
	}
	after, err := c.coil.CoilV2().AddressBlocks().Patch(ctx, b.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return after, err
}

// Package blockrequest answers BlockRequests: it carves an AddressBlock out of the
// pool for each, exactly one, or says why it can't.
//
// It owns the status of BlockRequests and the creation of AddressBlocks. It reads
// BlockRequests, AddressBlocks, AddressPools and Nodes. It must not know what nodes
// do with a block, nor write the pool.
//
//	request                      block labelled with its UID   action
//	gone, deleting or Failed     any                           nothing
//	no answer                    one                           answer with it
//	no answer                    none, pool can give           carve, then answer
//	no answer                    none, pool or node can't      answer Failed, also if the node has too many
//	no answer, claims a block    -                             answer with that block, make it again
//	Complete                     one more than the answer      delete the surplus one
//
// Creating the object named "<pool>-<index>" is the lock, so two controllers at
// once never give an address twice; the one that gets "already exists" takes the next
// index. Which of two blocks answers a request is decided as follows:
//
//   - Killed between the two writes: the next leader compares its cache with the API
//     server once before it carves (see survey), and so finds the block by its label.
//   - The answer to a create was lost: the same name is tried again, and the block is
//     ours if it carries the request's UID.
//   - Two leaders answer one request: the status is written with the resourceVersion
//     that was read, so one of them loses, and deletes its own block. Only the node
//     that holds a block removes its finalizer, since it may have seen it already.
//
// A pool that is being deleted gives no block. Its deletionTimestamp is looked for in
// the cache and in a read from the API server that began after the request was seen,
// so a request made after the deletion is always refused. A block carved just before
// is seen by the pool's controller, which lists blocks from the API server, after it
// saw the deletion in the same cache and Busy was false, before it lets the pool go.
// Only two leaders at once can get past that: then the block's owner is gone, the
// garbage collector marks the block deleted, and its node lets it run empty; its name
// stays locked all the while.
package blockrequest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	informers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/syncmap"
)

// workers is the number of requests that are answered at once. It keeps an API server busy, whose writes take a few
// milliseconds each.
const workers = 16

// Config is what the controller is made of.
type Config struct {
	Coil     versioned.Interface
	Core     kubernetes.Interface
	Requests informers.BlockRequestInformer
	Blocks   informers.AddressBlockInformer
	Pools    informers.AddressPoolInformer
	Nodes    coreinformers.NodeInformer
	// Ledger is kept here, by what the caches show.
	Ledger   *ledger.Ledger
	Recorder kube.Recorder
	// LoopMetrics and Registry take metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	Registry    prometheus.Registerer
}

// Controller answers BlockRequests.
type Controller struct {
	cfg      Config
	requests kube.Cache[v2.BlockRequest]
	byUID    kube.Index[v2.BlockRequest]
	blocks   kube.Cache[v2.AddressBlock]
	made     kube.Index[v2.AddressBlock] // by the UID of the request that they were made for
	held     kube.Index[v2.AddressBlock] // by holderKey
	pools    kube.Cache[v2.AddressPool]
	nodes    kube.Cache[corev1.Node]
	synced   []cache.DoneChecker
	loop     *reconcile.Loop[string]
	answers  *prometheus.CounterVec
	now      func() time.Time

	ledger *ledger.Ledger
	reader *poolReader
	// tellClaim is called with the pool of each claim that suspends one; it may be nil.
	tellClaim func(pool string)
	// led is when this process began to lead; nil as long as another replica leads: nothing is queued then.
	led atomic.Pointer[time.Time]
	// claims has the last claim of each pool.
	claims syncmap.Map[string, pools.Claims]
	// refused are the claims that were refused for a reason that says nothing about other blocks, and when last.
	// Nodes repeat them.
	refused syncmap.Map[refusedClaim, time.Time]
	// unseen are the blocks, by the UID of their request, that the API server had and
	// the cache had not when this process began to lead. Fixed before the workers start.
	unseen map[types.UID][]string

	mu   sync.Mutex // guards work
	work map[string]*work
}

// work is the state of a request without an answer.
type work struct {
	uid  types.UID
	seen time.Time
	// attempt is a block whose creation had no clear answer, and made the name of
	// one that was created or found. Only the worker that has the request uses them.
	attempt *attempt
	made    string
	// answered says that the answer was written, though the cache may not show it yet.
	answered bool
}

// attempt is a candidate of the pool with this UID.
type attempt struct {
	ledger.Candidate
	pool types.UID
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	requests := kube.CacheOf[v2.BlockRequest](cfg.Requests.Informer())
	blocks := kube.CacheOf[v2.AddressBlock](cfg.Blocks.Informer())
	c := &Controller{
		cfg:      cfg,
		requests: requests,
		byUID:    requests.IndexBy(func(r *v2.BlockRequest) []string { return []string{string(r.UID)} }),
		blocks:   blocks,
		made:     blocks.IndexBy(requestOfBlock),
		held:     blocks.IndexBy(holderOfBlock),
		pools:    kube.CacheOf[v2.AddressPool](cfg.Pools.Informer()),
		nodes:    kube.CacheOf[corev1.Node](cfg.Nodes.Informer()),
		ledger:   cfg.Ledger,
		now:      time.Now,
		work:     map[string]*work{},
		answers: promauto.With(cfg.Registry).NewCounterVec(prometheus.CounterOpts{
			Name: "coil_controller_blockrequests_answered_total",
			Help: "BlockRequests answered by this process: Complete, or the reason why they failed.",
		}, []string{"answer"}),
	}
	c.reader = newPoolReader(c.now, func(ctx context.Context, name string) (*v2.AddressPool, error) {
		return cfg.Coil.CoilV2().AddressPools().Get(ctx, name, metav1.GetOptions{})
	})
	c.loop = reconcile.New("blockrequest", c.sync, cfg.LoopMetrics)
	var err error
	c.synced, err = reconcile.Register(
		reconcile.On(cfg.Blocks.Informer(), reconcile.Changes(c.blockChanged)),
		reconcile.On(cfg.Requests.Informer(), reconcile.Handler(c.enqueue)),
		reconcile.On(cfg.Pools.Informer(), reconcile.Changes(c.poolChanged)),
		reconcile.On(cfg.Nodes.Informer(), reconcile.Changes(c.nodeChanged)),
	)
	return c, err
}

func requestOfBlock(b *v2.AddressBlock) []string {
	if b.Labels[v2.LabelRequest] == "" {
		return nil
	}
	return []string{b.Labels[v2.LabelRequest]}
}

func (c *Controller) enqueue(r *v2.BlockRequest) {
	if c.led.Load() == nil {
		return
	}
	c.workOf(r) // notes the time
	c.noteClaim(r)
	c.loop.Add(r.Name)
}

// blockChanged also looks at the request of the block, for which the block may be a surplus one.
func (c *Controller) blockChanged(before, b *v2.AddressBlock) {
	if b == nil {
		c.ledger.Miss(before.Name)
		return
	}
	c.ledger.See(b)
	if c.led.Load() == nil || b.DeletionTimestamp != nil {
		return
	}
	for _, r := range c.byUID.Under(b.Labels[v2.LabelRequest]) {
		c.loop.Add(r.Name)
	}
}

func (c *Controller) poolChanged(before, p *v2.AddressPool) {
	if p == nil {
		c.reader.forget(before.Name)
		c.ledger.Forget(before.Name)
	}
}

func (c *Controller) nodeChanged(before, n *corev1.Node) {
	if n == nil {
		c.ledger.SeeNode(before.Name, nil)
		return
	}
	c.ledger.SeeNode(n.Name, plan.NodeInternalIPs(n))
}

// Run answers requests until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	if !cache.WaitFor(ctx, "", c.synced...) {
		return nil
	}
	if err := c.survey(ctx); err != nil {
		return nil // ctx ended
	}
	c.ledger.Complete()
	c.led.Store(new(c.now()))
	defer c.led.Store(nil)
	for _, r := range c.requests.All() {
		c.enqueue(r)
	}
	return c.loop.Run(ctx, workers)
}

// LastIndex returns the index of the block that was carved last out of a pool by
// this process, nil if there was none.
func (c *Controller) LastIndex(p *v2.AddressPool) *int32 {
	return c.ledger.LastIndex(p.Name, p.UID)
}

// Busy says whether a block of the pool may be about to be created by this process.
// It says so of each request that began before the cache showed the pool's deletion.
func (c *Controller) Busy(pool string) bool { return c.ledger.Busy(pool) }

// workOf returns the state of a request.
func (c *Controller) workOf(r *v2.BlockRequest) *work {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.work[r.Name]
	if w == nil || w.uid != r.UID {
		w = &work{uid: r.UID, seen: c.now()}
		c.work[r.Name] = w
	}
	return w
}

func (c *Controller) forget(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.work, name)
}

func (c *Controller) sync(ctx context.Context, name string) error {
	r := c.requests.Find(name)
	if r == nil || r.DeletionTimestamp != nil || r.TrueCondition(v2.BlockRequestFailed) != nil {
		c.forget(name)
		return nil
	}
	w := c.workOf(r)
	if r.TrueCondition(v2.BlockRequestComplete) != nil {
		if err := c.dropSurplus(ctx, r, w); err != nil {
			return err
		}
		c.forget(name)
		return nil
	}
	if w.answered {
		return nil // the event of it will come
	}
	b, err := c.obtain(ctx, r, w)
	var no *refusal
	if errors.As(err, &no) {
		if no.reason == v2.ReasonPoolNotFound {
			c.ledger.Forget(r.Spec.PoolName)
		}
		err = c.refuse(ctx, r, no)
	} else if err == nil {
		err = c.complete(ctx, r, b)
	}
	if err != nil {
		return fmt.Errorf("answer BlockRequest %s: %w", name, err)
	}
	w.answered = true
	return nil
}

// complete answers a request with a block.
func (c *Controller) complete(ctx context.Context, r *v2.BlockRequest, b *v2.AddressBlock) error {
	answer := r.DeepCopy()
	answer.Status.AddressBlockName = b.Name
	c.setCondition(answer, v2.BlockRequestComplete, v2.ReasonBlockAssigned,
		fmt.Sprintf("Node %s has AddressBlock %s", r.Spec.NodeName, b.Name))
	_, err := c.cfg.Coil.CoilV2().BlockRequests().UpdateStatus(ctx, answer, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return c.requestVanished(ctx, r, b)
	}
	if err != nil {
		return fmt.Errorf("write AddressBlock %s into it: %w", b.Name, err)
	}
	faultpoint.At(faultpoint.CarveAnswered)
	c.answers.WithLabelValues(string(v2.BlockRequestComplete)).Inc()
	klog.FromContext(ctx).V(2).Info("Answered a request", "request", r.Name, "block", b.Name, "node", r.Spec.NodeName)
	return nil
}

// refuse answers a request that can't be fulfilled. The node makes another request
// when it still needs a block later.
func (c *Controller) refuse(ctx context.Context, r *v2.BlockRequest, no *refusal) error {
	if r.Spec.Claim != "" && slices.Contains(repeated, no.reason) {
		c.refused.DeleteFunc(func(_ refusedClaim, at time.Time) bool { return c.now().Sub(at) > ledger.ContestLife })
		c.refused.Set(refusedClaim{r.Spec.Claim, r.Spec.NodeName}, c.now())
	}
	answer := r.DeepCopy()
	c.setCondition(answer, v2.BlockRequestFailed, no.reason, no.message)
	_, err := c.cfg.Coil.CoilV2().BlockRequests().UpdateStatus(ctx, answer, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("write why there is no block: %w", err)
	}
	c.answers.WithLabelValues(no.reason).Inc()
	klog.FromContext(ctx).V(2).Info("Refused a request", "request", r.Name, "reason", no.reason, "message", no.message)
	if n := c.nodes.Find(r.Spec.NodeName); n != nil {
		c.cfg.Recorder.Eventf(n, nil, corev1.EventTypeWarning, no.reason, "CarveBlock", "%s", no.message)
	}
	return nil
}

// setCondition makes a condition the only one of a request.
func (c *Controller) setCondition(r *v2.BlockRequest, t v2.BlockRequestConditionType, reason, message string) {
	now := metav1.NewTime(c.now())
	r.Status.Conditions = []v2.BlockRequestCondition{{
		Type: t, Status: corev1.ConditionTrue, Reason: reason, Message: message,
		LastProbeTime: now, LastTransitionTime: now,
	}}
}

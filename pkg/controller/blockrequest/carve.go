package blockrequest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// refusal is why a request can't be fulfilled, in the words of its condition.
type refusal struct{ reason, message string }

func (r *refusal) Error() string { return r.message }

func refusef(reason, format string, args ...any) error {
	return &refusal{reason, fmt.Sprintf(format, args...)}
}

// maxCollisions is how many names in a row may be taken against the belief of the
// ledger before all blocks of the pool are read.
const maxCollisions = 8

// obtain returns the block that answers a request: one that was made for it before,
// or a new one. The error is a *refusal if there can be none.
func (c *Controller) obtain(ctx context.Context, r *v2.BlockRequest, w *work) (*v2.AddressBlock, error) {
	if r.Spec.Claim != "" {
		return c.claim(ctx, r, w)
	}
	for _, name := range c.madeFor(r, w) {
		b, err := c.ours(ctx, r, name)
		if b != nil || err != nil {
			return b, err
		}
	}
	// From here on Busy is true: the cache has to be read after that.
	defer c.ledger.Begin(r.Spec.PoolName)()
	pool, err := c.pool(ctx, r.Spec.PoolName, w)
	if err != nil {
		return nil, err
	}
	p, err := pools.Parse(pool.Spec)
	if err != nil {
		return nil, refusef(v2.ReasonPoolInvalid, "AddressPool %s can't be used: %s", pool.Name, oneLine(err))
	}
	if pool.Spec.Purpose == v2.PurposeFloating {
		return nil, refusef(v2.ReasonPoolPurpose, "AddressPool %s has floating addresses only (spec.purpose): choose another one by the annotation %s of the namespace", pool.Name, v2.AnnotationPool)
	}
	if pool.Spec.Drain {
		return nil, refusef(v2.ReasonPoolDraining, "%s: choose another one by the annotation %s of the namespace, or end that by \"coilctl pools drain %s --undo\"",
			pools.Draining(pool.Name), v2.AnnotationPool, pool.Name)
	}
	h, node, err := c.holder(ctx, r)
	if err != nil {
		return nil, err
	}
	if s, _ := pools.Suspended(pool, c.Claims(pool.Name), c.now()); s.Status == metav1.ConditionTrue {
		return nil, refusef(v2.ReasonPoolSuspended, "AddressPool %s is suspended: %s", pool.Name, s.Message)
	}
	if err := c.requireRoom(node, pool.Name, p.BlockSize()); err != nil {
		return nil, err
	}
	c.ledger.Open(pool)
	return c.carve(ctx, r, w, pool, p, h)
}

// madeFor returns the names of blocks that may have been made for a request, in the
// same order each time.
func (c *Controller) madeFor(r *v2.BlockRequest, w *work) []string {
	names := slices.Clone(c.unseen[r.UID])
	for _, b := range c.cachedFor(r) {
		names = append(names, b.Name)
	}
	if w.made != "" {
		names = append(names, w.made)
	}
	if w.attempt != nil {
		names = append(names, pools.BlockName(r.Spec.PoolName, w.attempt.Index))
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// cachedFor returns the blocks of the cache that were made for a request.
func (c *Controller) cachedFor(r *v2.BlockRequest) []*v2.AddressBlock {
	return slices.DeleteFunc(c.made.Under(string(r.UID)), func(b *v2.AddressBlock) bool { return b.DeletionTimestamp != nil })
}

// ours returns a block as the API server has it, or nil if it isn't there, is on
// its way out, or was not made for the request.
func (c *Controller) ours(ctx context.Context, r *v2.BlockRequest, name string) (*v2.AddressBlock, error) {
	b, err := c.cfg.Coil.CoilV2().AddressBlocks().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read AddressBlock %s: %w", name, err)
	}
	c.ledger.Found(b)
	if b.Labels[v2.LabelRequest] != string(r.UID) || b.DeletionTimestamp != nil {
		return nil, nil
	}
	return b, nil
}

// pool returns the pool of a request if it can give blocks.
func (c *Controller) pool(ctx context.Context, name string, w *work) (*v2.AddressPool, error) {
	since := w.seen
	cached := c.pools.Find(name)
	switch {
	case cached == nil:
		since = c.now() // new, or gone: nothing read before now tells which
	case cached.DeletionTimestamp != nil:
		return nil, terminating(name)
	}
	live, err := c.reader.read(ctx, name, since)
	switch {
	case apierrors.IsNotFound(err):
		return nil, refusef(v2.ReasonPoolNotFound, "There is no AddressPool %s: create it, or change the annotation %s of the namespace", name, v2.AnnotationPool)
	case err != nil:
		return nil, fmt.Errorf("read AddressPool %s: %w", name, err)
	case live.DeletionTimestamp != nil:
		return nil, terminating(name)
	case cached != nil && cached.UID != live.UID:
		c.reader.forget(name)
		return nil, fmt.Errorf("AddressPool %s was made again just now", name)
	}
	return live, nil
}

func terminating(pool string) error {
	return refusef(v2.ReasonPoolTerminating, "AddressPool %s is being deleted and gives no more blocks", pool)
}

// holder returns the node that gets the block. A request of a Node that was since made again
// under the same name is refused: the new one asks for itself.
func (c *Controller) holder(ctx context.Context, r *v2.BlockRequest) (pools.Holder, *corev1.Node, error) {
	h := pools.Holder{NodeName: r.Spec.NodeName, RequestUID: r.UID}
	for _, o := range r.OwnerReferences {
		if o.Kind == "Node" && o.Name == r.Spec.NodeName {
			h.NodeUID = o.UID
		}
	}
	n, err := c.nodes.Find(r.Spec.NodeName), error(nil)
	if n == nil || h.NodeUID != "" && n.UID != h.NodeUID {
		n, err = c.cfg.Core.CoreV1().Nodes().Get(ctx, r.Spec.NodeName, metav1.GetOptions{})
	}
	switch {
	case apierrors.IsNotFound(err):
		return h, nil, refusef(v2.ReasonNodeNotFound, "There is no Node %s", r.Spec.NodeName)
	case err != nil:
		return h, nil, fmt.Errorf("read Node %s: %w", r.Spec.NodeName, err)
	case h.NodeUID != "" && n.UID != h.NodeUID:
		return h, nil, refusef(v2.ReasonNodeNotFound, "Node %s was deleted and made again: it has UID %s, the request is from UID %s", n.Name, n.UID, h.NodeUID)
	}
	h.NodeUID = n.UID
	return h, n, nil
}

// carve creates the block of the next free index.
func (c *Controller) carve(ctx context.Context, r *v2.BlockRequest, w *work, pool *v2.AddressPool, p ipam.Pool, h pools.Holder) (*v2.AddressBlock, error) {
	for collisions := 0; ; collisions++ {
		if collisions > 0 {
			if bs := c.cachedFor(r); len(bs) > 0 || c.answered(r) {
				return nil, apierrors.NewConflict(v2.Resource("blockrequests"), r.Name, errors.New("another controller answers it"))
			}
		}
		if collisions == maxCollisions {
			if err := c.readBlocks(ctx, pool.Name); err != nil {
				return nil, err
			}
		}
		cand, err := c.next(w, pool, p, h.NodeName)
		if full := (*ledger.NoneFree)(nil); errors.As(err, &full) {
			return nil, refusef(v2.ReasonPoolExhausted, "AddressPool %s has no block left: %s; append a subnet to its spec.subnets", pool.Name, full)
		}
		if err != nil {
			return nil, err
		}
		faultpoint.At(faultpoint.CarveChosen)
		b, err := c.cfg.Coil.CoilV2().AddressBlocks().Create(ctx, pools.NewBlock(pool, cand.Index, cand.Block, h), metav1.CreateOptions{})
		switch {
		case err == nil:
			faultpoint.At(faultpoint.CarveCreated)
			w.made, w.attempt = b.Name, nil
			klog.FromContext(ctx).V(2).Info("Carved a block", "block", b.Name, "ranges", cand.Block, "node", h.NodeName)
			return b, nil
		case apierrors.IsAlreadyExists(err):
			w.attempt = nil
			name := pools.BlockName(pool.Name, cand.Index)
			b, err := c.ours(ctx, r, name)
			if b != nil {
				w.made = b.Name
			}
			if b != nil || err != nil {
				return b, err
			}
		case apierrors.IsInvalid(err):
			w.attempt = nil
			c.ledger.Release(pool.Name, cand.Index)
			return nil, refusef(v2.ReasonPoolInvalid, "The API server refuses AddressBlock %s: %s",
				pools.BlockName(pool.Name, cand.Index), oneLine(err))
		default:
			// It may exist all the same.
			w.attempt = &attempt{cand, pool.UID}
			return nil, fmt.Errorf("create AddressBlock %s: %w", pools.BlockName(pool.Name, cand.Index), err)
		}
	}
}

// next returns the candidate whose creation had no clear answer, else another one. Others
// may have got its addresses when its mark has ended, and a pool that was made again may
// not have them.
func (c *Controller) next(w *work, pool *v2.AddressPool, p ipam.Pool, node string) (ledger.Candidate, error) {
	if a := w.attempt; a != nil && a.pool == pool.UID && c.ledger.Renew(pool.Name, a.Candidate) {
		return a.Candidate, nil
	}
	return c.ledger.Pick(pool.Name, p, node)
}

// answered says whether the cache has got an answer since the work on r began.
func (c *Controller) answered(r *v2.BlockRequest) bool {
	now := c.requests.Find(r.Name)
	return now == nil || now.ResourceVersion != r.ResourceVersion
}

// dropSurplus deletes the blocks that were made for a request in vain, after
// another one became its answer.
func (c *Controller) dropSurplus(ctx context.Context, r *v2.BlockRequest, w *work) error {
	for _, name := range c.madeFor(r, w) {
		if name == r.Status.AddressBlockName {
			continue
		}
		b, err := c.ours(ctx, r, name)
		if err != nil {
			return err
		}
		if b == nil {
			continue
		}
		if err := c.deleteBlock(ctx, b); err != nil {
			return err
		}
		klog.FromContext(ctx).Info("Gave up a surplus block", "block", name, "request", r.Name, "answer", r.Status.AddressBlockName)
	}
	return nil
}

// requestVanished is called when there is no request any more to answer with b. The
// node may have seen b and be content, or have got another block from another
// controller; only then b is one too many.
func (c *Controller) requestVanished(ctx context.Context, r *v2.BlockRequest, b *v2.AddressBlock) error {
	l, err := c.cfg.Coil.CoilV2().AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: v2.LabelRequest + "=" + string(r.UID)})
	if err != nil {
		return fmt.Errorf("list the blocks made for BlockRequest %s: %w", r.Name, err)
	}
	kept := slices.DeleteFunc(l.Items, func(o v2.AddressBlock) bool { return o.DeletionTimestamp != nil })
	// Every controller finds the same block the oldest.
	oldest := slices.MinFunc(append(kept, *b), func(a, b v2.AddressBlock) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	if oldest.UID == b.UID {
		return nil
	}
	return c.deleteBlock(ctx, b)
}

// deleteBlock marks a block deleted if it is as it was read. Its node removes it
// when no pod has an address of it.
func (c *Controller) deleteBlock(ctx context.Context, b *v2.AddressBlock) error {
	if err := kube.DeleteAsRead(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b); err != nil {
		return fmt.Errorf("delete surplus AddressBlock %s: %w", b.Name, err)
	}
	return nil
}

// oneLine makes one sentence of a joined error.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

package blockrequest

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// claimed returns the block that a node holds by its own record: the one that exists, else it is
// made again.
func (c *Controller) claimed(ctx context.Context, r *v2.BlockRequest, w *work) (*v2.AddressBlock, error) {
	name := r.Spec.Claim
	b, err := c.coil.CoilV2().AddressBlocks().Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil && b.Labels[v2.LabelNode] == r.Spec.NodeName:
		return b, nil
	case err == nil:
		c.ledger.found(b)
		return nil, refusef(v2.ReasonBlockTaken, "AddressBlock %s is held by node %q: two nodes may use its addresses", name, b.Labels[v2.LabelNode])
	case !apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read AddressBlock %s: %w", name, err)
	}
	defer c.ledger.begin(r.Spec.PoolName)()
	pool, err := c.pool(ctx, r.Spec.PoolName, w)
	if err != nil {
		return nil, err
	}
	h, err := c.holder(ctx, r)
	if err != nil {
		return nil, err
	}
	index, ranges, err := blockNamed(pool, name)
	if err != nil {
		return nil, refusef(v2.ReasonPoolInvalid, "AddressPool %s has no block %s: %s", pool.Name, name, oneLine(err))
	}
	c.ledger.open(pool)
	if !c.ledger.claim(pool.Name, index, ranges) {
		return nil, refusef(v2.ReasonBlockTaken, "Addresses of AddressBlock %s are in another block: two nodes may use them", name)
	}
	b, err = c.coil.CoilV2().AddressBlocks().Create(ctx, plan.NewBlock(pool, index, ranges, h), metav1.CreateOptions{})
	switch {
	case err == nil:
		w.made = b.Name
		klog.FromContext(ctx).Info("Made a lost block again", "block", name, "node", h.NodeName)
		return b, nil
	case apierrors.IsInvalid(err):
		c.ledger.release(pool.Name, index)
		return nil, refusef(v2.ReasonPoolInvalid, "The API server refuses AddressBlock %s: %s", name, oneLine(err))
	}
	c.ledger.release(pool.Name, index) // it is looked for again
	return nil, fmt.Errorf("create AddressBlock %s: %w", name, err)
}

// blockNamed returns index and ranges of the block of a pool that has the name.
func blockNamed(pool *v2.AddressPool, name string) (int32, ipam.Block, error) {
	of, index, ok := plan.SplitBlockName(name)
	if !ok || of != pool.Name {
		return 0, ipam.Block{}, errors.New("its blocks have other names")
	}
	p, err := plan.Pool(pool.Spec)
	if err != nil {
		return 0, ipam.Block{}, err
	}
	b, err := p.Block(index)
	return index, b, err
}

// Claimed returns when this process last saw a claim of a block of the pool; zero is never.
func (c *Controller) Claimed(pool string) time.Time { return c.ledger.claimedAt(pool) }

// noteClaim keeps a pool from being carved from as soon as a claim is seen, before its turn comes.
func (c *Controller) noteClaim(r *v2.BlockRequest) {
	if r.Spec.Claim != "" && r.DeletionTimestamp == nil && !has(r, v2.BlockRequestComplete) && !has(r, v2.BlockRequestFailed) {
		c.ledger.noteClaim(r.Spec.PoolName)
	}
}

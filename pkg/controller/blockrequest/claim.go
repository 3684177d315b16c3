package blockrequest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// repeated are the reasons with which a claim is refused again and again, and that say nothing about other blocks.
var repeated = []string{v2.ReasonBlockTaken, v2.ReasonNodeLimit, v2.ReasonNodeAddress}

// refusedClaim is the claim of a block by a node.
type refusedClaim struct{ block, node string }

// wasRefused says whether a claim was refused a while ago.
func (c *Controller) wasRefused(block, node string) bool {
	at, ok := c.refused.Find(refusedClaim{block, node})
	return ok && c.now().Sub(at) <= ledger.ContestLife
}

// claim returns the block that a node holds by its own record: the one that exists, else it is
// made again.
func (c *Controller) claim(ctx context.Context, r *v2.BlockRequest, w *work) (*v2.AddressBlock, error) {
	name := r.Spec.Claim
	b, err := c.cfg.Coil.CoilV2().AddressBlocks().Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil && b.Labels[v2.LabelNode] == r.Spec.NodeName:
		return b, nil
	case err == nil:
		c.ledger.Found(b)
		c.ledger.Contest(name, r.Spec.NodeName)
		return nil, refusef(v2.ReasonBlockTaken, "AddressBlock %s is held by node %q: two nodes may use its addresses", name, b.Labels[v2.LabelNode])
	case !apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read AddressBlock %s: %w", name, err)
	}
	defer c.ledger.Begin(r.Spec.PoolName)()
	pool, err := c.pool(ctx, r.Spec.PoolName, w)
	if err != nil {
		return nil, err
	}
	h, node, err := c.holder(ctx, r)
	if err != nil {
		return nil, err
	}
	index, ranges, err := blockNamed(pool, name)
	if err != nil {
		return nil, refusef(v2.ReasonPoolInvalid, "AddressPool %s has no block %s: %s", pool.Name, name, oneLine(err))
	}
	if err := c.requireRoom(node, pool.Name, ranges.Size()); err != nil {
		return nil, err
	}
	if err := c.requireNoNode(pool, name, ranges, h.NodeName); err != nil {
		return nil, err
	}
	c.suspend(r) // the cache may have had another spec of the pool
	c.ledger.Open(pool)
	if !c.ledger.Claim(pool.Name, index, ranges, h.NodeName) {
		c.ledger.Contest(name, r.Spec.NodeName)
		return nil, refusef(v2.ReasonBlockTaken, "Addresses of AddressBlock %s are in another block: two nodes may use them", name)
	}
	b, err = c.cfg.Coil.CoilV2().AddressBlocks().Create(ctx, pools.NewBlock(pool, index, ranges, h), metav1.CreateOptions{})
	switch {
	case err == nil:
		w.made = b.Name
		klog.FromContext(ctx).Info("Made a lost block again", "block", name, "node", h.NodeName)
		return b, nil
	case apierrors.IsInvalid(err):
		c.ledger.Release(pool.Name, index)
		return nil, refusef(v2.ReasonPoolInvalid, "The API server refuses AddressBlock %s: %s", name, oneLine(err))
	}
	c.ledger.Release(pool.Name, index) // it is looked for again
	return nil, fmt.Errorf("create AddressBlock %s: %w", name, err)
}

// requireNoNode refuses the claim of a block that has an address of another Node. Other nodes make routes to a block, and
// a stolen token of a coild would lead the packets of that Node to the claiming one. The claim may be honest, for a block
// of Coil 2.x that was lost: an admin allows it then.
func (c *Controller) requireNoNode(pool *v2.AddressPool, name string, b ipam.Block, node string) error {
	other, addr, ok := c.ledger.NodeWithin(b, node)
	if !ok || claimAllowed(pool, name, node) {
		return nil
	}
	c.ledger.Contest(name, node) // pods may use it all the same
	return refusef(v2.ReasonNodeAddress, "AddressBlock %s has %s, the address of Node %s: replace the pods of node %s that have addresses of it, if there are any; else somebody else may use the token of its coild",
		name, addr, other, node)
}

// claimAllowed says whether an admin allows a claim; see AnnotationAllowClaims.
func claimAllowed(pool *v2.AddressPool, block, node string) bool {
	return slices.ContainsFunc(strings.Split(pool.Annotations[v2.AnnotationAllowClaims], ","), func(s string) bool {
		return strings.TrimSpace(s) == block+"/"+node
	})
}

// blockNamed returns index and ranges of the block of a pool that has the name.
func blockNamed(pool *v2.AddressPool, name string) (int32, ipam.Block, error) {
	of, index, ok := pools.SplitBlockName(name)
	if !ok || of != pool.Name {
		return 0, ipam.Block{}, errors.New("its blocks have other names")
	}
	p, err := pools.Parse(pool.Spec)
	if err != nil {
		return 0, ipam.Block{}, err
	}
	b, err := p.Block(index)
	return index, b, err
}

// Claims returns the last claim of a block of a pool, and since when this process leads.
func (c *Controller) Claims(pool string) pools.Claims {
	claims := c.claims.Get(pool)
	if led := c.led.Load(); led != nil {
		claims.Led = *led
	}
	return claims
}

// OnClaim makes the controller tell of each claim that suspends a pool.
func (c *Controller) OnClaim(tell func(pool string)) { c.tellClaim = tell }

// noteClaim keeps a pool from being carved from as soon as a claim is seen, before its turn comes. A claim of a block
// that the pool doesn't have says nothing about others, nor one that is repeated because another node has the block.
func (c *Controller) noteClaim(r *v2.BlockRequest) {
	if r.Spec.Claim == "" || r.DeletionTimestamp != nil || r.TrueCondition(v2.BlockRequestComplete) != nil || r.TrueCondition(v2.BlockRequestFailed) != nil {
		return
	}
	if pool := c.pools.Find(r.Spec.PoolName); pool != nil {
		if _, _, err := blockNamed(pool, r.Spec.Claim); err != nil {
			return
		}
	}
	c.suspend(r)
}

// suspend keeps the pool of a claim from being carved from. The pool may not exist: one that is made again, as after a
// restore, has blocks that are claimed.
func (c *Controller) suspend(r *v2.BlockRequest) {
	if c.wasRefused(r.Spec.Claim, r.Spec.NodeName) {
		return
	}
	c.claims.DeleteFunc(func(_ string, last pools.Claims) bool { return c.now().Sub(last.Last) >= pools.SuspendFor })
	c.claims.Set(r.Spec.PoolName, pools.Claims{Node: r.Spec.NodeName, Last: c.now()})
	if c.tellClaim != nil {
		c.tellClaim(r.Spec.PoolName)
	}
}

package floating

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// gathered is what a claim has.
type gathered struct {
	claim    *v2.AddressClaim
	blocks   []*v2.AddressBlock // all of the claim
	pool     ipam.Pool
	decision claims.Decision
	has      []*v2.AddressBlock
	// lost are addresses that it had, and is to get back.
	lost     []v2.ClaimedAddress
	problems []claims.Problem
}

func (g *gathered) problem(reason, format string, args ...any) {
	g.problems = append(g.problems, claims.Problem{Reason: reason, Message: fmt.Sprintf(format, args...)})
}

// gather makes a claim have what it asks for, as far as can be.
func (c *Controller) gather(ctx context.Context, claim *v2.AddressClaim) (*gathered, error) {
	g := &gathered{claim: claim}
	var old bool
	g.blocks, old = c.blocksOf(keyOf(claim))
	if pool := c.pools.Find(claim.Spec.Pool); pool != nil && !old && c.decide(g, pool) == nil && g.decision.Done() && !g.outdated() {
		g.has, g.problems = g.decision.Keep, g.decision.Problems
		return g, nil
	}
	// From here on Busy is true: the pool has to be read after that.
	end := c.cfg.Ledger.Begin(claim.Spec.Pool)
	defer func() { end() }()
	pool, err := c.read(ctx, g, old)
	if err != nil {
		return nil, err
	}
	if pool == nil {
		end()
		end = func() {}
		c.cfg.Ledger.Forget(claim.Spec.Pool)
		g.keepAll()
		g.problem(v2.ReasonPoolNotFound, "There is no AddressPool %s", claim.Spec.Pool)
		return g, nil
	}
	if problem := c.decide(g, pool); problem != nil {
		g.keepAll()
		g.problems = append(g.problems, *problem)
		return g, nil
	}
	return g, c.act(ctx, g, pool)
}

// keepAll is for a pool that says nothing about which addresses the claim may have.
func (g *gathered) keepAll() {
	g.has = slices.DeleteFunc(slices.Clone(g.blocks), func(b *v2.AddressBlock) bool {
		return b.DeletionTimestamp != nil || b.Floating.ReleasedAt != nil
	})
	slices.SortFunc(g.has, func(a, b *v2.AddressBlock) int { return strings.Compare(a.Name, b.Name) })
	g.lost = claims.Lost(g.claim, g.blocks)
}

// read reads the claim, its pool and its blocks from the API server, of a new claim the pool alone. The pool is nil if there is none.
func (c *Controller) read(ctx context.Context, g *gathered, old bool) (*v2.AddressPool, error) {
	api, key, claim := c.cfg.Coil.CoilV2(), keyOf(g.claim), g.claim
	isNew := !old && c.isNew(claim, g.blocks)
	if !isNew {
		var err error
		if claim, err = api.AddressClaims(g.claim.Namespace).Get(ctx, g.claim.Name, metav1.GetOptions{}); err != nil {
			return nil, fmt.Errorf("read AddressClaim %s: %w", key, err)
		}
		if claim.DeletionTimestamp != nil {
			return nil, fmt.Errorf("AddressClaim %s was deleted just now", key)
		}
	}
	pool, err := c.fresh.Get(ctx, claim.Spec.Pool)
	if apierrors.IsNotFound(err) {
		pool, err = nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read AddressPool %s: %w", claim.Spec.Pool, err)
	}
	cached := g.blocks
	g.claim = claim
	if pool == nil || isNew {
		return pool, nil
	}
	of := labels.Set{v2.LabelPool: claim.Spec.Pool, v2.LabelFloating: v2.FloatingValue}
	list, err := api.AddressBlocks().List(ctx, metav1.ListOptions{LabelSelector: of.String()})
	if err != nil {
		return nil, fmt.Errorf("list the floating AddressBlocks of AddressPool %s: %w", claim.Spec.Pool, err)
	}
	c.list(pool.Name, list.Items)
	g.blocks = nil
	for i := range list.Items {
		if b := &list.Items[i]; claims.Key(b) == key {
			g.blocks = append(g.blocks, b)
		}
	}
	for _, b := range cached {
		if slices.ContainsFunc(g.blocks, func(o *v2.AddressBlock) bool { return o.Name == b.Name }) {
			continue
		}
		// It is gone, or has lost its label.
		live, err := api.AddressBlocks().Get(ctx, b.Name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("read AddressBlock %s: %w", b.Name, err)
		}
		if err == nil && claims.Key(live) == key {
			g.blocks = append(g.blocks, live)
		}
	}
	return pool, nil
}

// decide says what the claim is to have, or why its pool can't give anything.
func (c *Controller) decide(g *gathered, pool *v2.AddressPool) *claims.Problem {
	p, err := pools.Parse(pool.Spec)
	if err != nil {
		return &claims.Problem{Reason: v2.ReasonPoolInvalid, Message: fmt.Sprintf("AddressPool %s can't be used: %s", pool.Name, oneLine(err))}
	}
	if p.BlockSize() != 1 {
		return &claims.Problem{Reason: v2.ReasonBlockSize, Message: fmt.Sprintf(
			"Blocks of AddressPool %s have %d addresses: floating addresses need a pool with blockSizeBits: 0", pool.Name, p.BlockSize())}
	}
	facts := claims.Facts{Claim: g.claim, Pool: p, Blocks: g.blocks}
	if pool.Spec.OpenStack != nil {
		if facts.Claim = claims.ProvidedTo(g.claim); facts.Claim == nil {
			return &claims.Problem{Reason: v2.ReasonWaitsForOpenStack, Message: fmt.Sprintf("OpenStack hasn't provided the address, which is for coil-lb-controller to ask for in AddressPool %s", pool.Name)}
		}
	}
	g.pool, g.decision = p, claims.Decide(facts)
	return nil
}

// outdated says whether a block that the claim keeps says something else of it.
func (g *gathered) outdated() bool {
	return slices.ContainsFunc(g.decision.Keep, func(b *v2.AddressBlock) bool { return claims.Outdated(b, g.claim) })
}

// act does what was decided.
func (c *Controller) act(ctx context.Context, g *gathered, pool *v2.AddressPool) error {
	d := g.decision
	g.problems = slices.Clone(d.Problems)
	for _, b := range d.Release {
		if err := c.release(ctx, b, g.claim.Spec.CoolDownSeconds); err != nil {
			return err
		}
	}
	for _, b := range d.Keep {
		if claims.Outdated(b, g.claim) {
			if _, err := c.take(ctx, g, b); err != nil {
				return err
			}
		}
		g.has = append(g.has, b)
	}
	if len(d.Retake)+len(d.Carve)+d.Any == 0 {
		return nil
	}
	if pool.DeletionTimestamp != nil {
		g.lost = claims.Lost(g.claim, g.blocks)
		g.problem(v2.ReasonPoolTerminating, "AddressPool %s is being deleted and gives no more addresses", pool.Name)
		return nil
	}
	if pool.Spec.Drain {
		g.lost = claims.Lost(g.claim, g.blocks)
		g.problem(v2.ReasonPoolDraining, "%s", pools.Draining(pool.Name))
		return nil
	}
	if only := pool.Spec.FloatingNamespaces; len(only) > 0 && !slices.Contains(only, g.claim.Namespace) {
		g.lost = claims.Lost(g.claim, g.blocks)
		g.problem(v2.ReasonClaimNamespace, "AddressPool %s gives floating addresses to other namespaces (spec.floatingNamespaces)", pool.Name)
		return nil
	}
	for _, b := range d.Retake {
		b, err := c.take(ctx, g, b)
		if err != nil {
			return err
		}
		g.has = append(g.has, b)
	}
	if len(d.Carve)+d.Any == 0 {
		return nil
	}
	if s, _ := pools.Suspended(pool, c.cfg.LostBlocks(pool.Name), c.now()); s.Status == metav1.ConditionTrue {
		// The addresses that were lost with those of nodes are the claim's all the same.
		d.Carve, d.Any = slices.DeleteFunc(slices.Clone(d.Carve), func(index int32) bool { return !g.had(pools.BlockName(pool.Name, index)) }), 0
		if len(d.Carve) < len(g.decision.Carve)+g.decision.Any {
			g.problem(v2.ReasonPoolSuspended, "AddressPool %s is suspended: %s", pool.Name, s.Message)
		}
	}
	c.cfg.Ledger.Open(pool)
	k := &carver{Controller: c, g: g, pool: pool, attempts: c.takeAttempts(g), pods: map[string][]corev1.Pod{}}
	defer k.keepAttempts()
	for _, index := range d.Carve {
		if err := k.one(ctx, index); err != nil {
			return err
		}
	}
	return k.any(ctx, d.Any)
}

// errOldDefinition: the API server has dropped the field floating.
var errOldDefinition = errors.New("the definition of AddressBlocks is older than this program: apply that of its version")

// take makes a block say that it is the claim's.
func (c *Controller) take(ctx context.Context, g *gathered, b *v2.AddressBlock) (*v2.AddressBlock, error) {
	after, err := kube.PatchAsRead(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b, claims.Taken(b, g.claim))
	switch {
	case err == nil && after == nil:
		err = errors.New("it is gone")
	case err == nil && after.Floating == nil:
		err = errOldDefinition
	}
	if err != nil {
		return nil, fmt.Errorf("take AddressBlock %s for AddressClaim %s: %w", b.Name, klog.KObj(g.claim), err)
	}
	if b.Floating == nil || b.Floating.ReleasedAt != nil {
		klog.FromContext(ctx).Info("Took a floating address back", "block", b.Name, "for", claims.Owner(g.claim).Summary)
	}
	return after, nil
}

// had says whether the status of the claim has a block.
func (g *gathered) had(name string) bool {
	return slices.ContainsFunc(g.claim.Status.Addresses, func(a v2.ClaimedAddress) bool { return a.Block == name })
}

// oneLine makes one sentence of a joined error.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

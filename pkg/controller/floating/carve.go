package floating

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan/claims"
	"github.com/coil-net/coil/pkg/plan/pools"
)

// maxCollisions is how many names in a row may be taken against the belief of the ledger before the claim waits for the cache.
const maxCollisions = 8

// carver makes blocks for one claim.
type carver struct {
	*Controller
	g    *gathered
	pool *v2.AddressPool
	// attempts are blocks whose creation had no clear answer, and that the API server hadn't when it was asked.
	attempts []ledger.Candidate
	// pods are those of nodes that were asked for.
	pods map[string][]corev1.Pod
}

func (c *Controller) takeAttempts(g *gathered) []ledger.Candidate {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.attempts[keyOf(g.claim)]
}

func (k *carver) keepAttempts() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if key := keyOf(k.g.claim); len(k.attempts) > 0 {
		k.Controller.attempts[key] = k.attempts
	} else {
		delete(k.Controller.attempts, key)
	}
}

// again returns an attempt that may be repeated: its mark holds still. It is one of the index, or any one if index is negative.
func (k *carver) again(index int32) (ledger.Candidate, bool) {
	for i, a := range k.attempts {
		if index < 0 || a.Index == index {
			k.attempts = slices.Delete(slices.Clone(k.attempts), i, i+1)
			if b, err := k.g.pool.Block(a.Index); err != nil || b != a.Block || k.g.pool.Excluded(a.Index) || !k.cfg.Ledger.Renew(k.pool.Name, a) {
				return k.again(index)
			}
			return a, true
		}
	}
	return ledger.Candidate{}, false
}

// one makes the block of an index, or says who has it.
func (k *carver) one(ctx context.Context, index int32) error {
	block, err := k.g.pool.Block(index)
	if err != nil {
		return err
	}
	if k.g.pool.Excluded(index) {
		k.g.problem(v2.ReasonAddressExcluded, "%s is excluded by AddressPool %s (spec.exclude)", block.At(0), k.pool.Name)
		return nil
	}
	cand, ok := k.again(index)
	if !ok {
		cand, ok = k.cfg.Ledger.Take(k.pool.Name, index, block)
	}
	if ok {
		before := len(k.g.problems)
		if made, err := k.create(ctx, cand); made || err != nil || len(k.g.problems) > before {
			return err
		}
	}
	return k.explain(ctx, index, block)
}

// any makes n blocks.
func (k *carver) any(ctx context.Context, n int) error {
	refused := len(k.g.problems)
	for collisions := 0; n > 0; {
		cand, ok := k.again(-1)
		if !ok {
			var err error
			cand, err = k.cfg.Ledger.Pick(k.pool.Name, k.g.pool, "")
			if full := (*ledger.NoneFree)(nil); errors.As(err, &full) {
				k.g.problem(v2.ReasonPoolExhausted, "AddressPool %s has no address left for %d more: %s; append a subnet to its spec.subnets", k.pool.Name, n, full)
				return nil
			}
			if err != nil {
				return err
			}
		}
		made, err := k.create(ctx, cand)
		if err != nil {
			return err
		}
		if made {
			n--
			continue
		}
		if len(k.g.problems) > refused {
			return nil // the API server refuses it
		}
		if collisions++; collisions == maxCollisions {
			return fmt.Errorf("blocks of AddressPool %s are taken that the cache doesn't show yet", k.pool.Name)
		}
	}
	return nil
}

// create makes a block, and returns false if its name is taken.
func (k *carver) create(ctx context.Context, cand ledger.Candidate) (bool, error) {
	faultpoint.At(faultpoint.FloatingChosen)
	name := pools.BlockName(k.pool.Name, cand.Index)
	b, err := k.cfg.Coil.CoilV2().AddressBlocks().Create(ctx, pools.NewFloating(k.pool, cand.Index, cand.Block, claims.Floating(k.g.claim)), metav1.CreateOptions{})
	switch {
	case err == nil && b.Floating == nil:
		// It would belong to nobody, and keep its pool for good.
		rest, err := kube.PatchMetadata(ctx, k.cfg.Coil.CoilV2().AddressBlocks(), b, map[string]any{"finalizers": []string{}})
		if err == nil && rest != nil {
			err = kube.DeleteAsRead(ctx, k.cfg.Coil.CoilV2().AddressBlocks(), rest)
		}
		return false, errors.Join(errOldDefinition, err)
	case err == nil:
		faultpoint.At(faultpoint.FloatingCreated)
		k.made(b)
		k.g.has = append(k.g.has, b)
		klog.FromContext(ctx).Info("Gave a floating address", "block", name, "addresses", cand.Block, "to", b.Floating.Owner.Summary)
		return true, nil
	case apierrors.IsAlreadyExists(err):
		return false, nil
	case apierrors.IsInvalid(err), apierrors.IsForbidden(err):
		k.cfg.Ledger.Release(k.pool.Name, cand.Index)
		k.g.problem(v2.ReasonPoolInvalid, "The API server refuses AddressBlock %s: %s", name, oneLine(err))
		return false, nil
	default:
		// It may exist all the same.
		k.attempts = append(k.attempts, cand)
		return false, fmt.Errorf("create AddressBlock %s: %w", name, err)
	}
}

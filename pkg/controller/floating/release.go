package floating

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/claims"
)

// release begins the cool-down of a block.
func (c *Controller) release(ctx context.Context, b *v2.AddressBlock, coolDownSeconds int32) error {
	after, err := kube.PatchAsRead(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b, map[string]any{
		"floating": map[string]any{"releasedAt": metav1.NewTime(c.now()), "coolDownSeconds": coolDownSeconds},
	})
	if err != nil {
		return fmt.Errorf("release AddressBlock %s: %w", b.Name, err)
	}
	if after != nil {
		klog.FromContext(ctx).Info("Released a floating address", "block", b.Name, "of", b.Floating.Owner.Summary, "coolDownSeconds", coolDownSeconds)
	}
	return nil
}

// free deletes the blocks whose cool-down is over, and returns when to look again; 0 is "on a change".
func (c *Controller) free(ctx context.Context, blocks []*v2.AddressBlock) (time.Duration, error) {
	var errs []error
	var next time.Duration
	for _, b := range blocks {
		if b.Floating.ReleasedAt == nil {
			if b.DeletionTimestamp != nil {
				errs = append(errs, c.release(ctx, b, b.Floating.CoolDownSeconds))
			}
			continue
		}
		if wait := claims.Cooling(b, c.releaseOf(b), c.now()); wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
			continue
		}
		errs = append(errs, c.remove(ctx, b))
	}
	return next, errors.Join(errs...)
}

// remove deletes a block, or removes the finalizer of a deleted one: from then on its name is free.
func (c *Controller) remove(ctx context.Context, b *v2.AddressBlock) error {
	api := c.cfg.Coil.CoilV2().AddressBlocks()
	if b.DeletionTimestamp == nil {
		if err := kube.DeleteAsRead(ctx, api, b); err != nil {
			return fmt.Errorf("delete AddressBlock %s: %w", b.Name, err)
		}
		return nil
	}
	faultpoint.At(faultpoint.FloatingDeleted)
	if !slices.Contains(b.Finalizers, v2.Finalizer) {
		return nil // others keep it
	}
	rest := slices.DeleteFunc(slices.Clone(b.Finalizers), func(f string) bool { return f == v2.Finalizer })
	if _, err := kube.PatchMetadata(ctx, api, b, map[string]any{"finalizers": rest}); err != nil {
		return fmt.Errorf("remove the finalizer of AddressBlock %s: %w", b.Name, err)
	}
	klog.FromContext(ctx).Info("A floating address is free", "block", b.Name, "was", b.Floating.Owner.Summary)
	return nil
}

// releaseOf is what this process knows of the release of the block as it is.
func (c *Controller) releaseOf(b *v2.AddressBlock) claims.Release {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := b.Floating.ReleasedAt.Time
	r, ok := c.seen[b.UID]
	if !ok || !r.at.Equal(at) {
		r = released{at, claims.Release{Seen: c.now()}}
		c.seen[b.UID] = r
	}
	return r.Release
}

package assign

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// Del detaches a pod. It succeeds when there is nothing to detach, and as soon as
// nothing reaches the pod any more: its link is removed by Run.
func (a *Assigner) Del(ctx context.Context, id attachment.ID) error {
	done, err := a.flight.del(ctx, id)
	if err != nil || done == nil {
		return err
	}
	defer done()
	_, err = a.detach(ctx, id)
	return err
}

// detach withdraws what is announced and the routes, and has the link removed, after which the address cools.
// The outcome of the removal is told to the returned channel.
func (a *Assigner) detach(ctx context.Context, id attachment.ID) (<-chan error, error) {
	faultpoint.At(faultpoint.DelBegun)
	result := make(chan error, 1)
	alloc, err := a.store.Release(ctx, id)
	unrecorded := errors.Is(err, store.ErrReadOnly)
	if unrecorded {
		klog.FromContext(ctx).Error(err, "Detaching a pod without recording it yet", "containerID", id.ContainerID)
		alloc, err = a.store.Get(ctx, id)
	}
	target := podnet.Target{ID: id, HostIfIndex: alloc.HostIfIndex}
	if errors.Is(err, store.ErrNotFound) {
		if err := a.unlink(ctx, target); err != nil {
			return nil, err
		}
		result <- nil
		return result, nil
	}
	if err != nil {
		return nil, fmt.Errorf("release the address: %w", err)
	}
	faultpoint.At(faultpoint.DelReleased)
	if err := a.links.Withdraw(ctx, alloc.Address.Addrs()...); err != nil {
		return nil, err
	}
	if err := a.net.Withdraw(ctx, alloc.Address); err != nil {
		return nil, fmt.Errorf("withdraw %s: %w", alloc.Address, err)
	}
	faultpoint.At(faultpoint.DelWithdrawn)
	if unrecorded {
		// If coild ends now, the missing link alone tells of this DEL: restore takes down
		// recorded attachments without one.
		if err := a.unlink(ctx, target); err != nil {
			return nil, err
		}
	}
	a.removals.add(&removal{
		Target: target, addr: alloc.Address, pool: alloc.Pool, unrecorded: unrecorded, leave: a.flight.removing(id), result: result,
	})
	return result, nil
}

// unlink removes the link of one attachment at once, if there is one.
func (a *Assigner) unlink(ctx context.Context, t podnet.Target) error {
	if err := a.net.RemoveAll(ctx, t)[0]; err != nil {
		return fmt.Errorf("remove the link: %w", err)
	}
	return nil
}

// remove is detach that waits for the removal.
func (a *Assigner) remove(ctx context.Context, id attachment.ID) error {
	removed, err := a.detach(ctx, id)
	if err != nil {
		return err
	}
	select {
	case err := <-removed:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

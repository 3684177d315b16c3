package assign

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// begin takes an address, and meanwhile has the kernel make the link, which takes as
// long. The link is nil unless the address is new and the pod is all that is missing;
// an ADD does without it, too.
//
// If coild ends in between, there may be a link without a record: the next ADD or DEL of
// the attachment finds it by its name.
func (a *Assigner) begin(ctx context.Context, r node.AddRequest) (store.Allocation, *podnet.Link, error) {
	if a.short.Get(r.Pool) {
		// A link that isn't needed costs the kernel more than the one that is.
		alloc, err := a.reserve(ctx, r)
		return alloc, nil, err
	}
	var alloc store.Allocation
	var err error
	var reserving sync.WaitGroup
	reserving.Go(func() { alloc, err = a.reserve(ctx, r) })
	link, linkErr := a.net.Prepare(ctx, podnet.Pod{ID: r.ID, Netns: r.Netns.Path})
	reserving.Wait()
	if linkErr != nil {
		klog.FromContext(ctx).V(4).Info("No link was prepared", "containerID", r.ID.ContainerID, "reason", linkErr)
		return alloc, nil, err
	}
	if err == nil && alloc.State == store.Pending && alloc.Netns == r.Netns {
		return alloc, link, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.cfg.UndoTimeout)
	defer cancel()
	return alloc, nil, errors.Join(err, a.net.Discard(ctx, link))
}

// reserve takes an address, and waits for a block if need be.
func (a *Assigner) reserve(ctx context.Context, r node.AddRequest) (store.Allocation, error) {
	wait, cancel := context.WithTimeout(ctx, a.cfg.BlockTimeout)
	defer cancel()
	req := store.Request{ID: r.ID, Pod: r.Pod, Netns: r.Netns, Pool: r.Pool}
	var noBlock error // why none came
	for {
		generation := a.blocks.Generation(r.Pool)
		req.Blocks = a.blocks.Usable(r.Pool)
		alloc, err := a.store.Reserve(ctx, req)
		if err == nil {
			if req.Yield {
				klog.FromContext(ctx).Info("No block came, so this address is given again sooner than it should be, unless one was freed meanwhile",
					"address", alloc.Address, "pool", r.Pool, "reason", noBlock)
			} else {
				a.short.Delete(r.Pool)
			}
			faultpoint.At(faultpoint.AddReserved)
			return alloc, nil
		}
		if !errors.Is(err, store.ErrNoAddress) {
			return store.Allocation{}, fmt.Errorf("reserve an address: %w", err)
		}
		if req.Yield {
			break
		}
		a.short.Set(r.Pool, true)
		if noBlock = a.blocks.Ask(wait, r.Pool, generation); noBlock == nil {
			continue
		}
		if ctx.Err() != nil {
			return store.Allocation{}, context.Cause(ctx)
		}
		// No block to be had: an address that was freed just now is better than none. The pool may have addresses
		// that are free but for their links.
		a.removals.settled(ctx, r.Pool, a.cfg.UndoTimeout)
		req.Yield = true
	}
	if errors.Is(noBlock, context.DeadlineExceeded) {
		noBlock = fmt.Errorf("no block of AddressPool %q came within %s: is coil-ipam-controller running, and the API server reachable?",
			r.Pool, a.cfg.BlockTimeout)
	}
	return store.Allocation{}, unavailable{noBlock}
}

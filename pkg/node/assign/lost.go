package assign

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/syncmap"
)

// suspects has the times since when attachments have seemed lost. One is released only when it still seems so at a
// later look.
type suspects = syncmap.Map[attachment.ID, time.Time]

// GC releases the attachments that the runtime doesn't list as valid and that are
// older than the call. An attachment whose link still exists is released
// only when a second call, at least Suspicion later, doesn't list it either: a
// runtime that lost its own state must not cost running pods their network.
func (a *Assigner) GC(ctx context.Context, valid []attachment.ID, called time.Time) error {
	keep := map[attachment.ID]bool{}
	for _, id := range valid {
		keep[id] = true
	}
	return a.releaseLost(ctx, &a.unlisted, called, func(alloc store.Allocation) bool {
		return !keep[alloc.ID] && !alloc.Since.After(called)
	})
}

// Sweep releases attachments whose link is gone: the runtime never sent the DEL,
// or sent it while coild was away. It goes on with a DEL that failed half-way, which
// the runtime may not repeat. While the network namespace is there, the pod may have
// deleted the link itself: it keeps status.podIP and so its address, until the namespace
// goes or DEL comes.
func (a *Assigner) Sweep(ctx context.Context) error {
	attached, err := a.net.Attached(ctx)
	if err != nil {
		return err
	}
	links := make(map[attachment.ID]bool, len(attached))
	for _, id := range attached {
		links[id] = true
		a.linkless.Delete(id)
	}
	return a.releaseLost(ctx, &a.unlinked, time.Now(), func(alloc store.Allocation) bool { return !links[alloc.ID] })
}

// Linkless says whether an attachment keeps its address without a link: no route can lead to it.
func (a *Assigner) Linkless(alloc store.Allocation) bool {
	index, ok := a.linkless.Find(alloc.ID)
	return ok && index == alloc.HostIfIndex
}

// keep says whether an attachment without a link keeps its address, and tells so once.
func (a *Assigner) keep(ctx context.Context, alloc store.Allocation) bool {
	if alloc.State != store.Attached || !a.cfg.Lives(alloc) {
		return false
	}
	if !a.Linkless(alloc) {
		a.linkless.Set(alloc.ID, alloc.HostIfIndex)
		a.links.Changed(alloc.Block)
		klog.FromContext(ctx).Info("A pod has lost its link, its address is kept", "pod", klog.KRef(alloc.Namespace, alloc.Name),
			"containerID", alloc.ContainerID, "address", alloc.Address)
		a.cfg.Warn("PodLinkMissing", "%s of pod %s/%s (container %s) is gone while its network namespace is there: the address %s is kept, delete the pod",
			alloc.IfName, alloc.Namespace, alloc.Name, alloc.ContainerID, alloc.Address)
	}
	return true
}

func (a *Assigner) releaseLost(ctx context.Context, seen *suspects, called time.Time, isLost func(store.Allocation) bool) error {
	all, err := a.store.List(ctx)
	if err != nil {
		return fmt.Errorf("list attachments: %w", err)
	}
	recorded := make(map[attachment.ID]bool, len(all))
	for _, alloc := range all {
		recorded[alloc.ID] = true
	}
	// The others were removed by a DEL.
	seen.DeleteFunc(func(id attachment.ID, _ time.Time) bool { return !recorded[id] })
	a.linkless.DeleteFunc(func(id attachment.ID, _ int) bool { return !recorded[id] })
	var errs []error
	for _, alloc := range all {
		since, suspected := seen.Find(alloc.ID)
		switch {
		case a.flight.busy(alloc.ID):
			continue
		case alloc.State == store.Releasing:
			errs = append(errs, a.delUnchanged(ctx, alloc))
			continue
		case !isLost(alloc):
			seen.Delete(alloc.ID)
			continue
		case !suspected:
			seen.Set(alloc.ID, called)
			continue
		case called.Sub(since) < a.cfg.Suspicion:
			continue
		case seen == &a.unlinked && a.keep(ctx, alloc):
			continue
		}
		klog.FromContext(ctx).Info("Releasing a lost attachment", "pod", klog.KRef(alloc.Namespace, alloc.Name),
			"containerID", alloc.ContainerID, "address", alloc.Address, "state", alloc.State)
		if err := a.delUnchanged(ctx, alloc); err != nil {
			errs = append(errs, err)
			continue
		}
		seen.Delete(alloc.ID)
	}
	return errors.Join(errs...)
}

// delUnchanged detaches an attachment unless something has happened to it since alloc
// was read, or just happens.
func (a *Assigner) delUnchanged(ctx context.Context, alloc store.Allocation) error {
	done := a.flight.try(alloc.ID)
	if done == nil {
		return nil
	}
	defer done()
	now, err := a.store.Get(ctx, alloc.ID)
	if err == nil && (now.State != alloc.State || !now.Since.Equal(alloc.Since)) || errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err == nil {
		_, err = a.detach(ctx, alloc.ID)
	}
	if err != nil {
		return fmt.Errorf("release %s: %w", alloc.ContainerID, err)
	}
	return nil
}

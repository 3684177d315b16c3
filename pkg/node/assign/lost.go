package assign

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/store"
)

// suspects are attachments that seemed lost, and since when. One is released
// only when it still seems so at a later look.
type suspects struct {
	mu    *sync.Mutex
	since map[attachment.ID]time.Time
}

func newSuspects() suspects {
	return suspects{mu: new(sync.Mutex), since: map[attachment.ID]time.Time{}}
}

// confirm says whether id has seemed lost for long enough at the time now, and
// remembers that it seems so.
func (s suspects) confirm(id attachment.ID, now time.Time, enough time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	first, ok := s.since[id]
	if !ok {
		s.since[id] = now
		return false
	}
	return now.Sub(first) >= enough
}

// keepOnly forgets what isn't among the attachments.
func (s suspects) keepOnly(all []store.Allocation) {
	ids := make(map[attachment.ID]bool, len(all))
	for _, a := range all {
		ids[a.ID] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.since, func(id attachment.ID, _ time.Time) bool { return !ids[id] })
}

func (s suspects) clear(id attachment.ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.since, id)
}

// GC releases what isn't among the attachments that the runtime says are valid
// and is older than the call. An attachment whose link still exists is released
// only when a second call, at least Suspicion later, doesn't list it either: a
// runtime that lost its own state must not cost running pods their network.
func (a *Assigner) GC(ctx context.Context, valid []attachment.ID, called time.Time) error {
	keep := map[attachment.ID]bool{}
	for _, id := range valid {
		keep[id] = true
	}
	return a.releaseLost(ctx, a.unlisted, called, func(alloc store.Allocation) bool {
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
	}
	a.linkless.forget(func(id attachment.ID) bool { return links[id] })
	return a.releaseLost(ctx, a.unlinked, time.Now(), func(alloc store.Allocation) bool { return !links[alloc.ID] })
}

// linkless are the attachments that keep their addresses without a link, with the index that it
// had: an ADD may make another one.
type linkless struct {
	mu    *sync.Mutex
	index map[attachment.ID]int
}

func newLinkless() linkless { return linkless{mu: new(sync.Mutex), index: map[attachment.ID]int{}} }

// note remembers an attachment, and says whether it is new.
func (l linkless) note(alloc store.Allocation) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, ok := l.index[alloc.ID]
	l.index[alloc.ID] = alloc.HostIfIndex
	return !ok || before != alloc.HostIfIndex
}

// forget forgets those that aren't so any more.
func (l linkless) forget(gone func(attachment.ID) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.index, func(id attachment.ID, _ int) bool { return gone(id) })
}

// Linkless says whether an attachment keeps its address without a link: no route can lead to it.
func (a *Assigner) Linkless(alloc store.Allocation) bool {
	a.linkless.mu.Lock()
	defer a.linkless.mu.Unlock()
	index, ok := a.linkless.index[alloc.ID]
	return ok && index == alloc.HostIfIndex
}

// keep says whether an attachment without a link keeps its address, and tells so once.
func (a *Assigner) keep(ctx context.Context, alloc store.Allocation) bool {
	if alloc.State != store.Attached || !a.cfg.Lives(alloc) {
		return false
	}
	if a.linkless.note(alloc) {
		klog.FromContext(ctx).Info("A pod has lost its link, its address is kept", "pod", klog.KRef(alloc.Namespace, alloc.Name),
			"containerID", alloc.ContainerID, "address", alloc.Address)
		a.cfg.Warn("PodLinkMissing", "%s of pod %s/%s (container %s) is gone while its network namespace is there: the address %s is kept, delete the pod",
			alloc.IfName, alloc.Namespace, alloc.Name, alloc.ContainerID, alloc.Address)
	}
	return true
}

func (a *Assigner) releaseLost(ctx context.Context, seen suspects, called time.Time, isLost func(store.Allocation) bool) error {
	all, err := a.store.List(ctx)
	if err != nil {
		return fmt.Errorf("list attachments: %w", err)
	}
	seen.keepOnly(all) // others were removed by a DEL
	a.linkless.forget(func(id attachment.ID) bool {
		return !slices.ContainsFunc(all, func(a store.Allocation) bool { return a.ID == id })
	})
	var errs []error
	for _, alloc := range all {
		switch {
		case a.flight.busy(alloc.ID):
			continue
		case alloc.State == store.Releasing:
			errs = append(errs, a.delUnchanged(ctx, alloc))
			continue
		case !isLost(alloc):
			seen.clear(alloc.ID)
			continue
		case !seen.confirm(alloc.ID, called, a.cfg.Suspicion):
			continue
		case seen.mu == a.unlinked.mu && a.keep(ctx, alloc):
			continue
		}
		klog.FromContext(ctx).Info("Releasing a lost attachment", "pod", klog.KRef(alloc.Namespace, alloc.Name),
			"containerID", alloc.ContainerID, "address", alloc.Address, "state", alloc.State)
		if err := a.delUnchanged(ctx, alloc); err != nil {
			errs = append(errs, err)
			continue
		}
		seen.clear(alloc.ID)
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

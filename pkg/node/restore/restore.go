// Package restore brings record, kernel and AddressBlocks in line when coild
// starts, before it serves ADD.
//
// It owns the decision whom to believe. Any one of the three may be missing or
// wrong, and an empty answer of one is never proof of absence. It must not know how
// the three are read or written.
//
//	link   record                 action
//	yes    attached               keep
//	yes    none                   record it as found: the record was lost
//	yes    pending, releasing     take it down: its ADD or DEL died
//	whole  pending                record it as attached: the record may be of a moment in its ADD
//	no     any                    take it down: the pod has no network any more, as
//	                              after a reboot; its address cools
//	no     none                   nothing
//	yes    of another address, or the link of another
//	       attachment has it      drop the record: it is of an earlier time
//
// A block that only the record has keeps its addresses, gives no new ones and is
// reported. The addresses of blocks whose history is lost cool down first.
//
// A whole link has all that an ADD makes, last of all the routes to the recorded address and no other, and the network
// namespace that it was made for is there. If its ADD died after that, it is as one that died when it had recorded
// the link: the runtime sends DEL, repeats ADD, or GC doesn't list it.
package restore

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/delqueue"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// Links lists the host's links of pods.
type Links interface {
	// Recover removes unfinished links, and returns all others, or an error; never a part.
	Recover(ctx context.Context) (podnet.Recovered, error)
	// Label makes an unlabelled link look like one that was attached by this version.
	Label(ctx context.Context, f podnet.Found) error
}

// Store is the node's record; see package store.
type Store interface {
	store.Store
	// Rebuilt says that a record which was made anew has all that there is.
	Rebuilt(ctx context.Context) error
}

// Restorer implements the package's task.
type Restorer struct {
	Store Store
	Links Links
	// Detach takes an attachment down, whatever there is of it.
	Detach func(ctx context.Context, id attachment.ID) error
	// Queue has the DELs that came while coild was away.
	Queue delqueue.Queue
	// Lives says whether the network namespace that an attachment was made in is there, as far as that can be
	// told. Without it no link is whole.
	Lives func(store.Allocation) bool

	// Fresh says that the record was made anew. It is false when all was in line once.
	Fresh bool
	// The fields from here on are for InLine. BootID is that of this boot.
	BootID string
	Pods   Pods
	// WiredOf returns the pods, among the allocations, that have links and routes.
	WiredOf func([]store.Allocation) []podnet.Wired
	// Remember makes recorded blocks count as exported.
	Remember func([]store.Usage)
	// Claim returns the blocks that this machine uses, and makes them its Node's.
	Claim func(ctx context.Context, usage []store.Usage, fresh bool) ([]store.Block, error)
	// Export announces the node's blocks.
	Export func(context.Context) error
	// Adopted is called when there are links that Mend hasn't looked at.
	Adopted func()
	// Guard makes the host's ruleset what it should be. The routes to pods are there: they say which addresses pods
	// have. A node whose kernel can't have the ruleset is still a node.
	Guard func(ctx context.Context, repair bool) error
	// Warn records an Event about the Node.
	Warn func(reason, format string, args ...any)
}

// Report has the findings of Restore, and counts its changes.
type Report struct {
	// Recovered is the state of the kernel at first.
	podnet.Recovered
	// Kept, Adopted and TakenDown count attachments, Outdated records that the kernel contradicts, and Replayed queued
	// DELs.
	Kept, Adopted, TakenDown, Outdated, Replayed int
	// Conflicts are links whose addresses another attachment has, or that have none.
	// They are left as they are.
	Conflicts []string
	// Homeless are addresses of adopted links that are in no block of the node, recorded
	// ones included, which are claimed: another node may give them, too.
	Homeless []string
	// MissingBlocks are recorded blocks in use that the API server doesn't have for the node.
	MissingBlocks []string
}

// Restore does the package's task. The history of the blocks is unknown if the record
// is Fresh. The error means that ADD must not be served yet, and that Restore should
// be called again.
func (r *Restorer) Restore(ctx context.Context, blocks []store.Block) (Report, error) {
	var rep Report
	// The records first: an attachment that a DEL removes meanwhile may then have a
	// record without a link, but never a link without a record, which would be adopted.
	all, err := r.Store.List(ctx)
	if err != nil {
		return rep, fmt.Errorf("list records: %w", err)
	}
	if rep.Recovered, err = r.Links.Recover(ctx); err != nil {
		return rep, fmt.Errorf("list links: %w", err)
	}
	found := rep.Found
	known, err := r.recordBlocks(ctx, blocks, &rep)
	if err != nil {
		return rep, err
	}
	faultpoint.At(faultpoint.RestoreBlocks)
	if all, err = r.dropOutdated(ctx, all, found, &rep); err != nil {
		return rep, err
	}
	records := map[attachment.ID]store.Allocation{}
	for _, a := range all {
		records[a.ID] = a
	}
	links, whole := map[attachment.ID]bool{}, map[attachment.ID]bool{}
	for _, f := range found {
		links[f.ID] = true
		if f.Unlabelled && f.Pool != "" {
			// It is found without that, only less quickly.
			if err := r.Links.Label(ctx, f); err != nil {
				klog.FromContext(ctx).Error(err, "Labelling a link of Coil 2.x failed", "containerID", f.ContainerID)
			}
		}
		r.noteHomeless(f, known, &rep)
		if a, ok := records[f.ID]; ok {
			if err := r.correct(ctx, a, f); err != nil {
				return rep, err
			}
			if whole[f.ID], err = r.complete(ctx, a, f); err != nil {
				return rep, err
			}
			if whole[f.ID] {
				rep.Adopted++
			}
			continue
		}
		if err := r.adopt(ctx, f, &rep); err != nil {
			return rep, err
		}
		faultpoint.At(faultpoint.RestoreAdopted)
	}
	faultpoint.At(faultpoint.RestoreLinks)
	for _, a := range all {
		if whole[a.ID] {
			continue
		}
		if links[a.ID] && a.State == store.Attached {
			rep.Kept++
			continue
		}
		if err := r.Detach(ctx, a.ID); err != nil {
			return rep, fmt.Errorf("take down %s of pod %s/%s: %w", a.Address, a.Namespace, a.Name, err)
		}
		faultpoint.At(faultpoint.RestoreDropped)
		rep.TakenDown++
	}
	rep.Replayed, err = r.Replay(ctx)
	return rep, err
}

// dropOutdated drops the records that the kernel contradicts, and returns the others.
// They are of an earlier time, as after the log of the record was lost: routes to their
// addresses belong to other attachments, so nothing is taken down.
func (r *Restorer) dropOutdated(ctx context.Context, all []store.Allocation, found []podnet.Found, rep *Report) ([]store.Allocation, error) {
	owners := map[netip.Addr][]attachment.ID{}
	own := map[attachment.ID][]netip.Addr{}
	for _, f := range found {
		own[f.ID] = f.Addresses
		for _, a := range f.Addresses {
			owners[a] = append(owners[a], f.ID)
		}
	}
	outdated := func(a store.Allocation) bool {
		addrs := a.Address.Addrs()
		return slices.ContainsFunc(own[a.ID], func(x netip.Addr) bool { return !slices.Contains(addrs, x) }) ||
			slices.ContainsFunc(addrs, func(x netip.Addr) bool { return len(owners[x]) > 0 && !slices.Contains(owners[x], a.ID) })
	}
	var rest []store.Allocation
	for _, a := range all {
		if !outdated(a) {
			rest = append(rest, a)
			continue
		}
		klog.FromContext(ctx).Info("A record is older than what the kernel has, dropped", "pod", klog.KRef(a.Namespace, a.Name),
			"containerID", a.ContainerID, "address", a.Address, "state", a.State)
		_, err := r.Store.Release(ctx, a.ID)
		if err == nil {
			err = r.Store.Cool(ctx, a.ID)
		}
		if err != nil {
			return nil, fmt.Errorf("drop the outdated record of %s: %w", a.Address, err)
		}
		rep.Outdated++
	}
	return rest, nil
}

// correct records the link of an attachment as it is.
func (r *Restorer) correct(ctx context.Context, a store.Allocation, f podnet.Found) error {
	if a.State != store.Attached || a.HostIfName == f.HostIfName && a.HostIfIndex == f.HostIfIndex {
		return nil
	}
	a.HostIfName, a.HostIfIndex = f.HostIfName, f.HostIfIndex
	if err := r.Store.Adopt(ctx, a); err != nil {
		return fmt.Errorf("record the link of %s: %w", a.Address, err)
	}
	return nil
}

// complete records a pending attachment as attached if its link is whole, and says whether it is. Taking it down
// could cost a pod that runs its network.
func (r *Restorer) complete(ctx context.Context, a store.Allocation, f podnet.Found) (bool, error) {
	if a.State != store.Pending || f.Unlabelled || f.Pool != a.Pool ||
		len(f.Addresses) != len(a.Address.Addrs()) || ipam.AddressOf(f.Addresses...) != a.Address ||
		r.Lives == nil || !r.Lives(a) {
		return false, nil
	}
	err := r.Store.Attach(ctx, a.ID, store.Wiring{HostIfName: f.HostIfName, HostIfIndex: f.HostIfIndex})
	if errors.Is(err, store.ErrReadOnly) {
		return false, nil // it can be taken down all the same, and coild starts
	}
	if err != nil {
		return false, fmt.Errorf("record the link of %s: %w", a.Address, err)
	}
	klog.FromContext(ctx).Info("A link is complete whose ADD wasn't recorded as such", "pod", klog.KRef(a.Namespace, a.Name),
		"containerID", a.ContainerID, "address", a.Address)
	return true, nil
}

// recordBlocks records the node's blocks, each by itself: one that is in conflict
// with the record must not keep the others from use. known are these blocks, and the blocks
// that only the record has.
func (r *Restorer) recordBlocks(ctx context.Context, blocks []store.Block, rep *Report) (known []store.Block, err error) {
	usage, err := r.Store.Usage(ctx)
	if err != nil {
		return nil, fmt.Errorf("list recorded blocks: %w", err)
	}
	for _, b := range blocks {
		set := r.Store.SetBlocks
		// The record is of an earlier time if it lacks a block. Which addresses of it pods had meanwhile isn't known.
		if r.Fresh || !slices.ContainsFunc(usage, func(u store.Usage) bool { return u.Name == b.Name }) {
			set = r.Store.AdoptBlocks
		}
		if err := set(ctx, []store.Block{b}); err != nil {
			if errors.Is(err, store.ErrReadOnly) {
				return nil, err
			}
			klog.FromContext(ctx).Error(err, "Block can't be used", "block", b.Name)
		}
	}
	known = slices.Clone(blocks)
	for _, u := range usage {
		if slices.ContainsFunc(blocks, func(b store.Block) bool { return b.Name == u.Name }) {
			continue
		}
		// Without addresses in use the record is all that is left of it.
		err := r.Store.ForgetBlock(ctx, u.Name)
		switch {
		case errors.Is(err, store.ErrInUse):
			known = append(known, u.Block)
			if u.Allocated > 0 { // else its addresses cool down
				rep.MissingBlocks = append(rep.MissingBlocks, u.Name)
			}
		case err != nil:
			return nil, fmt.Errorf("forget block %s: %w", u.Name, err)
		}
	}
	return known, nil
}

// noteHomeless reports addresses that are in none of the blocks, as long as
// their pods run.
func (r *Restorer) noteHomeless(f podnet.Found, blocks []store.Block, rep *Report) {
	if f.Pool == "" {
		return // not Coil's address
	}
	for _, a := range f.Addresses {
		if !slices.ContainsFunc(blocks, func(b store.Block) bool { return b.IPv4.Contains(a) || b.IPv6.Contains(a) }) {
			rep.Homeless = append(rep.Homeless, fmt.Sprintf("%s of link %s, container %s", a, f.HostIfName, f.ContainerID))
		}
	}
}

// adopt records an attachment that only the kernel knows.
func (r *Restorer) adopt(ctx context.Context, f podnet.Found, rep *Report) error {
	addr := ipam.AddressOf(f.Addresses...)
	if n := len(addr.Addrs()); n == 0 || n < len(f.Addresses) {
		rep.Conflicts = append(rep.Conflicts, f.String()+": it doesn't have one address of each family")
		return nil
	}
	a := store.Allocation{
		ID:      f.ID,
		Pool:    f.Pool,
		Address: addr,
		Wiring:  store.Wiring{HostIfName: f.HostIfName, HostIfIndex: f.HostIfIndex},
		State:   store.Attached,
	}
	err := r.Store.Adopt(ctx, a)
	switch {
	case err == nil:
		rep.Adopted++
	case errors.Is(err, store.ErrConflict):
		rep.Conflicts = append(rep.Conflicts, f.String()+": "+err.Error())
	default:
		return fmt.Errorf("record %s: %w", f, err)
	}
	return nil
}

// Replay does the DELs that came while coild was away, and returns how many.
func (r *Restorer) Replay(ctx context.Context) (int, error) {
	records, aside, err := r.Queue.List()
	for _, name := range aside {
		klog.FromContext(ctx).Info("File in the queue of deletions is not a record, set aside", "file", name)
	}
	errs := []error{err}
	n := 0
	for _, rec := range records {
		// The deletions before this one may have taken long.
		if has, err := r.Queue.Has(rec.ID); !has || err != nil {
			errs = append(errs, err)
			continue
		}
		if err := r.Detach(ctx, rec.ID); err != nil {
			errs = append(errs, fmt.Errorf("queued deletion of container %s: %w", rec.ContainerID, err))
			continue
		}
		faultpoint.At(faultpoint.RestoreReplayed)
		errs = append(errs, r.Queue.Remove(rec.ID))
		n++
	}
	return n, errors.Join(errs...)
}

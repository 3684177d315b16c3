package restore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// Pods keeps the host's objects for all pods; see package pods. A repair counts as such.
type Pods interface {
	Mend(ctx context.Context, repair bool, pods func(context.Context) ([]podnet.Wired, error)) error
	Routes(ctx context.Context, repair bool) error
}

// InLine brings record, kernel and blocks in line, and then the kernel's routes and rules with them. The record had the
// allocations of recorded when it was opened; it is read if that is nil. A DEL since then is repeated, and finds nothing to do.
// The error means that ADD must not be served yet, and that InLine should be called again.
func (r *Restorer) InLine(ctx context.Context, recorded []store.Allocation) error {
	if recorded == nil {
		var err error
		if recorded, err = r.Store.List(ctx); err != nil {
			return err
		}
	}
	usage, err := r.Store.Usage(ctx)
	if err != nil {
		return err
	}
	served := r.served(recorded)
	if served {
		r.Remember(usage)
	}
	// Links that lost their marks are found again only after that. No ADD is served yet, which
	// could have made one since.
	err = r.Pods.Mend(ctx, served, func(context.Context) ([]podnet.Wired, error) { return r.WiredOf(recorded), nil })
	if err != nil {
		return err
	}
	held, err := r.Claim(ctx, usage, r.Fresh)
	if err != nil {
		return err
	}
	rep, err := r.Restore(ctx, held)
	if err != nil {
		return err
	}
	faultpoint.At(faultpoint.RestoreInLine)
	if err := r.Store.Rebuilt(ctx); err != nil {
		return err
	}
	r.Fresh = false
	klog.FromContext(ctx).Info("Record, kernel and blocks are in line", "blocks", len(held), "kept", rep.Kept,
		"adopted", rep.Adopted, "takenDown", rep.TakenDown, "unfinished", rep.Unfinished, "outdated", rep.Outdated, "replayed", rep.Replayed)
	r.report(ctx, rep)
	if rep.Adopted > 0 {
		r.Adopted()
	}
	if err := errors.Join(r.Pods.Routes(ctx, served), r.Export(ctx)); err != nil {
		return err
	}
	if err := r.Guard(ctx, served); err != nil {
		klog.FromContext(ctx).Error(err, "Pods are served without the source guard")
	}
	return nil
}

// served says whether an earlier process has served pods, so that missing objects were lost. Without addresses of
// this boot the kernel hasn't had anything yet.
func (r *Restorer) served(all []store.Allocation) bool {
	return !r.Fresh && slices.ContainsFunc(all, func(a store.Allocation) bool { return a.BootID == r.BootID && a.State == store.Attached })
}

// report names, before routes are deleted, the objects that are not as they should be.
func (r *Restorer) report(ctx context.Context, rep Report) {
	for _, f := range []struct {
		reason, text string
		items        []string
	}{
		{"LinkNotAdopted", "links that can't be adopted: %s", append(rep.Conflicts, rep.Strays...)},
		{"AddressWithoutBlock", "pods have addresses that are in no AddressBlock of this node, replace them: %s", rep.Homeless},
		{"BlockMissing", "AddressBlocks that are in use by pods but don't exist any more, they are claimed: %s", rep.MissingBlocks},
	} {
		if len(f.items) == 0 {
			continue
		}
		for _, item := range f.items {
			klog.FromContext(ctx).Info("Found at start", "reason", f.reason, "item", item)
		}
		// One Event, since Events of one reason are counted rather than kept.
		r.Warn(f.reason, f.text, enumerate(f.items))
	}
}

// maxEnumeration keeps the note of an Event below what Kubernetes accepts, 1 kB.
const maxEnumeration = 800

// enumerate joins texts, of which there is one at least, as many as there is room for in an Event.
func enumerate(items []string) string {
	text := items[0]
	for i, item := range items[1:] {
		if len(text)+len(item) > maxEnumeration {
			return fmt.Sprintf("%s and %d more, see the log", text, len(items)-1-i)
		}
		text += "; " + item
	}
	return text
}

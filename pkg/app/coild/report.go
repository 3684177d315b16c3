package coild

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/node/restore"
)

// report says, before routes are deleted, what is not as it should be.
func (d *daemon) report(ctx context.Context, rep restore.Report) error {
	strays, err := d.network.Strays(ctx, rep.Found)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		reason, text string
		items        []string
	}{
		{"LinkNotAdopted", "links that can't be adopted: %s", append(rep.Conflicts, strays...)},
		{"AddressWithoutBlock", "pods have addresses that are in no AddressBlock of this node, replace them: %s", rep.Homeless},
		{"BlockMissing", "AddressBlocks that are in use by pods but don't exist any more, they are claimed: %s", rep.MissingBlocks},
	} {
		if len(f.items) == 0 {
			continue
		}
		for _, item := range f.items {
			klog.FromContext(ctx).Info("Found at start", "reason", f.reason, "item", item)
		}
		// One Event, since those of one reason are counted rather than kept.
		d.event(corev1.EventTypeWarning, f.reason, f.text, enumerate(f.items))
	}
	return nil
}

// maxEnumeration keeps the note of an Event below what Kubernetes accepts, 1 kB.
const maxEnumeration = 800

// enumerate joins texts, as many as there is room for in an Event.
func enumerate(items []string) string {
	var b strings.Builder
	for i, item := range items {
		if i > 0 && b.Len()+len(item) > maxEnumeration {
			fmt.Fprintf(&b, " and %d more, see the log", len(items)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(item)
	}
	return b.String()
}

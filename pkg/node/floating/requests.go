package floating

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/kube"
)

// read asks the API server which addresses this node has.
func (d *Driver) read(ctx context.Context) {
	d.group.Go(func() {
		list, version, err := d.list(ctx)
		d.metrics.request("read", err == nil)
		if err != nil {
			klog.FromContext(ctx).V(2).Info("Can't read which floating addresses this node has", "reason", err)
		}
		d.tell(ctx, func() { d.readDone(ctx, list, version, err) })
	})
}

func (d *Driver) readDone(ctx context.Context, list []known, version uint64, err error) {
	done := holding.ReadDone{Err: err, Version: version}
	for _, k := range list {
		if d.note(k) || d.fed[k.record.ID] != nil {
			done.Records = append(done.Records, k.record)
		}
	}
	d.step(ctx, done)
	for _, r := range done.Records {
		if k := d.blocks[r.ID]; k.record.Version == r.Version {
			d.settle(ctx, k)
		}
	}
}

// list reads the addresses that this node has as they are now, and the version of the list.
func (d *Driver) list(ctx context.Context) ([]known, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	// Without a resource version the answer has all that was written before.
	list, err := d.cfg.Blocks.List(ctx, metav1.ListOptions{LabelSelector: labels.Set{v2.LabelFloatingHolder: d.cfg.Node}.String()})
	if err != nil {
		return nil, 0, fmt.Errorf("list AddressBlocks: %w", err)
	}
	version, err := versionOf(list.ResourceVersion)
	if err != nil {
		return nil, 0, fmt.Errorf("list AddressBlocks: %w", err)
	}
	var held []known
	for i := range list.Items {
		k, err := parse(d.cfg.Node, &list.Items[i])
		if err != nil {
			klog.FromContext(ctx).Error(err, "A floating address isn't held")
		} else if k.record.Holder == d.cfg.Node {
			held = append(held, k)
		}
	}
	return held, version, nil
}

// write replaces a record, after the node has stopped answering for the address if it was told to.
func (d *Driver) write(ctx context.Context, next holding.Record) {
	k, f, stopped := d.blocks[next.ID], d.fed[next.ID], d.orders.stopped(next.ID)
	d.group.Go(func() {
		a := answer{outcome: holding.Changed}
		if k.record.Version == next.Version && stopped(ctx) {
			a = d.replace(ctx, k.block, next)
		}
		d.tell(ctx, func() { d.writeDone(ctx, f, next.ID, a) })
	})
}

// relabel is the time between two attempts to write a label.
const relabel = time.Second

// label writes the label of an address that this node has, if it says otherwise: without it a read doesn't find the address.
func (d *Driver) label(ctx context.Context, k known) {
	if k.record.Holder != d.cfg.Node || k.block.Labels[v2.LabelFloatingHolder] == d.cfg.Node {
		return
	}
	d.group.Go(func() {
		a := d.replace(ctx, k.block, k.record)
		if a.outcome != holding.Written && !a.gone {
			select {
			case <-time.After(relabel):
			case <-ctx.Done():
			}
		}
		d.tell(ctx, func() {
			switch id := k.record.ID; {
			case a.gone:
				d.lose(ctx, id)
			case a.outcome == holding.Written:
				d.take(ctx, a.after.block)
			case d.blocks[id].record.Version == k.record.Version && d.fed[id] != nil:
				d.label(ctx, k)
			}
		})
	})
}

// answer is what the API server has said to a write.
type answer struct {
	outcome holding.Outcome
	after   known // the block, if it was written
	gone    bool  // there is no such block
}

// writeDone takes the answer to a write that was asked for when the address was fed as f.
func (d *Driver) writeDone(ctx context.Context, f *fed, id string, a answer) {
	newer := a.outcome == holding.Written && d.note(a.after)
	if f != nil && d.fed[id] == f {
		d.step(ctx, holding.WriteDone{ID: id, Outcome: a.outcome, Written: a.after.record})
	} else if newer {
		// The machine has forgotten the address meanwhile.
		d.step(ctx, holding.Seen{Record: a.after.record})
	}
	if newer {
		d.settle(ctx, a.after)
	}
	if a.gone {
		d.lose(ctx, id)
	}
}

// replace writes a record in place of that of a block.
func (d *Driver) replace(ctx context.Context, b *v2.AddressBlock, next holding.Record) answer {
	select {
	case d.writing <- struct{}{}:
		defer func() { <-d.writing }()
	case <-ctx.Done():
		return answer{outcome: holding.Changed}
	}
	within, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	log := klog.FromContext(ctx).WithValues("block", b.Name)
	written, err := kube.PatchAsRead(within, d.cfg.Blocks, b, change(b, holdingOf(b, next, metav1.NewTime(time.Now()))))
	var after known
	if err == nil && written != nil {
		after, err = parse(d.cfg.Node, written)
	}
	d.metrics.request("write", err == nil || apierrors.IsConflict(err))
	switch {
	case apierrors.IsConflict(err):
		return answer{outcome: holding.Changed}
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err):
		log.Error(err, "The API server refuses the holder of a floating address", "holder", next.Holder)
		return answer{outcome: holding.Unknown}
	case err != nil:
		log.V(2).Info("It isn't known whether the holder of a floating address was written", "holder", next.Holder, "reason", err)
		return answer{outcome: holding.Unknown}
	case written == nil:
		return answer{outcome: holding.Changed, gone: true}
	}
	if before := b.Floating.Holding.Holder; before != next.Holder {
		log.Info("A floating address has another holder", "before", before, "holder", next.Holder, "epoch", next.Epoch)
		switch d.cfg.Node {
		case next.Holder:
			faultpoint.At(faultpoint.HoldWritten)
		case before:
			faultpoint.At(faultpoint.GiveWritten)
		}
	}
	return answer{outcome: holding.Written, after: after}
}

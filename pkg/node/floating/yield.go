package floating

import (
	"context"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/holding"
)

// judge tells the machine whether this node could answer for an address. Of one that it has and can't answer for any more, another node gets
// the connections first: the machine is told later.
func (d *Driver) judge(ctx context.Context, f *fed, k known) {
	ready, known := d.ready(k)
	switch {
	case !known:
	case ready || k.record.Holder != d.cfg.Node:
		f.keep()
		d.tellReady(ctx, f, k.record.ID, ready, "")
	case f.yields == nil && f.told.ready && d.copies(k):
		d.yield(ctx, f, k.record.ID)
	case f.yields == nil || d.nextHolder(f, k) == "":
		d.tellReady(ctx, f, k.record.ID, false, "")
	}
}

// ready says whether this node could answer for an address now, and whether that is known yet.
func (d *Driver) ready(k known) (ready, known bool) {
	if !k.mayHave(d.cfg.Node) {
		return false, true
	}
	h, pod := k.block.Floating.Holding, find(k.block.Floating.Successors, d.cfg.Node).PodUID
	if h.Holder == d.cfg.Node && h.PodUID != pod {
		return false, true
	}
	if k.address.OfServices {
		return true, true
	}
	return d.cfg.Targets.Ready(k.address)
}

// tellReady tells the machine whether this node could answer for an address, and which node is prepared if it can't.
func (d *Driver) tellReady(ctx context.Context, f *fed, id string, ready bool, next string) {
	if !f.told.known || f.told.ready != ready {
		f.told.ready, f.told.known = ready, true
		d.step(ctx, holding.Ready{ID: id, Ready: ready, Next: next})
	}
}

// copies says whether connections of an address that this node has can be copied to another one.
func (d *Driver) copies(k known) bool {
	return d.cfg.Mover != nil && d.cfg.Targets.Here(k.address.Pod) && d.successor(k) != ""
}

// yield begins to give an address up: the machine is told when another node is prepared, or when there is no more time to wait for that.
func (d *Driver) yield(ctx context.Context, f *fed, id string) {
	var timer *time.Timer
	timer = time.AfterFunc(d.copyTime, func() {
		d.tell(ctx, func() {
			if f.yields == timer {
				d.tellReady(ctx, f, id, false, "")
			}
		})
	})
	f.yields = timer
}

// keep ends what yield began.
func (f *fed) keep() {
	if f.yields != nil {
		f.yields.Stop()
		f.yields = nil
	}
}

// successor returns the node that takes an address first if this one gives it up; empty if none is heard.
func (d *Driver) successor(k known) string {
	return d.machine.Successor(time.Since(d.began), k.record.ID)
}

// nextHolder returns the node that is to be prepared for an address; empty if none is.
func (d *Driver) nextHolder(f *fed, k known) string {
	switch {
	case k.record.Holder != d.cfg.Node:
		return ""
	case f.yields == nil:
		return k.record.MovingTo
	case slices.Contains(k.record.Successors, f.moving):
		return f.moving
	}
	return d.successor(k)
}

// move prepares the node to which this one is to hand an address over.
func (d *Driver) move(ctx context.Context, f *fed, k known) {
	to := d.nextHolder(f, k)
	if to == f.moving {
		return
	}
	f.stopMoving()
	if to == "" {
		return
	}
	within, cancel := context.WithCancel(ctx)
	f.moving, f.cancel = to, cancel
	d.group.Go(func() {
		if d.cfg.Mover != nil && !k.address.OfServices {
			d.cfg.Mover.Move(within, k.address, to)
		}
		d.tell(within, func() {
			if within.Err() == nil {
				d.moved(ctx, f, k.record.ID)
			}
		})
	})
}

// moved says that the node that is prepared for an address has all it needs, or that there is no more time to wait for that.
func (d *Driver) moved(ctx context.Context, f *fed, id string) {
	if f.yields != nil {
		d.tellReady(ctx, f, id, false, f.moving)
		return
	}
	d.step(ctx, holding.Copied{ID: id})
}

func (f *fed) stopMoving() {
	if f.cancel != nil {
		f.cancel()
	}
	f.moving, f.cancel = "", nil
}

package floating

import (
	"context"
	"sync"
	"time"

	"github.com/coil-net/coil/pkg/holding"
)

// leaveStep is the time between two looks whether all addresses are given up.
const leaveStep = 5 * time.Millisecond

// Leave gives all addresses up to other nodes, before the end of Run, with their connections. It returns when that is done, or when ctx ends.
func (d *Driver) Leave(ctx context.Context) {
	defer d.copyAll(ctx)()
	left := make(chan struct{})
	var look func()
	look = func() {
		if !d.machine.Leaves() {
			close(left)
			return
		}
		time.AfterFunc(leaveStep, func() { d.tell(ctx, look) })
	}
	d.tell(ctx, func() {
		d.step(ctx, holding.Leave{})
		look()
	})
	select {
	case <-left:
	case <-ctx.Done():
	}
}

// copyAll prepares the nodes that take the addresses when they are given up. The caller says when that is done.
func (d *Driver) copyAll(ctx context.Context) (moved context.CancelFunc) {
	moving, moved := context.WithCancel(ctx)
	if d.cfg.Mover == nil {
		return moved
	}
	next := make(chan map[Address]string, 1)
	d.tell(ctx, func() { next <- d.next() })
	var all map[Address]string
	select {
	case all = <-next:
	case <-ctx.Done():
		return moved
	}
	var copies sync.WaitGroup
	for a, node := range all {
		copies.Go(func() { d.cfg.Mover.Move(moving, a, node) })
	}
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		copies.Wait()
	}()
	select {
	case <-copied:
	case <-time.After(d.copyTime):
	case <-ctx.Done():
	}
	return moved
}

// next returns the addresses that this node has, and the node that takes each of them first when it is given up.
func (d *Driver) next() map[Address]string {
	all := map[Address]string{}
	for id, f := range d.fed {
		k := d.blocks[id]
		if to := d.successor(k); k.record.Holder == d.cfg.Node && !k.address.OfServices && f.moving == "" && to != "" {
			all[k.address] = to
		}
	}
	return all
}

package floating

import (
	"context"
	"time"

	"github.com/coil-net/coil/pkg/holding"
)

// leaveStep is the time between two looks whether all addresses are given up.
const leaveStep = 5 * time.Millisecond

// Leave gives all addresses up to other nodes, before the end of Run. It returns when that is done, or when ctx ends.
func (d *Driver) Leave(ctx context.Context) {
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

package podnet

import (
	"context"
	"fmt"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Link is a pod's link that Prepare made. Attach or Discard must be called with it, once.
type Link struct {
	wiring
	veth rtnl.Veth
}

// Prepare makes the link of a pod whose address needn't be known yet, which takes as long as to
// find out the address. Nothing is on the link, and only its name on the host says whose it is.
// Attach may mend the cause of an error: it needs no link.
func (n *Network) Prepare(ctx context.Context, p Pod) (*Link, error) {
	w, err := n.begin(p)
	if err == nil {
		var veth rtnl.Veth
		if veth, err = w.link(ctx); err == nil {
			return &Link{w, veth}, nil
		}
		w.end()
	}
	return nil, fmt.Errorf("prepare %s: %w", p.Key(), err)
}

// Discard removes a link that isn't attached.
func (n *Network) Discard(ctx context.Context, l *Link) error {
	defer l.end()
	if err := l.undo(ctx, l.veth); err != nil {
		return fmt.Errorf("discard %s: %w", l.pod.Key(), err)
	}
	return nil
}

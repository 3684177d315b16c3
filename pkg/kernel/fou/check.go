package fou

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Check says which of the ports that Ensure opens isn't open. Nothing is changed.
func Check(ctx context.Context, ns *netns.NS, port uint16, families ...dataplane.Family) error {
	h, err := rtnl.NewProtocol(ns, unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	defer h.Close()
	id, err := resolve(ctx, h)
	if err != nil {
		return err
	}
	open, err := list(ctx, h, id)
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range families {
		if p := protocols[f]; !slices.Contains(open, socket{port, p.family, p.inner, encapDirect}) {
			errs = append(errs, fmt.Errorf("FoU port %d of %s is not open", port, f))
		}
	}
	return errors.Join(errs...)
}

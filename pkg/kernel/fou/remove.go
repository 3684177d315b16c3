package fou

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

const cmdDel = 2

// Remove closes what Ensure opens, in all families. That nothing is open is success, also for
// want of FoU.
func Remove(ctx context.Context, ns *netns.NS, port uint16) error {
	h, err := rtnl.NewProtocol(ns, unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	defer h.Close()
	id, err := resolve(ctx, h)
	if errors.Is(err, ErrUnavailable) {
		return nil
	}
	if err != nil {
		return err
	}
	opened, err := list(ctx, h, id)
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range opened {
		for f, p := range protocols {
			if s != (socket{port, p.family, p.inner, encapDirect}) {
				continue
			}
			body := header(cmdDel)
			body = rtnl.AppendAttribute(body, attrPort, binary.BigEndian.AppendUint16(nil, port))
			body = rtnl.AppendAttribute(body, attrFamily, []byte{p.family})
			err := h.Do(ctx, rtnl.NewRequest(id, 0, body, func() string { return fmt.Sprintf("fou del port %d (%s)", port, f) }))
			if err != nil && !errors.Is(err, rtnl.ErrInvalid) { // EINVAL says that there is none
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

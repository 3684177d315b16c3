package rtnl

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Attributes of RTM_GETNSID (linux/net_namespace.h).
const (
	netnsaNSID = 1
	netnsaFD   = 3
)

// NetnsID returns the ID that the handle's namespace has for another one, by which links name the
// namespace of their other end; -1 if it has none.
func (h *Handle) NetnsID(ctx context.Context, ns *netns.NS) (int, error) {
	var e encoder
	e.u8(unix.AF_UNSPEC, 0, 0, 0) // struct rtgenmsg, padded
	e.attrU32(netnsaFD, uint32(ns.Fd()))
	id := -1
	r := Request{unix.RTM_GETNSID, 0, e.b, func() string { return fmt.Sprintf("netns list-id of descriptor %d", ns.Fd()) }}
	err := h.Get(ctx, r, func(body []byte) error {
		const header = 4 // of struct rtgenmsg, padded
		if len(body) < header {
			return fmt.Errorf("ID of a namespace in %d bytes: %w", len(body), errMalformed)
		}
		as, err := attributes(body[header:])
		if err != nil {
			return err
		}
		for a := range as {
			if a.kind == netnsaNSID {
				id = int(int32(a.u32()))
			}
		}
		return nil
	})
	return id, err
}

package rtnl

import (
	"context"

	"github.com/vishvananda/netlink/nl"
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
	r := newRequest(unix.RTM_GETNSID, 0, text("netns list-id of descriptor %d", ns.Fd()), nl.NewRtGenMsg(), number(netnsaFD, uint32(ns.Fd())))
	id := -1
	err := h.Get(ctx, r, func(body []byte) error {
		var as Attributes
		_, rest := as.Cut(body, nl.NewRtGenMsg().Len())
		if a := as.Find(rest, netnsaNSID); a.Kind != 0 {
			id = int(int32(a.U32()))
		}
		return as.Err
	})
	return id, err
}

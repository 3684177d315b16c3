package rtnl

import (
	"context"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Tunnel is a link that puts IP into IP, as it was found in the kernel.
type Tunnel struct {
	Link
	// Spec has the properties that Coil's tunnels differ in. An address that isn't valid is any.
	Spec dataplane.Tunnel
	// Exact says that Spec describes the tunnel completely: it has Coil's way of FoU, TTL
	// and protocol.
	Exact bool
	// Receiver takes packets that no tunnel of two addresses takes.
	Receiver bool
}

// Tunnels returns all tunnels of a family: those of Coil's kind, whoever made them.
func (h *Handle) Tunnels(ctx context.Context, f dataplane.Family) ([]Tunnel, error) {
	kind := tunnelKind(f)
	r := getLinks(text("link show type %s", kind), 0, linkInfo(kind, nil))
	return List(ctx, h, r, func(body []byte) (Tunnel, bool, error) {
		// A kernel that doesn't know the kind doesn't filter.
		l, err := parseLink(body)
		if err != nil || l.Kind != kind {
			return Tunnel{}, false, err
		}
		t, err := parseTunnel(f, l, body)
		return t, true, err
	})
}

// endpoint is the address of one end of a tunnel, invalid if it is any.
func (a Attribute) endpoint() netip.Addr {
	addr := a.Addr()
	if addr.IsUnspecified() {
		return netip.Addr{}
	}
	return addr
}

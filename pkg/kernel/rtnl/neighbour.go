package rtnl

import (
	"context"
	"encoding/binary"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Of linux/neighbour.h.
const (
	sizeofNdmsg = 12
	ndaDst      = 1
	ndaProtocol = 12
	ntfProxy    = 0x8
)

// neighbourHeader is a struct ndmsg.
type neighbourHeader [sizeofNdmsg]byte

// Len is the size.
func (h neighbourHeader) Len() int { return len(h) }

// Serialize returns the bytes.
func (h neighbourHeader) Serialize() []byte { return h[:] }

func proxyHeader(a netip.Addr, link int) neighbourHeader {
	var h neighbourHeader
	h[0] = families[dataplane.FamilyOf(a)]
	binary.NativeEndian.PutUint32(h[4:], uint32(link))
	binary.NativeEndian.PutUint16(h[8:], unix.NUD_PERMANENT) // else the entry goes when the link loses its carrier
	h[10] = ntfProxy
	return h
}

// AddProxy asks for a proxy neighbour entry. One of its address and link gets the protocol, whosever it was.
func AddProxy(p dataplane.Proxy) Request {
	return newRequest(unix.RTM_NEWNEIGH, create, text("neigh add %s", p), proxyHeader(p.Addr, p.Link),
		address(ndaDst, p.Addr), nl.NewRtAttr(ndaProtocol, []byte{uint8(p.Protocol)}))
}

// DelProxy asks for the removal of the entry of an address and a link, whosever it is; ErrNotExist.
func DelProxy(p dataplane.Proxy) Request {
	return newRequest(unix.RTM_DELNEIGH, 0, text("neigh del %s", p), proxyHeader(p.Addr, p.Link), address(ndaDst, p.Addr))
}

// Proxies returns all proxy neighbour entries, of both families.
func (h *Handle) Proxies(ctx context.Context) ([]dataplane.Proxy, error) {
	r := newRequest(unix.RTM_GETNEIGH, 0, text("neigh show proxy"), neighbourHeader{10: ntfProxy})
	return List(ctx, h, r, parseProxy)
}

// parseProxy reads a struct ndmsg and its attributes. Entries for all links, which have none, aren't Coil's.
func parseProxy(body []byte) (p dataplane.Proxy, ok bool, err error) {
	b, rest, as := Cut(body, sizeofNdmsg)
	p.Link = int(binary.NativeEndian.Uint32(b[4:]))
	ok = b[10]&ntfProxy != 0 && p.Link != 0
	for a := range as.In(rest) {
		switch a.Kind {
		case ndaDst:
			p.Addr = a.Addr()
		case ndaProtocol:
			p.Protocol = int(a.U8())
		}
	}
	return p, ok && p.Addr.IsValid(), as.Err
}

package podnet

import (
	"context"
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// unlearn removes from the host what pods made by router advertisements, as of a time when their
// links accepted them, and counts it: default routers, prefixes on the link and addresses. links
// are the host's veths, addrs all its addresses.
func (n *Network) unlearn(ctx context.Context, links []rtnl.Link, addrs []rtnl.Addr) (int, error) {
	pods := map[int]bool{}
	for _, l := range links {
		pods[l.Index] = ours(l)
	}
	var reqs []rtnl.Request
	own := map[rtnl.Addr]bool{}
	for _, a := range addrs {
		if !pods[a.Link] || !a.Prefix.Addr().Is6() {
			continue
		}
		if a.Dynamic {
			reqs = append(reqs, rtnl.DelAddr(a.Link, a.Prefix))
		} else {
			own[rtnl.Addr{Link: a.Link, Prefix: a.Prefix.Masked()}] = true
		}
	}
	for _, protocol := range []int{unix.RTPROT_RA, unix.RTPROT_KERNEL} {
		routes, err := n.handle.Routes(ctx, dataplane.IPv6, unix.RT_TABLE_MAIN, protocol)
		if err != nil {
			return 0, err
		}
		for _, r := range routes {
			if !pods[r.Link] || protocol == unix.RTPROT_KERNEL && (linkLocalRoute(r.Dst) || own[rtnl.Addr{Link: r.Link, Prefix: r.Dst}]) {
				continue
			}
			reqs = append(reqs, rtnl.DelFoundRoute(r))
		}
	}
	return n.handle.Apply(ctx, rtnl.ErrNotExist, reqs...)
}

// linkLocalRoute says whether a route is that of link-local addresses, which each link may have.
func linkLocalRoute(dst netip.Prefix) bool {
	return dst.Bits() >= 10 && dst.Addr().IsLinkLocalUnicast()
}

// Owns says whether the link of an index is the host's end of a pod's.
func (n *Network) Owns(ctx context.Context, index int) (bool, error) {
	l, err := n.handle.LinkByIndex(ctx, index)
	if errors.Is(err, rtnl.ErrNotExist) {
		return false, nil
	}
	return ours(l), err
}

// ours says whether a link is, or was until its removal began, the host's end of a pod's.
func ours(l rtnl.Link) bool { return hasMark(l) || beingRemoved(l) }

package masquerade

import (
	"context"
	"errors"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// loopback is the index of lo, the same in every namespace.
const loopback = 1

// tell adds its transit addresses to lo of a router, and removes other ones. It returns how many were missing. If the namespace is gone, nothing is to do.
func (k *Keeper) tell(ctx context.Context, r Router) (added int, err error) {
	ns, err := netns.Open(r.Netns.Path)
	if errors.Is(err, netns.ErrNotExist) || errors.Is(err, netns.ErrNotNetns) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer ns.Close()
	if ns.Inode() != r.Netns.Inode {
		return 0, nil // another pod's
	}
	handle, err := rtnl.New(ns)
	if err != nil {
		return 0, err
	}
	defer handle.Close()
	have, err := handle.Addrs(ctx)
	if err != nil {
		return 0, err
	}
	missing := map[netip.Prefix]bool{}
	for _, own := range r.Address.Addrs() {
		a := dataplane.TransitAddr(dataplane.FamilyOf(own), k.transits[r.Link].number)
		missing[netip.PrefixFrom(a, a.BitLen())] = true
	}
	var others []rtnl.Request
	for _, h := range have {
		if _, is := dataplane.TransitNumber(h.Prefix.Addr()); !is || h.Link != loopback {
			continue
		}
		if missing[h.Prefix] {
			delete(missing, h.Prefix)
		} else {
			others = append(others, rtnl.DelAddr(loopback, h.Prefix))
		}
	}
	if _, err = handle.Apply(ctx, rtnl.ErrNotExist, others...); err != nil {
		return 0, err
	}
	var news []rtnl.Request
	for p := range missing {
		// With the scope link the kernel doesn't choose the address as the source of the router's own packets.
		news = append(news, rtnl.AddAddr(loopback, p, dataplane.LinkScope))
	}
	return handle.Apply(ctx, rtnl.ErrExist, news...)
}

package podnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// uplinks are the links by which pods' packets leave the node.
type uplinks struct {
	mtu  int         // the smallest
	each map[int]int // by index
}

// mtuOf is the MTU that both ends of a pod's link should have.
func (n *Network) mtuOf(p Pod) int {
	if n.opts.MTU != 0 {
		return n.opts.MTU
	}
	mtu := n.uplinks.Load().mtu
	if p.Address.IPv6.IsValid() {
		// The kernel takes IPv6 away from a link that has less. Larger packets than the
		// uplink takes are answered, so that their senders learn.
		mtu = max(mtu, minIPv6MTU)
	}
	return mtu
}

// DetectMTU finds out the MTU of pods that come from now on, and says whether it has
// changed; MendLinks gives it to the others. It is the smallest of the links that have a
// default route, or one of the node's own addresses: those between which a pod's packets
// can't choose. Without such a link it stays as it is, as it does if the Options have one.
func (n *Network) DetectMTU(ctx context.Context, own ipam.Address) (mtu int, changed bool, err error) {
	before := n.uplinks.Load().mtu
	if n.opts.MTU != 0 {
		return n.opts.MTU, false, nil
	}
	indexes, err := n.uplinkIndexes(ctx, own)
	if err != nil {
		return before, false, fmt.Errorf("detect the MTU: %w", err)
	}
	now := uplinks{mtu: before, each: map[int]int{}}
	for index := range indexes {
		l, err := n.handle.LinkByIndex(ctx, index)
		if errors.Is(err, rtnl.ErrNotExist) {
			continue
		}
		if err != nil {
			return before, false, fmt.Errorf("detect the MTU: %w", err)
		}
		if l.Loopback || l.MTU < minMTU {
			continue // the address of a node that routes by several links may be on lo
		}
		now.each[index] = l.MTU
	}
	if len(now.each) > 0 {
		now.mtu = slices.Min(slices.Collect(maps.Values(now.each)))
	}
	n.uplinks.Store(&now)
	return now.mtu, now.mtu != before, nil
}

// uplinkIndexes are the indexes of the links of default routes and of own addresses.
func (n *Network) uplinkIndexes(ctx context.Context, own ipam.Address) (map[int]bool, error) {
	indexes := map[int]bool{}
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		routes, err := n.handle.Routes(ctx, f, unix.RT_TABLE_MAIN, 0)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			if r.Dst.Bits() == 0 && r.Type == dataplane.Unicast {
				for _, l := range r.Links {
					indexes[l] = true
				}
			}
		}
	}
	addrs, err := n.handle.Addrs(ctx)
	if err != nil {
		return nil, err
	}
	for _, a := range addrs {
		if slices.Contains(own.Addrs(), a.Prefix.Addr()) {
			indexes[a.Link] = true
		}
	}
	return indexes, nil
}

// UplinkChanged says whether a link is an uplink whose MTU isn't the one that DetectMTU saw.
func (n *Network) UplinkChanged(l rtnl.Link) bool {
	mtu, ok := n.uplinks.Load().each[l.Index]
	return ok && mtu != l.MTU
}

// resize gives both ends of a link an MTU. The pod's end keeps a smaller one that it doesn't
// share with the host's: it was set in the pod, by a chained plugin for example. A link whose
// pod's namespace isn't known or is gone keeps its MTU; the result is then false.
func (n *Network) resize(ctx context.Context, p Pod, l rtnl.Link, mtu int) (bool, error) {
	if p.Netns == "" {
		return false, nil
	}
	w, err := n.begin(p)
	if errors.Is(err, netns.ErrNotExist) {
		return false, nil // its DEL will come
	}
	if err != nil {
		return false, err
	}
	defer w.end()
	peer, err := w.inside.LinkByName(ctx, p.IfName)
	if err != nil || peer.Index != l.Peer || peer.Peer != l.Index {
		return false, err // another pod's by now
	}
	ends := []func() error{func() error { return n.handle.Do(ctx, rtnl.SetLink(l.Index, rtnl.LinkChange{MTU: mtu})) }}
	if peer.MTU == l.MTU || peer.MTU > mtu {
		ends = append(ends, func() error { return w.inside.Do(ctx, rtnl.SetLink(peer.Index, rtnl.LinkChange{MTU: mtu})) })
	}
	// The one that sends may not have a larger MTU than the one that receives: pods send
	// more, as a rule.
	if mtu < l.MTU {
		slices.Reverse(ends)
	}
	for _, set := range ends {
		if err := set(); err != nil {
			return false, err
		}
	}
	return true, nil
}

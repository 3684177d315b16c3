package podnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Way is how the host reaches a pod that another plugin has attached by a veth.
type Way struct {
	// Link is the index of the host's link by which packets for the pod leave: the host's end of the veth, or a bridge.
	Link int
	// Inside is the index of the other end of the veth, in the pod's namespace.
	Inside int
}

// WayOf returns how the host reaches a pod that another plugin has attached. The error is ErrNoHostLink if the pod has no veth. WayOf asks nothing in
// the pod's namespace, where a program can make links as it likes.
//
//	the pod's address is on the link of    the host's end of the veth              that link
//	                                       the bridge that this is a port of       the bridge
//	                                       another link, or it is behind a router  the host's end, unless it is a port
//	                                                                               of something; else that other link
func (n *Network) WayOf(ctx context.Context, ns *netns.NS, address ipam.Address) (Way, error) {
	ends, err := n.endsOf(ctx, ns)
	if err != nil {
		return Way{}, err
	}
	var other int
	for _, a := range address.Addrs() {
		link, err := n.linkOf(ctx, a)
		if err != nil {
			return Way{}, err
		}
		if i := slices.IndexFunc(ends, func(l rtnl.Link) bool { return link != 0 && (l.Index == link || l.Master == link) }); i >= 0 {
			return Way{link, ends[i].Peer}, nil
		}
		other = max(other, link)
	}
	if i := slices.IndexFunc(ends, func(l rtnl.Link) bool { return l.Master == 0 }); i >= 0 {
		return Way{ends[i].Index, ends[i].Peer}, nil
	}
	if len(ends) > 0 && other != 0 {
		return Way{other, ends[0].Peer}, nil
	}
	return Way{}, fmt.Errorf("%s: %w", address, ErrNoHostLink)
}

// endsOf returns the host's ends of the veths whose other ends are in a namespace.
func (n *Network) endsOf(ctx context.Context, ns *netns.NS) ([]rtnl.Link, error) {
	veths, err := n.handle.Veths(ctx)
	if err != nil {
		return nil, err
	}
	// The kernel has given the namespace an ID, at the latest when it answered.
	id, err := n.handle.NetnsID(ctx, ns)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(veths, func(l rtnl.Link) bool { return !l.PeerElsewhere || id < 0 || l.PeerNetns != id }), nil
}

// linkOf returns the index of the link that an address is on, by the host's routes; 0 if the address is behind a router, or has no route.
func (n *Network) linkOf(ctx context.Context, a netip.Addr) (int, error) {
	r, err := n.handle.RouteTo(ctx, a, 0)
	switch {
	case errors.Is(err, rtnl.ErrNotExist), errors.Is(err, rtnl.ErrInvalid): // the latter by a blackhole
		return 0, nil
	case err != nil:
		return 0, err
	case r.Type == dataplane.Local, r.Gateway.IsValid() && r.Gateway != a:
		return 0, nil
	}
	return r.Link, nil
}

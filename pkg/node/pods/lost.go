package pods

import (
	"context"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
)

// maxSuspects bounds how many links are looked at one by one.
const maxSuspects = 64

// Lost says whether changes in the kernel, of which the later ones tell more, concern pods:
//
//	rule, route of the pod table              lost
//	mark, gateway or parameter of a pod's     lost, and the link still exists
//	link
//	MTU of an uplink                          another
//	an address of the node                    lost, or it came: routes have it as source
//	a parameter of all links                  another: forwarding
//	a route that the kernel learned           by a pod's link
//	notifications                             lost
func (k *Keeper) Lost(ctx context.Context, changes []rtnl.Change) (lost bool) {
	suspects := map[int][]netip.Addr{} // links, and the addresses that they lost
	learned := map[int]bool{}          // links by which the kernel learned a route
	own := k.NodeAddrs()
	for _, c := range changes {
		klog.FromContext(ctx).V(6).Info("Kernel tells of a change", "change", c.String())
		switch c.Kind {
		case rtnl.Unknown:
			lost = true
		case rtnl.RuleLost:
			k.Repairs.Saw(Rule, c.String())
			lost = true
		case rtnl.RouteLost:
			if c.Route.Table == k.PodTable {
				k.Repairs.Saw(Route, c.String())
				lost = true
			}
		case rtnl.RouteLearned:
			learned[c.Route.Link] = true
		case rtnl.LinkLost:
			delete(suspects, c.Link)
		case rtnl.LinkChanged:
			lost = lost || c.Link <= 0 || c.State != nil && k.Links.UplinkChanged(*c.State)
			gone, suspected := suspects[c.Link]
			switch sound := c.State != nil && podnet.Sound(*c.State); {
			case !sound && !suspected:
				suspects[c.Link] = nil
			case sound && len(gone) == 0:
				delete(suspects, c.Link)
			}
		case rtnl.AddrAdded, rtnl.AddrLost:
			lost = lost || c.Addr == own.IPv4 || c.Addr == own.IPv6
			if c.Kind == rtnl.AddrLost {
				suspects[c.Link] = append(suspects[c.Link], c.Addr)
			}
		}
	}
	return lost || k.unsound(ctx, suspects) || k.taught(ctx, learned)
}

// unsound says whether one of the links is a pod's and lacks something.
func (k *Keeper) unsound(ctx context.Context, suspects map[int][]netip.Addr) bool {
	if len(suspects) > maxSuspects {
		return true
	}
	for index, lost := range suspects {
		if index <= 0 {
			continue // parameters of all links
		}
		if sound, err := k.Links.Sound(ctx, index, lost...); err != nil || !sound {
			return true
		}
	}
	return false
}

// taught says whether one of the links by which the kernel learned a route is a pod's.
func (k *Keeper) taught(ctx context.Context, learned map[int]bool) bool {
	for index := range learned {
		if ours, err := k.Links.Owns(ctx, index); err != nil || ours {
			return true
		}
	}
	return false
}

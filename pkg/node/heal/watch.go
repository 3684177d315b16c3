package heal

import (
	"context"
	"net/netip"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/podnet"
)

// settle is the time between two looks at what has changed: the first change is acted upon
// at once, the others of a burst together.
const settle = 200 * time.Millisecond

// maxSuspects bounds how many links are looked at one by one.
const maxSuspects = 64

// Source tells what has changed; see package kernel/rtnl.
type Source interface {
	Run(ctx context.Context, settle time.Duration, told func([]rtnl.Change)) error
}

// Links knows single links; see package podnet.
type Links interface {
	Sound(ctx context.Context, index int, lost ...netip.Addr) (bool, error)
	Owns(ctx context.Context, index int) (bool, error)
	UplinkChanged(l rtnl.Link) bool
}

// Watch wakes those who repair when the kernel tells that something of theirs is gone:
//
//	lost                                  wakes
//	rule, route of the pod table          pods
//	route of another table of Coil's      blocks
//	mark, gateway or parameter of a
//	pod's link, and it still exists       pods
//	lo goes down                          blocks
//	MTU of an uplink                      pods
//	an address of the node, or it came    pods: their routes have it as source
//	a parameter of all links              pods: forwarding
//	a route that the kernel learned by
//	a pod's link                          pods
//	notifications                         both
type Watch struct {
	Source Source
	Links  Links
	// PodTable is the table of routes to pods, Loopback the index of lo.
	PodTable, Loopback int
	NodeAddrs          func() ipam.Address
	// Pods and Blocks wake; they must not block.
	Pods, Blocks func()
	// Saw is told what was lost, by its kind.
	Saw func(kind, what string)
}

// Run watches until ctx ends.
func (w *Watch) Run(ctx context.Context) error {
	return w.Source.Run(ctx, settle, func(changes []rtnl.Change) { w.told(ctx, changes) })
}

// told acts upon changes, of which the later ones tell more.
func (w *Watch) told(ctx context.Context, changes []rtnl.Change) {
	pods, blocks := false, false
	suspects := map[int][]netip.Addr{} // links, and the addresses that they lost
	learned := map[int]bool{}          // links by which the kernel learned a route
	own := w.NodeAddrs()
	for _, c := range changes {
		klog.FromContext(ctx).V(6).Info("Kernel tells of a change", "change", c.String())
		switch c.Kind {
		case rtnl.Unknown:
			pods, blocks = true, true
		case rtnl.RuleLost:
			w.Saw(Rule, c.String())
			pods = true
		case rtnl.RouteLost:
			if c.Route.Table == w.PodTable {
				w.Saw(PodRoute, c.String())
				pods = true
				continue
			}
			w.Saw(blockKind(c.Route), c.String())
			blocks = true
		case rtnl.RouteLearned:
			learned[c.Route.Link] = true
		case rtnl.LinkLost:
			delete(suspects, c.Link)
		case rtnl.LinkChanged:
			blocks = blocks || c.Link == w.Loopback
			pods = pods || c.Link <= 0 || c.State != nil && w.Links.UplinkChanged(*c.State)
			lost, suspected := suspects[c.Link]
			switch sound := c.State != nil && podnet.Sound(*c.State); {
			case !sound && !suspected:
				suspects[c.Link] = nil
			case sound && len(lost) == 0:
				delete(suspects, c.Link)
			}
		case rtnl.AddrAdded, rtnl.AddrLost:
			pods = pods || c.Addr == own.IPv4 || c.Addr == own.IPv6
			if c.Kind == rtnl.AddrLost {
				suspects[c.Link] = append(suspects[c.Link], c.Addr)
			}
		}
	}
	if pods || w.unsound(ctx, suspects) || w.taught(ctx, learned) {
		w.Pods()
	}
	if blocks {
		w.Blocks()
	}
}

// unsound says whether one of the links is a pod's and lacks something.
func (w *Watch) unsound(ctx context.Context, suspects map[int][]netip.Addr) bool {
	if len(suspects) > maxSuspects {
		return true
	}
	for index, lost := range suspects {
		if index <= 0 {
			continue // parameters of all links
		}
		if sound, err := w.Links.Sound(ctx, index, lost...); err != nil || !sound {
			return true
		}
	}
	return false
}

// taught says whether one of the links by which the kernel learned a route is a pod's.
func (w *Watch) taught(ctx context.Context, learned map[int]bool) bool {
	for index := range learned {
		if ours, err := w.Links.Owns(ctx, index); err != nil || ours {
			return true
		}
	}
	return false
}

// blockKind is the kind of a block's route.
func blockKind(r dataplane.Route) string {
	if r.Type == dataplane.Unreachable || r.Table == dataplane.TableUnassigned {
		return UnreachableRoute
	}
	return BlockRoute
}

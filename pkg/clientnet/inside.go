package clientnet

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nexthop"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/rule"
	"github.com/coil-net/coil/pkg/store"
)

// All work in a pod's network namespace goes through visit or inside.

// errPanic: work panicked, at objects that a program in the pod had made there.
var errPanic = errors.New("coild has a fault, see its log")

// namespace is that of a client while it is worked on.
type namespace struct {
	*Network
	ns     *netns.NS
	handle *rtnl.Handle
	routes *route.Syncer
	rules  *rule.Syncer
	// nexthops are the routers and their groups, pins the rules of single flows.
	nexthops *nexthop.Syncer
	pins     *rule.Syncer
}

// inside does work in the namespace of a client.
func (n *Network) inside(ctx context.Context, at store.Netns, work func(namespace) error) error {
	return visit(ctx, at, func(ns *netns.NS) error {
		h, err := rtnl.NewOfPod(ns)
		if err != nil {
			return err
		}
		defer h.Close()
		return work(namespace{
			Network: n, ns: ns, handle: h,
			routes:   route.New(h, n.protocol, dataplane.TableNarrow, dataplane.TableWide),
			rules:    rule.New(h, n.protocol, priorities()...),
			nexthops: nexthop.New(h, n.protocol),
			pins:     rule.New(h, n.protocol, dataplane.PriorityPinned),
		})
	})
}

// visit does work in a namespace.
func visit(ctx context.Context, at store.Netns, work func(*netns.NS) error) error {
	ns, err := open(at)
	if err != nil {
		return err
	}
	defer ns.Close()
	return contain(ctx, func() error { return work(ns) })
}

// contain turns a panic of work in a pod's namespace into an error. A program in the pod may have crafted the
// objects that are read there, and must not decide what happens to the rest of the node.
func contain(ctx context.Context, work func() error) (err error) {
	defer func() {
		p := &netns.Panic{Value: recover()}
		if p.Value != nil {
			p.Stack = debug.Stack()
		} else if !errors.As(err, &p) {
			return
		}
		klog.FromContext(ctx).Error(fmt.Errorf("panic: %v", p.Value), "Work in a pod's network namespace panicked", "stack", string(p.Stack))
		err = fmt.Errorf("work in the pod's network namespace panicked: %w", errPanic)
	}()
	return work()
}

// open opens a namespace, unless another one is at the path now.
func open(at store.Netns) (*netns.NS, error) {
	ns, err := netns.Open(at.Path)
	if errors.Is(err, netns.ErrNotExist) || errors.Is(err, netns.ErrNotNetns) {
		return nil, fmt.Errorf("%w: %w", ErrGone, err)
	}
	if err != nil {
		return nil, err
	}
	if at.Inode != 0 && ns.Inode() != at.Inode {
		return nil, errors.Join(fmt.Errorf("%w: another one is at %s", ErrGone, at.Path), ns.Close())
	}
	return ns, nil
}

// priorities are the priorities of the rules in a client, but for pins.
func priorities() []int {
	all := []int{dataplane.PriorityOriginating, dataplane.PriorityLinkLocal, dataplane.PriorityNarrow, dataplane.PriorityWide}
	for i := range dataplane.PrivateRanges {
		all = append(all, dataplane.PriorityPrivate+i)
	}
	return all
}

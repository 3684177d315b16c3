package coild

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/node/pods"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
	"github.com/coil-net/coil/pkg/store"
)

// chained is the part that knows the pods that another plugin has attached, as far as floating addresses need them. Like the part addresses it
// has the rule to their routes, the host's parameters, and the watch of the kernel.
type chained struct {
	*daemon
	egresses  *egresses
	announcer *announcer
	// changed, if it isn't nil, is called when the host may have other pods or other links. It doesn't block.
	changed func()
	keeper  *pods.Keeper
	loop    *upkeep.Loop
	// reached are routers to which the host has a link, and unreached those of which it was told that it has none; only for attachedPods.
	reached   map[types.UID]place.Pod
	unreached map[types.UID]bool
}

func (c *chained) part() part {
	return part{kinds: pods.Kinds, compose: c.compose, start: c.start, check: c.checkMachine}
}

func (c *chained) compose(context.Context) error {
	none := func(context.Context) ([]podnet.Wired, error) { return nil, nil }
	c.keeper = &pods.Keeper{
		Network: c.network, Links: c.network, Wired: none, PodTable: c.PodTable, NodeAddrs: c.node.Addrs, Repairs: c.repairs,
	}
	c.loop = c.upkeep(upkeep.Config{Name: "floating-rules", Sync: func(ctx context.Context) error { return c.mend(ctx, true) }, InLine: true}, pods.Kinds, c.lost)
	c.egresses.recorded = c.tell
	return nil
}

// mend makes the rule and the parameters. If Coil attached pods before, the routes to them stay as they are.
func (c *chained) mend(ctx context.Context, repair bool) error {
	return c.keeper.Mend(ctx, repair, c.keeper.Wired)
}

func (c *chained) onAttached(changed func()) { c.changed = changed }

func (c *chained) tell() {
	if c.changed != nil {
		c.changed()
	}
}

// lost takes changes in the kernel. The other plugin may give a pod another link, or a link another index.
func (c *chained) lost(ctx context.Context, changes []rtnl.Change) bool {
	if slices.ContainsFunc(changes, func(ch rtnl.Change) bool {
		return ch.Kind == rtnl.LinkChanged || ch.Kind == rtnl.LinkLost || ch.Kind == rtnl.Unknown
	}) {
		c.tell()
	}
	return c.keeper.Lost(ctx, changes)
}

// start makes the rule and the parameters, again until it succeeds, and keeps them.
func (c *chained) start(ctx context.Context, group *errgroup.Group) error {
	changes, err := c.network.Handle().Subscribe(rtnl.Interest{
		Protocol: c.Protocol, Tables: []int{c.PodTable, c.ExportTable, dataplane.TableUnassigned}, Rules: true, Links: true,
	})
	if err != nil {
		return err
	}
	group.Go(func() error {
		return errors.Join(upkeep.Watch(ctx, changes, kernelSettle, c.loop, c.announcer.loop), changes.Close())
	})
	err = c.untilInLine(ctx, false, "Making the rule to routes of floating addresses failed, trying again", func(ctx context.Context) error {
		return c.mend(ctx, false)
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return c.loop.Run(ctx) })
	c.announcer.begin(ctx, group)
	return nil
}

// attachedPods are routers of Egresses. It looks only for the links to these.
func (c *chained) attachedPods(ctx context.Context) (pods map[types.UID]place.Pod, unknown map[types.UID]error, err error) {
	all, err := c.store.ListClients(ctx)
	if err != nil {
		return nil, nil, err
	}
	routers := slices.DeleteFunc(all, func(s store.Client) bool { return s.UID == "" || !c.egresses.cluster.ListsRouter(types.UID(s.UID)) })
	pods, unknown = c.reach(ctx, routers, c.wayTo)
	return pods, unknown, nil
}

// reach returns how the host reaches routers, and of which that isn't known now. These are reached as before, if they were.
func (c *chained) reach(ctx context.Context, routers []store.Client, wayTo func(context.Context, store.Sandbox) (place.Pod, error)) (map[types.UID]place.Pod, map[types.UID]error) {
	reached, unreached, unknown := map[types.UID]place.Pod{}, map[types.UID]bool{}, map[types.UID]error{}
	for _, s := range routers {
		uid := types.UID(s.UID)
		p, err := wayTo(ctx, s.Sandbox)
		switch {
		case errors.Is(err, podnet.ErrNoHostLink):
			unreached[uid] = true
			if !c.unreached[uid] {
				c.warnOfRouter(s.Pod, err)
			}
		case errors.Is(err, netns.ErrNotExist), errors.Is(err, netns.ErrNotNetns): // its DEL comes
		case err != nil:
			unknown[uid] = fmt.Errorf("look for the link of the router %s/%s: %w", s.Namespace, s.Name, err)
			if before, was := c.reached[uid]; was {
				reached[uid] = before
			}
		default:
			reached[uid] = p
		}
	}
	c.reached, c.unreached = reached, unreached
	return reached, unknown
}

// warnOfRouter makes an Event that a router can't have floating addresses.
func (c *chained) warnOfRouter(p store.Pod, why error) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: types.UID(p.UID)}
	c.recorder.Eventf(ref, nil, corev1.EventTypeWarning, "NoHostLink", "NoHostLink",
		"the router can't have a floating address on node %s: %v: the plugin that attaches pods must do so by veths, as ptp and bridge do", c.NodeName, why)
}

func (c *chained) wayTo(ctx context.Context, s store.Sandbox) (place.Pod, error) {
	ns, err := netns.Open(s.Path)
	if err != nil {
		return place.Pod{}, err
	}
	defer ns.Close()
	if ns.Inode() != s.Inode {
		return place.Pod{}, fmt.Errorf("%w: %s is another one than the pod's", netns.ErrNotExist, s.Path)
	}
	way, err := c.network.WayOf(ctx, ns, s.Address)
	return place.Pod{Link: way.Link, Inside: way.Inside, Address: s.Address, Netns: s.Netns}, err
}

// toldClients is a record of clients that calls changed after each change.
type toldClients struct {
	store.Clients
	changed func()
}

func (t toldClients) SetClient(ctx context.Context, c store.Client) error {
	defer t.changed()
	return t.Clients.SetClient(ctx, c)
}

func (t toldClients) ForgetClients(ctx context.Context, ids ...attachment.ID) error {
	defer t.changed()
	return t.Clients.ForgetClients(ctx, ids...)
}

package coild

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/node/floating/handover"
	"github.com/coil-net/coil/pkg/node/floating/standby"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// composeCopies makes what copies connections of floating addresses to other nodes.
func (h *holder) composeCopies(ctx context.Context) {
	routers := tables.New(ctx, h.routerFlows)
	h.inStep = reconcile.New("floating-standby", h.tellStandby, h.metrics)
	h.standby = standby.New(ctx, standby.Config{
		Node: h.NodeName, Block: h.blocks.Find, Tables: routers, Dial: h.peers.Dial, Follow: h.followFlows, Here: h.Here,
		Moves: func(id string) bool { return h.handover.Moves(id) }, Told: func(block string) { h.inStep.Add(block) },
	}, h.registry)
	h.handover = handover.New(ctx, handover.Config{
		Node: h.NodeName, Block: h.blocks.Find, Tables: routers, Dial: h.peers.Dial, Straggle: h.straggle, Standby: h.standby,
	}, h.registry)
}

// flows are those of a router, and keep its network namespace.
type flows struct {
	*conntrack.Table
	ns *netns.NS
}

// Close implements tables.Table.
func (f flows) Close() {
	f.Table.Close()
	_ = f.ns.Close()
}

// routerFlows opens the table of flows of a pod of this node, in the network namespace that its attachment was made in.
func (h *holder) routerFlows(_ context.Context, pod types.UID) (tables.Table, error) {
	p, ok := h.pod(pod)
	if !ok {
		return nil, fmt.Errorf("the pod %s isn't on this node", pod)
	}
	return openFlows(p.Netns)
}

// followFlows subscribes to the flows of a pod of this node.
func (h *holder) followFlows(ctx context.Context, pod types.UID) (standby.Events, error) {
	opened, err := h.routerFlows(ctx, pod)
	if err != nil {
		return nil, err
	}
	f := opened.(flows)
	events, err := f.Events(conntrack.FollowBuffer)
	if err != nil {
		f.Close()
		return nil, err
	}
	return followed{events, f}, nil
}

// followed are changes of flows, and keep the router's network namespace.
type followed struct {
	*conntrack.Events
	flows flows
}

// Close implements standby.Events.
func (f followed) Close() error {
	defer f.flows.Close()
	return f.Events.Close()
}

// straggle lets a router send from addresses that have moved away.
func (h *holder) straggle(ctx context.Context, pod types.UID, addrs ...netip.Addr) error {
	p, ok := h.pod(pod)
	if !ok {
		return nil // nor does it send
	}
	return h.network.Straggle(ctx, p.Link, addrs...)
}

func openFlows(at store.Netns) (tables.Table, error) {
	ns, err := netns.Open(at.Path)
	if err != nil {
		return nil, err
	}
	if ns.Inode() != at.Inode {
		return nil, errors.Join(fmt.Errorf("%s is another network namespace than that of the pod", at.Path), ns.Close())
	}
	table, err := conntrack.New(ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return flows{table, ns}, nil
}

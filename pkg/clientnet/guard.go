package clientnet

import (
	"context"
	"errors"
	"fmt"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/store"
)

// hostLink returns the node's end of a client's link; 0 for a client without a guard: of a pod that another plugin
// attached, and not by a veth to the node.
func (n *Network) hostLink(ctx context.Context, ns *netns.NS, c client.Client) (int, error) {
	if n.host == nil {
		return 0, nil
	}
	link, err := n.host.HostLink(ctx, attachment.ID{ContainerID: c.ContainerID, IfName: c.Link}, ns, c.Address)
	if errors.Is(err, podnet.ErrNoHostLink) {
		if c.Wired && len(c.Egresses) > 0 {
			return 0, fmt.Errorf("%w: %w", ErrUnguarded, err)
		}
		return 0, nil
	}
	return link, err
}

// onHost does work with the node's end of a client's link, if there is one.
func (n *Network) onHost(ctx context.Context, at store.Netns, c client.Client, work func(link int) error) error {
	return visit(ctx, at, func(ns *netns.NS) error {
		link, err := n.hostLink(ctx, ns, c)
		if err == nil && link != 0 {
			err = work(link)
		}
		if err != nil {
			return fmt.Errorf("the node's guard of the client: %w", err)
		}
		return nil
	})
}

// Guard returns the node's guard of a client. Nothing in the pod is asked, where a program may see to it that the answer
// takes long; the same holds for SetGuard and CheckGuard.
func (n *Network) Guard(ctx context.Context, at store.Netns, c client.Client) (g dataplane.ClientGuard, err error) {
	err = n.onHost(ctx, at, c, func(link int) (err error) {
		g, err = n.host.ClientGuard(ctx, link)
		return err
	})
	return g, err
}

// SetGuard gives a client another guard, unless it has that one.
func (n *Network) SetGuard(ctx context.Context, at store.Netns, c client.Client, g dataplane.ClientGuard) error {
	return n.onHost(ctx, at, c, func(link int) error {
		have, err := n.host.ClientGuard(ctx, link)
		if err == nil && !have.Equal(g) {
			err = n.host.GuardClient(ctx, link, g)
		}
		return err
	})
}

// CheckGuard says whether a client has the guard.
func (n *Network) CheckGuard(ctx context.Context, at store.Netns, c client.Client, g dataplane.ClientGuard) error {
	return n.onHost(ctx, at, c, func(link int) error { return n.host.CheckClientGuard(ctx, link, g) })
}

package clientnet

import (
	"context"
	"errors"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/fou"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/tunnel"
	"github.com/coil-net/coil/pkg/plan/client"
)

// FoU are Tunnels of Foo over UDP.
type FoU struct{}

// Make implements Tunnels.
func (FoU) Make(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error) {
	families := client.FamiliesOf(want)
	if len(families) == 0 {
		return nil, dataplane.Result{}, nil
	}
	// The tunnels work one way without these.
	portErr := fou.Ensure(ctx, ns, port, families...)
	s := tunnel.New(h)
	_, receiverErr := s.EnsureReceivers(ctx, 0, families...)
	links, result, err := s.Ensure(ctx, want)
	return links, result, errors.Join(portErr, receiverErr, err)
}

// Prune implements Tunnels.
func (FoU) Prune(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, keep []dataplane.Tunnel, sinks ...dataplane.Family) (dataplane.Result, error) {
	s := tunnel.New(h)
	result, err := s.Prune(ctx, keep)
	if len(keep) == 0 {
		err = errors.Join(err, s.RemoveReceivers(ctx, sinks...), fou.Remove(ctx, ns, port))
	}
	return result, err
}

// Check implements Tunnels.
func (FoU) Check(ctx context.Context, ns *netns.NS, h *rtnl.Handle, port uint16, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error) {
	families := client.FamiliesOf(want)
	if len(families) == 0 {
		return nil, nil
	}
	links, err := tunnel.New(h).Check(ctx, want)
	return links, errors.Join(err, fou.Check(ctx, ns, port, families...))
}

// MakeSinks implements Tunnels.
func (FoU) MakeSinks(ctx context.Context, h *rtnl.Handle, mtu int, families ...dataplane.Family) (map[dataplane.Family]int, error) {
	return tunnel.New(h).EnsureReceivers(ctx, mtu, families...)
}

// Sink implements Tunnels.
func (FoU) Sink(ctx context.Context, h *rtnl.Handle, f dataplane.Family) (int, error) {
	return tunnel.New(h).Sink(ctx, f)
}

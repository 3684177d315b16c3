package coild

import (
	"context"
	"fmt"
	"net/netip"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// send sends packets from a pod, and counts them there and on the node.
func (d *daemon) send(ctx context.Context, alloc store.Allocation, o inspection.Order) (inspection.Sending, error) {
	klog.FromContext(ctx).Info("Sending packets from a pod, because somebody asked for it", "pod", klog.KRef(alloc.Namespace, alloc.Name), "protocol", o.Protocol, "to", o.To, "count", o.Count)
	var ends []string // of the pod's link; a chained plugin's isn't known
	if alloc.HostIfIndex != 0 {
		l, err := d.network.Handle().LinkByIndex(ctx, alloc.HostIfIndex)
		if err != nil {
			return inspection.Sending{}, err
		}
		ends = append(ends, l.Name)
	}
	count, err := clientnet.Count(ctx, d.network.Handle(), ends)
	if err != nil {
		return inspection.Sending{}, err
	}
	dropped := clientnet.CountDropped(ctx, d.droppedOnNode)
	s, err := clientnet.Send(ctx, alloc.Netns, alloc.Address.Addrs(), o)
	if err != nil {
		return s, err
	}
	for _, l := range count.Since(ctx, &s.Unknown) {
		l.Out, l.Back = l.Back, l.Out // what the pod sends comes in here
		s.Links = append(s.Links, l)
	}
	s.Dropped.Node = dropped(ctx, &s.Unknown)
	if s.Flows, err = flowsOf(ctx, s, o); err != nil {
		s.Unknown = append(s.Unknown, fmt.Sprintf("flows that the node tracks: %v", err))
	}
	return s, nil
}

// droppedOnNode counts what the node's table of nftables has dropped of pods, by the reason.
func (d *daemon) droppedOnNode(ctx context.Context) (map[string]uint64, error) {
	counters, err := d.network.Dropped(ctx)
	if err != nil {
		return nil, fmt.Errorf("count what the node dropped: %w", err)
	}
	all := map[string]uint64{}
	for name, families := range counters {
		for _, n := range families {
			all[name] += n
		}
	}
	return all, nil
}

// flowsOf are the flows of packets that were sent, as the node tracks them.
func flowsOf(ctx context.Context, s inspection.Sending, o inspection.Order) (all []inspection.Flow, err error) {
	from, err := netip.ParseAddr(s.From)
	if err != nil {
		return []inspection.Flow{}, nil // nothing was sent
	}
	t, err := conntrack.New(nil)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	return t.Sent(ctx, inspection.Flows{Client: from, Protocol: o.Protocol, To: o.To, IDs: s.IDs()})
}

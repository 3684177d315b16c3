package clientnet

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sending"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/store"
)

const (
	// sendEvery is the time between two packets.
	sendEvery = 100 * time.Millisecond
	// answersWithin is longer than a kernel asks for the MAC address of a neighbour (three times, once a second) before it says that a host is unreachable.
	answersWithin = 3500 * time.Millisecond
)

// kinds are those of packets, by protocol.
var kinds = map[string]sending.Kind{inspection.ICMP: sending.Echo, inspection.TCP: sending.TCP, inspection.UDP: sending.UDP}

// Send sends packets from a pod's network namespace, by sockets of its own, and says what became of them. The addresses from are the pod's. Nothing else is changed.
func Send(ctx context.Context, at store.Netns, from []netip.Addr, o inspection.Order) (s inspection.Sending, err error) {
	if err := o.Validate(); err != nil {
		return s, err
	}
	err = visit(ctx, at, func(ns *netns.NS) error {
		h, err := rtnl.NewOfPod(ns)
		if err != nil {
			return err
		}
		defer h.Close()
		s, err = sendIn(ctx, ns, h, from, o)
		return err
	})
	return s, err
}

func sendIn(ctx context.Context, ns *netns.NS, h *rtnl.Handle, from []netip.Addr, o inspection.Order) (s inspection.Sending, err error) {
	hops, err := wayIn(ctx, h, from, o.To.Addr())
	if err != nil {
		return s, err
	}
	var links []string
	for _, hop := range hops {
		for _, l := range hop.Links {
			if !slices.Contains(links, l) {
				links = append(links, l)
			}
		}
	}
	traffic, err := Count(ctx, h, links)
	if err != nil {
		return s, err
	}
	dropped := CountDropped(ctx, func(ctx context.Context) (map[string]uint64, error) { return droppedIn(ctx, ns) })
	order := sending.Order{Kind: kinds[o.Protocol], To: o.To, Count: o.Count, Interval: sendEvery, Wait: answersWithin}
	source, outcomes, err := sending.Send(ctx, ns, order)
	if err != nil {
		return s, err
	}
	s = toldOf(order, o, source, outcomes)
	// Packets were sent: what can't be counted now is said beside what became of them.
	s.Links = traffic.Since(ctx, &s.Unknown)
	for i := range s.Links {
		s.Links[i].InPod = true
	}
	s.Dropped.Pod = dropped(ctx, &s.Unknown)
	return s, nil
}

// CountDropped begins to count packets that are dropped, by the reason. What it returns says how many were dropped since then, or why that isn't known: a kernel without
// nftables sends packets, too.
func CountDropped(ctx context.Context, read func(context.Context) (map[string]uint64, error)) func(context.Context, *[]string) map[string]uint64 {
	before, failed := read(ctx)
	return func(ctx context.Context, unknown *[]string) map[string]uint64 {
		now, err := read(ctx)
		if err = cmp.Or(failed, err); err != nil {
			*unknown = append(*unknown, err.Error())
			return nil
		}
		return inspection.More(now, before)
	}
}

// reasons are the counters of packets that a pod's table drops. A program in the pod may have made others, with names that no terminal should see.
var reasons = []string{ruleset.ForgedSource, ruleset.NonRouter, ruleset.PastTunnel}

// droppedIn counts what the pod's table of nftables has dropped, by the reason. A pod that uses no Egress has no table.
func droppedIn(ctx context.Context, ns *netns.NS) (map[string]uint64, error) {
	t, err := nft.NewOfPod(ns, dataplane.NftTable)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	counters, err := t.Counters(ctx)
	if err != nil {
		return nil, fmt.Errorf("count what the pod's table of nftables dropped: %w", err)
	}
	all := map[string]uint64{}
	for _, c := range counters {
		if name, _ := dataplane.CutFamily(c.Name); slices.Contains(reasons, name) {
			all[name] += c.Packets
		}
	}
	return all, nil
}

// toldOf says what became of packets.
func toldOf(order sending.Order, o inspection.Order, source netip.Addr, outcomes []sending.Outcome) inspection.Sending {
	s := inspection.Sending{Protocol: o.Protocol, To: o.To.String(), Packets: []inspection.SentPacket{}}
	if source.IsValid() {
		s.From = source.String()
	}
	if o.To.Port() == 0 {
		s.To = o.To.Addr().String()
	}
	for _, x := range outcomes {
		s.Packets = append(s.Packets, packetOf(order, x))
	}
	return s
}

// packetOf says what became of a packet.
func packetOf(order sending.Order, x sending.Outcome) inspection.SentPacket {
	p := inspection.SentPacket{
		ID: x.ID, Resent: x.Resent, Answer: x.Words(order.Kind, order.To.Addr().Is4()), Arrived: x.Arrived(order),
		Milliseconds: float64(x.After.Round(10*time.Microsecond)) / float64(time.Millisecond),
	}
	if x.NotSent != nil {
		p.NotSent = x.NotSent.Error()
	}
	if x.Answer != sending.None && x.By.IsValid() {
		p.By = x.By.String()
	}
	return p
}

// Counting is of packets that links carry from a moment on.
type Counting struct {
	h      *rtnl.Handle
	links  []string
	before []rtnl.Traffic
}

// Count begins to count the packets of links.
func Count(ctx context.Context, h *rtnl.Handle, links []string) (*Counting, error) {
	c := &Counting{h: h, links: links}
	for _, l := range links {
		t, err := h.Traffic(ctx, l)
		if err != nil {
			return nil, fmt.Errorf("count packets of %s: %w", l, err)
		}
		c.before = append(c.before, t)
	}
	return c, nil
}

// Since returns the packets since then. Of links that can't be read any more it says why.
func (c *Counting) Since(ctx context.Context, unknown *[]string) []inspection.LinkTraffic {
	all := []inspection.LinkTraffic{}
	for i, l := range c.links {
		t, err := c.h.Traffic(ctx, l)
		if err != nil {
			*unknown = append(*unknown, fmt.Sprintf("packets of %s: %v", l, err))
			continue
		}
		t = t.Since(c.before[i])
		all = append(all, inspection.LinkTraffic{Link: l, Out: t.Out, Back: t.In, Lost: t.Lost})
	}
	return all
}

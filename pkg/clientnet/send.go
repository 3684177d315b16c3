package clientnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sending"
	"github.com/coil-net/coil/pkg/plan/inspection"
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
	order := sending.Order{Kind: kinds[o.Protocol], To: o.To, Count: o.Count, Interval: sendEvery, Wait: answersWithin}
	source, outcomes, err := sending.Send(ctx, ns, order)
	if err != nil {
		return s, err
	}
	s = inspection.Sending{Protocol: o.Protocol, To: o.To.String(), Packets: []inspection.SentPacket{}}
	if source.IsValid() {
		s.From = source.String()
	}
	if o.To.Port() == 0 {
		s.To = o.To.Addr().String()
	}
	for _, x := range outcomes {
		s.Packets = append(s.Packets, packetOf(order, x))
	}
	s.Links, err = traffic.Since(ctx)
	for i := range s.Links {
		s.Links[i].InPod = true
	}
	return s, err
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

// Since returns the packets since then. A link that has gone meanwhile is left out.
func (c *Counting) Since(ctx context.Context) ([]inspection.LinkTraffic, error) {
	all := []inspection.LinkTraffic{}
	for i, l := range c.links {
		t, err := c.h.Traffic(ctx, l)
		if errors.Is(err, rtnl.ErrNotExist) {
			continue
		}
		if err != nil {
			return all, fmt.Errorf("count packets of %s: %w", l, err)
		}
		t = t.Since(c.before[i])
		all = append(all, inspection.LinkTraffic{Link: l, Out: t.Out, Back: t.In, Lost: t.Lost})
	}
	return all, nil
}

package place

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/datagram"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

const (
	// probes is how many are sent until one passes, probeTime how long is waited for each, and probeStep the time between two looks.
	probes    = 3
	probeTime = 50 * time.Millisecond
	probeStep = 2 * time.Millisecond
	// probeHops is one more than a router needs to forward a packet, which the next one would drop if the rules that do it were gone.
	probeHops = 2
)

// Blocked returns the families of an address for which the node answers, and of which it drops the packets that it should forward. Of a
// family without a route to the outside nothing is known: it isn't blocked. The pod sends a datagram with the address as its source, which
// rules of others meet as they meet the pod's packets, and which doesn't leave the node.
func (p *Place) Blocked(ctx context.Context, a floating.Address) ([]dataplane.Family, error) {
	p.probing.Lock() // the counters are those of all addresses
	defer p.probing.Unlock()
	pod, ok := p.cfg.Pod(a.Pod)
	if !ok {
		return nil, nil // the address goes as well
	}
	link, err := p.cfg.Handle.LinkByIndex(ctx, pod.Link)
	if err != nil {
		return nil, fmt.Errorf("look up the link of the pod %s: %w", a.Pod, err)
	}
	ns, err := netns.Open(pod.Netns.Path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	if ns.Inode() != pod.Netns.Inode {
		return nil, fmt.Errorf("%s isn't the network namespace of the pod %s any more", pod.Netns.Path, a.Pod)
	}
	var blocked []dataplane.Family
	var errs []error
	for _, addr := range a.Addrs() {
		is, err := p.blocked(ctx, ns, cmp.Or(pod.Inside, link.Peer), link.MAC, addr)
		errs = append(errs, err)
		if is {
			blocked = append(blocked, dataplane.FamilyOf(addr))
		}
	}
	return blocked, errors.Join(errs...)
}

// blocked sends probes until one passes.
func (p *Place) blocked(ctx context.Context, ns *netns.NS, link int, mac net.HardwareAddr, from netip.Addr) (bool, error) {
	f := dataplane.FamilyOf(from)
	before, err := p.probed(ctx, f)
	if err != nil {
		return false, err
	}
	now := before
	for range probes {
		err := datagram.Send(ns, link, datagram.Datagram{MAC: mac, From: from, To: ruleset.ProbeTo[f], Hops: probeHops, Content: ruleset.Probe})
		if err != nil {
			return false, err
		}
		for until := time.Now().Add(probeTime); time.Now().Before(until); {
			if now, err = p.probed(ctx, f); err != nil {
				return false, err
			}
			if now.left != before.left {
				return false, nil
			}
			select {
			case <-ctx.Done():
				return false, ctx.Err()
			case <-time.After(probeStep):
			}
		}
	}
	return now.forwarded != before.forwarded, nil
}

// passed counts probes.
type passed struct{ forwarded, left uint64 }

func (p *Place) probed(ctx context.Context, f dataplane.Family) (passed passed, err error) {
	counters, err := p.cfg.Table.Counters(ctx)
	for _, c := range counters {
		switch c.Name {
		case f.Named(ruleset.ProbeForwarded):
			passed.forwarded = c.Packets
		case f.Named(ruleset.ProbeLeft):
			passed.left = c.Packets
		}
	}
	return passed, err
}

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
	"github.com/coil-net/coil/pkg/kernel/rtnl"
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

// Fate is what becomes of the packets of an address that the node should forward. It isn't known if the zero value is returned.
type Fate struct {
	// Passed says that they leave the node, in all families for which it has a route to the outside.
	Passed bool
	// Dropped are the families of which they don't.
	Dropped []dataplane.Family
}

// Probe finds out what becomes of packets that the pod of an address sends: of one for which the node answers, or of one that it was prepared
// for. The pod sends a datagram with the address as its source, which rules of others meet as they meet the pod's packets, and which doesn't
// leave the node.
func (p *Place) Probe(ctx context.Context, a floating.Address) (Fate, error) {
	p.probing.Lock() // the counters are those of all addresses
	defer p.probing.Unlock()
	pod, ok := p.cfg.Pod(a.Pod)
	if !ok {
		return Fate{}, nil // the address goes as well
	}
	link, err := p.cfg.Handle.LinkByIndex(ctx, pod.Link)
	if err != nil {
		return Fate{}, fmt.Errorf("look up the link of the pod %s: %w", a.Pod, err)
	}
	ns, err := netns.Open(pod.Netns.Path)
	if err != nil {
		return Fate{}, err
	}
	defer ns.Close()
	if ns.Inode() != pod.Netns.Inode {
		return Fate{}, fmt.Errorf("%s isn't the network namespace of the pod %s any more", pod.Netns.Path, a.Pod)
	}
	var fate Fate
	var errs []error
	unknown := false
	for _, addr := range a.Addrs() {
		seen, err := p.send(ctx, ns, cmp.Or(pod.Inside, link.Peer), link.MAC, addr)
		switch {
		case err != nil:
			errs = append(errs, err)
		case seen.left > 0:
			fate.Passed = true
		case seen.forwarded > 0:
			fate.Dropped = append(fate.Dropped, dataplane.FamilyOf(addr))
		default:
			routed, err := p.routed(ctx, dataplane.FamilyOf(addr))
			errs = append(errs, err)
			unknown = unknown || routed
		}
	}
	err = errors.Join(errs...)
	fate.Passed = fate.Passed && len(fate.Dropped) == 0 && !unknown && err == nil
	return fate, err
}

// routed says whether the node has a route by which probes of a family go to the outside.
func (p *Place) routed(ctx context.Context, f dataplane.Family) (bool, error) {
	r, err := p.cfg.Handle.RouteTo(ctx, ruleset.ProbeTo[f], 0)
	if errors.Is(err, rtnl.ErrNotExist) {
		return false, nil
	}
	return r.Type == dataplane.Unicast, err
}

// send sends probes until one passes, and counts them.
func (p *Place) send(ctx context.Context, ns *netns.NS, link int, mac net.HardwareAddr, from netip.Addr) (passed, error) {
	f := dataplane.FamilyOf(from)
	before, err := p.counted(ctx, f)
	if err != nil || !before.here {
		return passed{}, err
	}
	var seen passed
	for range probes {
		err := datagram.Send(ns, link, datagram.Datagram{MAC: mac, From: from, To: ruleset.ProbeTo[f], Hops: probeHops, Content: ruleset.Probe})
		if err != nil {
			return passed{}, err
		}
		for until := time.Now().Add(probeTime); time.Now().Before(until); {
			now, err := p.counted(ctx, f)
			if err != nil {
				return passed{}, err
			}
			if seen = now.since(before); seen.left > 0 {
				return seen, nil
			}
			select {
			case <-ctx.Done():
				return passed{}, ctx.Err()
			case <-time.After(probeStep):
			}
		}
	}
	return seen, nil
}

// passed counts probes. Without counters there is nothing that would keep a probe on the node.
type passed struct {
	here            bool
	forwarded, left uint64
}

// since is what was counted since before; nothing, if the table was made anew meanwhile.
func (p passed) since(before passed) passed {
	if p.forwarded < before.forwarded || p.left < before.left {
		return passed{}
	}
	return passed{p.here, p.forwarded - before.forwarded, p.left - before.left}
}

func (p *Place) counted(ctx context.Context, f dataplane.Family) (passed passed, err error) {
	counters, err := p.cfg.Tables.of(f).Counters(ctx)
	for _, c := range counters {
		switch c.Name {
		case f.Named(ruleset.ProbeForwarded):
			passed.here, passed.forwarded = true, c.Packets
		case f.Named(ruleset.ProbeLeft):
			passed.left = c.Packets
		}
	}
	return passed, err
}

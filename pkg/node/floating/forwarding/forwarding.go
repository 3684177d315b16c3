// Package forwarding finds out whether the node forwards packets of floating addresses: the pod of an address sends datagrams with the address as
// their source, which rules of others meet as they meet the pod's packets, and which don't leave the node.
//
// It owns the table dataplane.NftTableProbes, which is there while probes are under way. It must not know who has an address, nor what follows.
package forwarding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/datagram"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

const (
	// probes is how many are sent until one passes, probeTime how long is waited for each, and probeStep the time between two looks.
	probes    = 3
	probeTime = 50 * time.Millisecond
	probeStep = 2 * time.Millisecond
	// lateTime is how long the table waits for probes that haven't arrived: without it they would leave the node.
	lateTime = time.Second
	// probeHops is one more than a router needs to forward a packet, which the next one would drop if the rules that do it were gone.
	probeHops = 2
)

// Config is what a Prober is made of.
type Config struct {
	Handle *rtnl.Handle
	// Table is the table dataplane.NftTableProbes.
	Table *nft.Table
	// Pod returns the pod of a UID, if it is on the node and has its link.
	Pod func(types.UID) (place.Pod, bool)
	// Tracked lets the node track connections of Egresses' addresses; see ruleset.Floating.
	Tracked bool
}

// Prober sends probes. Its methods may be called concurrently.
type Prober struct {
	cfg   Config
	fates *prometheus.CounterVec
	mu    sync.Mutex // is held while there is the table
}

// New returns a Prober.
func New(cfg Config, registry prometheus.Registerer) *Prober {
	p := &Prober{cfg: cfg, fates: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "coil_floating_probes_total",
		Help: "Times that it was looked whether the node forwards packets of a floating address, by what became of them: passed, dropped or unknown.",
	}, []string{"fate"})}
	registry.MustRegister(p.fates)
	for _, fate := range []string{"passed", "dropped", "unknown"} {
		p.fates.WithLabelValues(fate)
	}
	return p
}

// Fate is what becomes of the packets of an address that the node should forward. It isn't known if the zero value is returned.
type Fate struct {
	// Passed says that they leave the node, in all families for which it has a route to the outside.
	Passed bool
	// Dropped are the families of which they don't.
	Dropped []dataplane.Family
	// Err is why nothing is known of some family.
	Err error
}

// name is the value of a label.
func (f Fate) name() string {
	switch {
	case len(f.Dropped) > 0:
		return "dropped"
	case f.Passed:
		return "passed"
	}
	return "unknown"
}

// Clear removes what an earlier life has left.
func (p *Prober) Clear(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.cfg.Table.Sync(ctx, ruleset.Probes{}.Ruleset())
	return err
}

// Probe finds out what becomes of packets of addresses, one after the other: of those that the node answers for, and of those for which it might. Before
// the probes of one are sent, before is called. The fates are in the order of the addresses; without the table there are none.
func (p *Prober) Probe(ctx context.Context, addrs []floating.Address, before func(context.Context, floating.Address) error) (fates []Fate, err error) {
	if len(addrs) == 0 {
		return nil, nil
	}
	want := ruleset.Probes{Tracked: p.cfg.Tracked}
	for _, a := range addrs {
		want.Addresses = append(want.Addresses, a.Addrs()...)
		if a.OfEgress {
			want.OfEgresses = append(want.OfEgresses, a.Addrs()...)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() {
		_, end := p.cfg.Table.Sync(context.WithoutCancel(ctx), ruleset.Probes{}.Ruleset())
		err = errors.Join(err, end)
	}()
	if _, err := p.cfg.Table.Sync(ctx, want.Ruleset()); err != nil {
		return nil, err
	}
	sent := 0
	for _, a := range addrs {
		var fate Fate
		if fate.Err = before(ctx, a); fate.Err == nil {
			var n int
			fate, n = p.probe(ctx, a)
			sent += n
		}
		p.fates.WithLabelValues(fate.name()).Inc()
		fates = append(fates, fate)
	}
	return fates, p.awaitArrived(ctx, sent)
}

// awaitArrived waits for probes of both families that are late.
func (p *Prober) awaitArrived(ctx context.Context, sent int) error {
	for until := time.Now().Add(lateTime); time.Now().Before(until); {
		counters, err := p.cfg.Table.Counters(ctx)
		if err != nil {
			return err
		}
		arrived := uint64(0)
		for _, c := range counters {
			if c.Name == dataplane.IPv4.Named(ruleset.ProbeArrived) || c.Name == dataplane.IPv6.Named(ruleset.ProbeArrived) {
				arrived += c.Packets
			}
		}
		if arrived >= uint64(sent) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(probeStep):
		}
	}
	return nil
}

// probe sends the probes of an address, and counts them.
func (p *Prober) probe(ctx context.Context, a floating.Address) (fate Fate, sent int) {
	pod, ok := p.cfg.Pod(a.Pod)
	if !ok {
		return Fate{}, 0 // the address goes as well
	}
	link, err := p.cfg.Handle.LinkByIndex(ctx, pod.Link)
	if err != nil {
		return Fate{Err: fmt.Errorf("look up the link of the pod %s: %w", a.Pod, err)}, 0
	}
	ns, err := netns.Open(pod.Netns.Path)
	if err != nil {
		return Fate{Err: err}, 0
	}
	defer ns.Close()
	if ns.Inode() != pod.Netns.Inode {
		return Fate{Err: fmt.Errorf("%s isn't the network namespace of the pod %s any more", pod.Netns.Path, a.Pod)}, 0
	}
	unknown := false
	for _, addr := range a.Addrs() {
		seen, n, err := p.send(ctx, ns, cmp.Or(pod.Inside, link.Peer), link.MAC, addr)
		sent += n
		switch {
		case err != nil:
			fate.Err = errors.Join(fate.Err, err)
		case seen.left > 0:
			fate.Passed = true
		case seen.forwarded > 0:
			fate.Dropped = append(fate.Dropped, dataplane.FamilyOf(addr))
		default:
			routed, err := p.routed(ctx, dataplane.FamilyOf(addr))
			fate.Err = errors.Join(fate.Err, err)
			unknown = unknown || routed
		}
	}
	fate.Passed = fate.Passed && len(fate.Dropped) == 0 && !unknown && fate.Err == nil
	return fate, sent
}

// routed says whether the node has a route by which probes of a family go to the outside.
func (p *Prober) routed(ctx context.Context, f dataplane.Family) (bool, error) {
	r, err := p.cfg.Handle.RouteTo(ctx, ruleset.ProbeTo[f], 0)
	if errors.Is(err, rtnl.ErrNotExist) {
		return false, nil
	}
	return r.Type == dataplane.Unicast, err
}

// send sends probes until one passes, and counts them.
func (p *Prober) send(ctx context.Context, ns *netns.NS, link int, mac net.HardwareAddr, from netip.Addr) (seen passed, sent int, err error) {
	f := dataplane.FamilyOf(from)
	before, err := p.counted(ctx, f)
	if err != nil || !before.here {
		return passed{}, 0, err
	}
	for range probes {
		err := datagram.Send(ns, link, datagram.Datagram{MAC: mac, From: from, To: ruleset.ProbeTo[f], Hops: probeHops, Content: ruleset.Probe})
		if err != nil {
			return passed{}, sent, err
		}
		sent++
		for until := time.Now().Add(probeTime); time.Now().Before(until); {
			now, err := p.counted(ctx, f)
			if err != nil {
				return passed{}, sent, err
			}
			if seen = now.since(before); seen.left > 0 {
				return seen, sent, nil
			}
			select {
			case <-ctx.Done():
				return passed{}, sent, ctx.Err()
			case <-time.After(probeStep):
			}
		}
	}
	return seen, sent, nil
}

// passed counts probes. Without counters there is nothing that would keep a probe on the node.
type passed struct {
	here                     bool
	arrived, forwarded, left uint64
}

// since is what was counted since before; nothing, if the table was made anew meanwhile.
func (p passed) since(before passed) passed {
	if p.arrived < before.arrived || p.forwarded < before.forwarded || p.left < before.left {
		return passed{}
	}
	return passed{p.here, p.arrived - before.arrived, p.forwarded - before.forwarded, p.left - before.left}
}

func (p *Prober) counted(ctx context.Context, f dataplane.Family) (passed passed, err error) {
	counters, err := p.cfg.Table.Counters(ctx)
	for _, c := range counters {
		switch c.Name {
		case f.Named(ruleset.ProbeArrived):
			passed.here, passed.arrived = true, c.Packets
		case f.Named(ruleset.ProbeForwarded):
			passed.forwarded = c.Packets
		case f.Named(ruleset.ProbeLeft):
			passed.left = c.Packets
		}
	}
	return passed, err
}

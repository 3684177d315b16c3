package coild

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
)

// guard is the part that keeps the host's ruleset, by which pods send from their own addresses only, and clients of
// Egresses nothing past their tunnels. Pods are served without the first, too: a node whose kernel
// can't have it is still a node.
type guard struct {
	*daemon
	ofSources, ofClients bool // the kinds of rules that there are
	loop                 *upkeep.Loop
	active               prometheus.Gauge
	failed               bool // the last time; only for sync
}

const (
	// sourceGuard is the kind of the ruleset in coil_repairs_total.
	sourceGuard = "source_guard"
	// guardSettle is the time between two looks at the table while others change it.
	guardSettle = 100 * time.Millisecond
)

var guardKinds = map[string]string{
	sourceGuard: "a program flushes all of nftables: nftables.service does, when it starts again, if /etc/nftables.conf begins with " +
		"\"flush ruleset\"; let that file flush its own tables",
}

func (g *guard) part() part { return part{kinds: guardKinds, compose: g.compose, start: g.start} }

func (g *guard) compose(ctx context.Context) error {
	g.loop = upkeep.New(upkeep.Config{
		Name: "source-guard", Sync: func(ctx context.Context) error { return g.sync(ctx, true) }, Every: drift, Spread: drift / 10,
	}, g.repairs, g.metrics)
	g.active = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "coil_source_guard_active",
		Help: "1 if packets of pods with sources other than the pods' addresses are dropped, else 0.",
	})
	// The registry collects once to learn the metrics. Without a ruleset there are none yet, which it accepts.
	g.registry.MustRegister(g.active, prometheus.CollectorFunc(func(ch chan<- prometheus.Metric) { g.collectDropped(ctx, ch) }))
	return nil
}

// start lets the ruleset be made again whenever it is lost.
func (g *guard) start(ctx context.Context, group *errgroup.Group) error {
	if !g.ofSources && !g.ofClients {
		return nil
	}
	watch, err := g.network.WatchGuard()
	if err == nil {
		group.Go(func() error {
			return errors.Join(watch.Run(ctx, guardSettle, func() { g.loop.Lost(sourceGuard) }), watch.Close())
		})
	} else {
		klog.FromContext(ctx).Error(err, "The source guard is only looked at from time to time", "every", drift)
	}
	group.Go(func() error { return g.loop.Run(ctx) }) // at once: it may have been lost before the watch began
	return nil
}

// sync makes the ruleset what it should be, or removes it if there are rules for nothing. The routes to
// pods must be there: they say which addresses are whose.
func (g *guard) sync(ctx context.Context, repair bool) error {
	res, err := g.network.Guard(ctx)
	if repair {
		g.repairs.Done(ctx, sourceGuard, res.Added+res.Replaced)
	}
	active := 0.0
	if g.ofSources && err == nil {
		active = 1
	}
	g.active.Set(active)
	if err != nil && (g.ofSources || g.ofClients) && !g.failed {
		g.warn("SourceGuardUnavailable", "pods can send from addresses of others, or past the tunnels of Egresses: %v", err)
	}
	g.failed = err != nil
	return err
}

var (
	forgedPackets = prometheus.NewDesc("coil_source_guard_dropped_packets_total",
		"Packets of pods that were dropped because their sources weren't the pods' addresses, by family.", []string{"family"}, nil)
	pastTunnelPackets = prometheus.NewDesc("coil_egress_node_past_tunnel_packets_total",
		"Packets that pods sent to destinations of their Egresses past the tunnels, and the node dropped, by family.", []string{"family"}, nil)
)

// collectDropped reads the counters of the ruleset at each scrape. Without a rule that can be read there are none.
func (g *guard) collectDropped(ctx context.Context, ch chan<- prometheus.Metric) {
	dropped, err := g.network.Dropped(ctx)
	if err != nil {
		return
	}
	for counter, desc := range map[string]*prometheus.Desc{ruleset.Forged: forgedPackets, ruleset.PastTunnel: pastTunnelPackets} {
		for f, n := range dropped[counter] {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), f.String())
		}
	}
}

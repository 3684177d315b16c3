package coild

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/reconcile"
)

// guard keeps the host's ruleset, by which pods send from their own addresses only, and clients of
// Egresses nothing past their tunnels. Pods are served without the first, too: a node whose kernel
// can't have it is still a node.
type guard struct {
	loop   *reconcile.Loop[struct{}]
	active prometheus.Gauge
	failed bool // the last time; only for syncGuard
}

// guardSettle is the time between two looks at the table while others change it.
const guardSettle = 100 * time.Millisecond

// composeGuard builds the guard.
func (d *daemon) composeGuard(ctx context.Context) {
	d.guard.loop = reconcile.New("source-guard", again(func(ctx context.Context) error { return d.syncGuard(ctx, true) }), reconcile.WithMetrics(d.metrics))
	d.guard.active = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "coil_source_guard_active",
		Help: "1 if packets of pods with sources other than the pods' addresses are dropped, else 0.",
	})
	d.registry.MustRegister(d.guard.active, droppedCollector{ctx, d})
}

// guards says whether the host may have a ruleset.
func (d *daemon) guards() bool { return d.SourceGuard && d.IPAM || d.Egress }

// watchGuard lets the ruleset be made again whenever it is lost.
func (d *daemon) watchGuard(ctx context.Context, group *errgroup.Group) {
	if !d.guards() {
		return
	}
	watch, err := d.network.WatchGuard()
	if err == nil {
		wake := func() { d.guard.loop.AddAfter(struct{}{}, d.repairs.Wait(heal.SourceGuard)) }
		group.Go(func() error { return errors.Join(watch.Run(ctx, guardSettle, wake), watch.Close()) })
	} else {
		klog.FromContext(ctx).Error(err, "The source guard is only looked at from time to time", "every", drift)
	}
	d.guard.loop.Add(struct{}{}) // it may have been lost before the watch began
	group.Go(func() error { return d.guard.loop.Run(ctx, 1) })
}

// syncGuard makes the rule what it should be, or removes it without --source-guard. The routes to
// pods must be there: they say which addresses are whose.
func (d *daemon) syncGuard(ctx context.Context, repair bool) error {
	res, err := d.network.Guard(ctx)
	if repair {
		d.repairs.Done(ctx, heal.SourceGuard, res.Added+res.Replaced)
	}
	active := 0.0
	if d.SourceGuard && d.IPAM && err == nil {
		active = 1
	}
	d.guard.active.Set(active)
	if err != nil && d.guards() && !d.guard.failed {
		d.event(corev1.EventTypeWarning, "SourceGuardUnavailable", "pods can send from addresses of others, or past the tunnels of Egresses: %v", err)
	}
	d.guard.failed = err != nil
	return err
}

var (
	forgedPackets = prometheus.NewDesc("coil_source_guard_dropped_packets_total",
		"Packets of pods that were dropped because their sources weren't the pods' addresses, by family.", []string{"family"}, nil)
	pastTunnelPackets = prometheus.NewDesc("coil_egress_node_past_tunnel_packets_total",
		"Packets that pods sent to destinations of their Egresses past the tunnels, and the node dropped, by family.", []string{"family"}, nil)
)

// droppedCollector reads the counters of the ruleset at each scrape.
type droppedCollector struct {
	ctx context.Context // a scrape has none of its own
	*daemon
}

// Describe implements prometheus.Collector.
func (droppedCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- forgedPackets
	ch <- pastTunnelPackets
}

// Collect implements prometheus.Collector. Without a rule that can be read there is nothing to tell.
func (c droppedCollector) Collect(ch chan<- prometheus.Metric) {
	dropped, err := c.network.Dropped(c.ctx)
	if err != nil {
		return
	}
	for desc, packets := range map[*prometheus.Desc]map[dataplane.Family]uint64{forgedPackets: dropped.Forged, pastTunnelPackets: dropped.PastTunnel} {
		for f, n := range packets {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n), f.String())
		}
	}
}

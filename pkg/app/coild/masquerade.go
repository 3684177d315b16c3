package coild

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/node/masquerade"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// masquerader is the part that lets clients of Egresses with use: Node leave by the node's address, when they go through a router of the node. It is
// composed after the parts that it has.
type masquerader struct {
	*daemon
	addresses *addresses
	egresses  *egresses
	table     *nft.Table
	keeper    *masquerade.Keeper
	loop      *reconcile.Loop[struct{}]
	routers   prometheus.Gauge
	failed    string // with what, the last time; only for sync
}

// nodeAddress is the kind of the part's objects in coil_repairs_total.
const nodeAddress = "egress_node_address"

func (m *masquerader) part() part {
	return part{
		kinds: map[string]string{nodeAddress: "a program flushes all of nftables: nftables.service does, when it starts again, if " +
			"/etc/nftables.conf begins with \"flush ruleset\"; let that file flush its own tables"},
		watch: m.watch, compose: m.compose, start: m.start,
	}
}

// watch looks at the routers when one comes or goes, or when an Egress begins to have use: Node. When an Egress ceases to have it, nothing changes:
// connections have the addresses.
func (m *masquerader) watch() {
	m.egresses.changed = append(m.egresses.changed, func(n types.NamespacedName) {
		if e, err := m.egresses.cluster.Egress(context.Background(), n, false); err == nil && e.Spec.Addresses.For(v2.EgressAddressOfNode) {
			m.loop.Add(struct{}{})
		}
	})
	m.egresses.podChanged = append(m.egresses.podChanged, func(n types.NamespacedName) {
		if m.translates(context.Background(), store.Pod{Namespace: n.Namespace, Name: n.Name}) {
			m.loop.Add(struct{}{})
		}
	})
}

// translates says whether a pod is a router whose clients leave by the node's address.
func (m *masquerader) translates(ctx context.Context, pod store.Pod) bool {
	e := m.egresses.cluster.EgressOfRouter(ctx, pod)
	return e != nil && e.Spec.Addresses.For(v2.EgressAddressOfNode)
}

func (m *masquerader) compose(ctx context.Context) error {
	var err error
	if m.table, err = nft.New(nil, dataplane.NftTableMasquerade); err != nil {
		return err
	}
	m.keeper = masquerade.New(masquerade.Config{Handle: m.network.Handle(), Table: m.table, PodTable: m.PodTable})
	m.loop = reconcile.New("node-address", m.sync, m.metrics)
	m.addresses.onAttached(func() { m.loop.Add(struct{}{}) })
	m.routers = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "coil_egress_node_address_routers",
		Help: "Routers whose clients leave by an address of the node.",
	})
	m.registry.MustRegister(m.routers, prometheus.CollectorFunc(func(ch chan<- prometheus.Metric) { m.collect(ctx, ch) }))
	return nil
}

// start begins when the attachments are in line.
func (m *masquerader) start(ctx context.Context, group *errgroup.Group) error {
	m.loop.Add(struct{}{})
	group.Go(func() error {
		defer m.table.Close()
		return m.loop.Run(ctx, 1)
	})
	return nil
}

// checkTranslation is the time between two comparisons of the kernel's objects with what they should be, if there are any.
const checkTranslation = 4 * time.Second

// sync makes the objects of the kernel as they should be for the routers on the node.
func (m *masquerader) sync(ctx context.Context, _ struct{}) error {
	all, err := m.store.List(ctx)
	if err != nil {
		return err
	}
	var routers []masquerade.Router
	for _, a := range all {
		if a.State == store.Attached && a.Name != "" && !m.addresses.assign.Linkless(a) && m.translates(ctx, a.Pod) {
			routers = append(routers, masquerade.Router{Link: a.HostIfIndex, Address: a.Address, Netns: a.Netns})
		}
	}
	res, err := m.keeper.Sync(ctx, routers)
	m.repairs.Done(ctx, nodeAddress, res.Repaired)
	m.routers.Set(float64(res.Routers))
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != m.failed {
		klog.FromContext(ctx).Error(err, "Clients of Egresses can't leave by the node's address, trying again")
		m.warn("NodeAddressUnavailable", "clients of Egresses with use: Node can't leave by this node's address: %v", err)
	}
	m.failed = text
	if res.Routers > 0 { // what fails for one router doesn't delay the repair of what all need
		return reconcile.Retry(err, checkTranslation)
	}
	return err
}

var untranslatedPackets = prometheus.NewDesc("coil_egress_node_address_untranslated_packets_total",
	"Packets of clients of Egresses that the node dropped because it hadn't translated their source to its own, by family.", []string{"family"}, nil)

// collect reads the counters of the table at each scrape. Without a table there are none.
func (m *masquerader) collect(ctx context.Context, ch chan<- prometheus.Metric) {
	counters, err := m.table.Counters(ctx)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("No metrics of packets that weren't translated", "reason", err)
		return
	}
	for _, c := range counters {
		if name, f := dataplane.CutFamily(c.Name); name == ruleset.Untranslated {
			ch <- prometheus.MustNewConstMetric(untranslatedPackets, prometheus.CounterValue, float64(c.Packets), f.String())
		}
	}
}

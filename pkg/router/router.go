// Package router gives a node routes to the blocks of all other nodes of its flat
// L2 network, each by the InternalIP of the node that holds the block.
//
// It owns the routes of protocol 31. It must not know how routes are written.
//
// Routes that others delete come back: the kernel notifies of it, and once in a while everything is
// compared. State is derived from scratch at each sync: Nodes and AddressBlocks -> plan ->
// table. One bad object costs only its own routes.
package router

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
)

// Table makes the wanted routes those of the router in one table; see package kernel/route.
type Table interface {
	Sync(ctx context.Context, want []dataplane.Route) (dataplane.Result, error)
}

// Config has the router's parameters.
type Config struct {
	NodeName string
	// Table and Protocol are those of the routes.
	Table, Protocol int
	// UpdateInterval is the longest time between two syncs.
	UpdateInterval time.Duration
}

const (
	// settle is for how long changes are collected before a sync.
	settle = 100 * time.Millisecond
	// kernelSettle is the time between two looks at what has changed in the kernel, the
	// first of which is at once.
	kernelSettle = 500 * time.Millisecond
	// repairKind is that of the routes.
	repairKind = "peer_route"
)

// Router implements the package's task.
type Router struct {
	cfg    Config
	nodes  kube.Cache[corev1.Node]
	blocks kube.Cache[v2.AddressBlock]
	table  Table
	loop   *upkeep.Loop
	synced []cache.DoneChecker
	onSync func(error)
	last   []dataplane.Route // wanted by the last sync that wrote

	syncs   prometheus.Counter
	routes  prometheus.Gauge
	repairs *reconcile.Repairs
}

// New returns a router that isn't running. onSync is told the result of each sync.
func New(cfg Config, nodes, blocks cache.SharedIndexInformer, table Table,
	reg prometheus.Registerer, onSync func(error)) (*Router, error) {
	node := prometheus.Labels{"node": cfg.NodeName}
	r := &Router{
		cfg: cfg, nodes: kube.CacheOf[corev1.Node](nodes), blocks: kube.CacheOf[v2.AddressBlock](blocks), table: table, onSync: onSync,
		syncs: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "coil_router_syncs_total", Help: "Syncs of the routes to other nodes' blocks, whatever their result.", ConstLabels: node,
		}),
		routes: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "coil_router_routes_synced", Help: "Routes to other nodes' blocks that were wanted at the last sync that succeeded.", ConstLabels: node,
		}),
	}
	reg.MustRegister(r.syncs, r.routes)
	r.repairs = reconcile.NewRepairs(reg, nil, repairKind)
	r.loop = upkeep.New(upkeep.Config{
		Name: "router", Sync: r.sync, Settle: settle, Every: cfg.UpdateInterval, Lost: r.lost,
	}, r.repairs, reconcile.NewMetrics(reg))
	var err error
	r.synced, err = reconcile.Register(
		reconcile.On(nodes, reconcile.Handler(func(*corev1.Node) { r.loop.Changed() })),
		reconcile.On(blocks, reconcile.Handler(func(*v2.AddressBlock) { r.loop.Changed() })),
	)
	return r, err
}

// Run works until ctx ends. The routes stay: they are right until a node changes.
func (r *Router) Run(ctx context.Context) error { return r.loop.Run(ctx, r.synced...) }

// Watch syncs when the kernel reports that routes were deleted, or may have been, until ctx ends.
func (r *Router) Watch(ctx context.Context, changes upkeep.Source) error {
	return upkeep.Watch(ctx, changes, kernelSettle, r.loop)
}

// lost returns the kind of routes if some were deleted, or may have been: with a link that goes down or an address,
// IPv4's go without a word.
func (r *Router) lost(_ context.Context, changes []rtnl.Change) (kinds []string) {
	for _, c := range changes {
		if c.Kind == rtnl.RouteLost {
			r.repairs.Saw(repairKind, c.String())
		}
		// Pods come and go.
		if c.State == nil || !dataplane.OfPods(c.State.Group) {
			kinds = []string{repairKind}
		}
	}
	return kinds
}

func (r *Router) sync(ctx context.Context) error {
	r.syncs.Inc()
	err := r.syncOnce(ctx)
	r.onSync(err)
	return err
}

func (r *Router) syncOnce(ctx context.Context) error {
	want, skipped := routes.Peers(r.cfg.NodeName, r.nodes.All(), r.blocks.All(), r.cfg.Table, r.cfg.Protocol)
	r.loop.Skipped(ctx, "Blocks have no route: their Node isn't known, has no InternalIP of the family, or their range isn't valid", skipped)
	res, err := r.table.Sync(ctx, want)
	r.repairs.Done(ctx, repairKind, routes.Restored(res.Added, r.last, want))
	if err == nil || res.Changed() {
		r.last = want // they are taken to be there
	}
	if res.Changed() {
		klog.FromContext(ctx).Info("Routes to other nodes changed", "added", res.Added, "replaced", res.Replaced,
			"deleted", res.Deleted, "routes", len(want))
	}
	if err != nil {
		return fmt.Errorf("sync routes to other nodes: %w", err)
	}
	r.routes.Set(float64(len(want)))
	return nil
}

// Package lbgateway has the kernel of a gateway machine send connections to Services to their endpoints.
//
// It owns the table coil_lb, the kernel's flows to endpoints that are gone, the elections of keepalived in which the machine takes part, the status of its
// LoadBalancerGateway, and the file with what the machine did last. It must not know how endpoints are chosen, nor how keepalived is told what to do.
//
// The machine does what it did last from its start on. As soon as all caches are filled it does what these say: LoadBalancerGateway, AddressBlocks, Services,
// EndpointSlices, Nodes -> plan/lbgateway -> plan/ruleset -> table -> keepalived's configuration. The table doesn't wait for keepalived: each has a loop of its own. A change of an endpoint costs the same
// beside any number of Services: only Services that changed are looked at. Without the API server the machine goes on as it is.
package lbgateway

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kube"
	plan "github.com/coil-net/coil/pkg/plan/lbgateway"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// settle is for how long changes are collected before they are applied.
	settle = 10 * time.Millisecond
	// lookAgain is after how long the table is compared at the latest.
	lookAgain = 30 * time.Second
)

// Table is the machine's table of nftables; see package kernel/nft.
type Table interface {
	Sync(context.Context, dataplane.Ruleset) (dataplane.Result, error)
	Change(context.Context, ...dataplane.SetChange) error
	Touched(context.Context) (bool, error)
	Counters(context.Context) ([]nft.Counter, error)
}

// Flows are those that the machine's kernel knows; see package kernel/conntrack.
type Flows interface {
	ForgetForwarded(ctx context.Context, which func(conntrack.Forwarded) bool) (int, error)
}

// Config is what the gateway is made of. The caller runs the informers.
type Config struct {
	// Name is that of the machine's LoadBalancerGateway.
	Name string
	Coil versioned.Interface
	// Blocks informs of AddressBlocks with the value Gateway of v2.LabelAnnounce.
	Gateways, Pools, Blocks, Services, Slices, Nodes cache.SharedIndexInformer

	Table Table
	Flows Flows
	// VRRP is the machine's keepalived; nil for none.
	VRRP VRRP
	// File has what the machine did last; empty for none.
	File string
	// Health is told after each look whether the machine does what it is to do. It may be nil.
	Health func(error)
	// LoopMetrics and Registry take metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	Registry    prometheus.Registerer
}

// Gateway does the work of a gateway machine.
type Gateway struct {
	cfg       Config
	gateways  kube.Cache[v2.LoadBalancerGateway]
	pools     kube.Cache[v2.AddressPool]
	blocks    kube.Index[v2.AddressBlock] // by the Services that have their ports
	allBlocks kube.Cache[v2.AddressBlock]
	services  kube.Cache[corev1.Service]
	slices    kube.Index[discoveryv1.EndpointSlice] // by their Service
	nodes     kube.Cache[corev1.Node]
	synced    []cache.DoneChecker
	applies   *reconcile.Loop[struct{}]
	elects    *reconcile.Loop[struct{}]
	forgets   *reconcile.Loop[struct{}]
	statuses  *reconcile.Loop[struct{}]
	saves     *reconcile.Loop[struct{}]
	looks     *reconcile.Loop[struct{}]
	now       func() time.Time
	metrics   *metrics
	asked     asked // only watchVRRP's

	mu sync.Mutex // guards all below
	// changed are Services to be looked at, all says that all are.
	changed map[string]bool
	all     bool
	// version is the newest resource version of a block that was seen.
	version string
	// does is what the machine does.
	does state
	// refused is why the kernel refuses the rest, nil if it doesn't.
	refused error
	// gone are addresses that the machine had, whose flows are to be forgotten.
	gone map[netip.Addr]bool
	vrrp vrrp

	// toldAt is when the status was written last, and forgetting how long it took to look for flows. Each is of one loop.
	toldAt     time.Time
	forgetting atomic.Int64
}

// state is what a gateway does.
type state struct {
	spec       v2.LoadBalancerGatewaySpec
	generation int64
	shape      ruleset.LoadBalancerShape
	addresses  map[netip.Addr]bool
	// guarded are these, and others that the machine may still have.
	guarded map[netip.Addr]bool
	// moves counts changes of the addresses, and changes those of anything.
	moves, changes int
	services       map[string]service
	// version is that of blocks, up to which this is what they say.
	version string
	// forwards are those of all services, by where clients send.
	forwards map[front]plan.Forward
	hash     uint64
}

// nothing is the state of a gateway that does nothing.
func nothing() state {
	return state{addresses: map[netip.Addr]bool{}, guarded: map[netip.Addr]bool{}, services: map[string]service{}, forwards: map[front]plan.Forward{}}
}

// service is what a gateway does for a Service.
type service struct {
	forwards []plan.Forward
	err      error // why it can't do more
}

// front is where clients send.
type front struct {
	protocol uint8
	to       netip.AddrPort
}

func frontOf(f plan.Forward) front {
	return front{f.Protocol, netip.AddrPortFrom(f.Address, f.Port.Port)}
}

// New returns a gateway that isn't running, and does what it did last.
func New(ctx context.Context, cfg Config) (*Gateway, error) {
	g := &Gateway{
		cfg:       cfg,
		gateways:  kube.CacheOf[v2.LoadBalancerGateway](cfg.Gateways),
		pools:     kube.CacheOf[v2.AddressPool](cfg.Pools),
		allBlocks: kube.CacheOf[v2.AddressBlock](cfg.Blocks),
		services:  kube.CacheOf[corev1.Service](cfg.Services),
		slices:    kube.CacheOf[discoveryv1.EndpointSlice](cfg.Slices).IndexBy(serviceOf),
		nodes:     kube.CacheOf[corev1.Node](cfg.Nodes),
		now:       time.Now,
		changed:   map[string]bool{},
		gone:      map[netip.Addr]bool{},
		all:       true,
		does:      nothing(),
	}
	g.blocks = g.allBlocks.IndexBy(servicesOf)
	g.metrics = newMetrics(ctx, g)
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(g.metrics)
	}
	g.applies = reconcile.New("gateway-apply", g.apply, cfg.LoopMetrics)
	g.elects = reconcile.New("gateway-elections", g.elect, cfg.LoopMetrics)
	g.forgets = reconcile.New("gateway-flows", g.forget, cfg.LoopMetrics)
	g.statuses = reconcile.New("gateway-status", g.tell, cfg.LoopMetrics)
	g.saves = reconcile.New("gateway-save", g.save, cfg.LoopMetrics)
	g.looks = reconcile.New("gateway-vrrp", g.watchVRRP, cfg.LoopMetrics)
	if err := g.restore(ctx); err != nil {
		// What is said now is more worth than what was said last.
		klog.FromContext(ctx).Error(err, "What the gateway did last isn't known in full")
	}
	var err error
	g.synced, err = reconcile.Register(
		reconcile.On(cfg.Gateways, reconcile.ChangeHandler(func(*v2.LoadBalancerGateway) { g.allChanged() }, sameSpec)),
		reconcile.On(cfg.Pools, reconcile.ChangeHandler(func(*v2.AddressPool) { g.allChanged() }, func(a, b *v2.AddressPool) bool { return a.Generation == b.Generation })),
		reconcile.On(cfg.Blocks, reconcile.Changes(g.blockChanged)),
		reconcile.On(cfg.Services, reconcile.ChangeHandler(func(s *corev1.Service) { g.serviceChanged(s.Namespace + "/" + s.Name) }, sameGeneration)),
		reconcile.On(cfg.Slices, reconcile.Changes(g.sliceChanged)),
		reconcile.On(cfg.Nodes, reconcile.ChangeHandler(func(*corev1.Node) { g.allChanged() }, loadbalancer.SameNode)),
	)
	return g, err
}

// servicesOf are the Services that have ports of a block.
func servicesOf(b *v2.AddressBlock) (all []string) {
	if b.Floating == nil || b.DeletionTimestamp != nil || b.Floating.ReleasedAt != nil {
		return nil
	}
	for _, p := range b.Floating.Ports {
		if p.Service != "" {
			all = append(all, p.Service)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

func serviceOf(s *discoveryv1.EndpointSlice) []string {
	if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
		return []string{s.Namespace + "/" + name}
	}
	return nil
}

// sameSpec says whether a change of a LoadBalancerGateway is none of its spec.
func sameSpec(a, b *v2.LoadBalancerGateway) bool { return a.Generation == b.Generation }

// sameGeneration says whether a change of a Service is one of its status or metadata alone.
func sameGeneration(a, b *corev1.Service) bool {
	return a.UID == b.UID && a.Spec.Type == b.Spec.Type && a.Generation != 0 && a.Generation == b.Generation
}

func (g *Gateway) blockChanged(before, after *v2.AddressBlock) {
	g.mu.Lock()
	for _, b := range []*v2.AddressBlock{before, after} {
		if b == nil {
			continue
		}
		g.version = newer(g.version, b.ResourceVersion)
		for _, s := range servicesOf(b) {
			g.changed[s] = true
		}
	}
	g.mu.Unlock()
	g.applies.AddAfter(struct{}{}, settle)
}

// serviceChanged looks at Services that have ports at addresses of the gateway.
func (g *Gateway) serviceChanged(keys ...string) {
	for _, key := range keys {
		g.mu.Lock()
		_, known := g.does.services[key]
		known = known || len(g.blocks.Under(key)) > 0
		if known {
			g.changed[key] = true
		}
		g.mu.Unlock()
		if known {
			g.applies.AddAfter(struct{}{}, settle)
		}
	}
}

// sliceChanged looks at the Service of an EndpointSlice, and at the Service that had it before: people may give an EndpointSlice that they made to another Service.
func (g *Gateway) sliceChanged(before, after *discoveryv1.EndpointSlice) {
	for _, s := range []*discoveryv1.EndpointSlice{before, after} {
		if s != nil {
			g.serviceChanged(serviceOf(s)...)
		}
	}
}

func (g *Gateway) allChanged() {
	g.mu.Lock()
	g.all = true
	g.vrrp.changes++
	g.mu.Unlock()
	g.applies.AddAfter(struct{}{}, settle)
}

// Touched compares the table soon: somebody else may have changed it.
func (g *Gateway) Touched() { g.applies.AddAfter(struct{}{}, settle) }

// Run does the work until ctx ends. What the machine does stays.
func (g *Gateway) Run(ctx context.Context) error {
	g.applies.Add(struct{}{})
	g.forgets.AddAfter(struct{}{}, forgetAfter) // endpoints may have gone just before the program ended
	if g.cfg.VRRP != nil {
		g.looks.Add(struct{}{})
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range []*reconcile.Loop[struct{}]{g.applies, g.elects, g.forgets, g.statuses, g.saves, g.looks} {
		group.Go(func() error { return l.Run(ctx, 1, g.synced...) })
	}
	return errors.Join(group.Wait(), g.save(context.WithoutCancel(ctx), struct{}{}))
}

// keys are the Services to be looked at now.
func (g *Gateway) keys() (keys []string, version string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.all {
		for key := range g.does.services {
			g.changed[key] = true
		}
		for _, key := range g.blocks.Keys() {
			g.changed[key] = true
		}
	}
	keys = slices.Sorted(maps.Keys(g.changed))
	g.changed, g.all = map[string]bool{}, false
	return keys, g.version
}

// again has Services looked at again.
func (g *Gateway) again(keys []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, key := range keys {
		g.changed[key] = true
	}
}

// Package loadbalancer gives Services of the type LoadBalancer addresses that are on nodes, or on gateway machines.
//
// It owns the fields of these Services that Coil writes, the AddressClaims of their addresses in one namespace, and the nodes that may have each address. It must not
// know how AddressClaims get addresses, nor how nodes hold them.
//
//	Service                              action
//	comes, or changes                    all Services are planned (package plan/loadbalancer); each one that gets something else is written
//	gets an address that no claim has    an AddressClaim; the Service waits for its address
//	has an address                       its AddressBlock says by which ports clients reach it, and on which nodes it may be
//	its address is on a node             the status tells the address
//	deleted, of another type or class    the steps back; then nothing is Coil's
//	the last one of an address           the AddressClaim is deleted: the address cools down
//
// Five loops: the plan, the Services, the claims, whose blocks say where their addresses are to be, the gateways, which are machines that have addresses of other
// pools, and NetworkPolicies of pods behind these. Nothing is done before the events of all caches were handled. A Service that was given an address keeps it
// in the next plans, also while the cache doesn't show the write yet.
package loadbalancer

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned"
	coilinformers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// settle is for how long changes are collected before a plan is made. Between two plans there is spare times as long as one takes, so that those of thousands of Services use
	// a sixth of a processor, but never more than mostSpare. While more Services wait for addresses than may have claims at a time, one plan serves many of them: plans are
	// fewer, and use a fortieth of a processor.
	settle          = 50 * time.Millisecond
	spare           = 5
	mostSpare       = time.Second
	spareOfMany     = 40
	mostSpareOfMany = 3 * time.Second
	workers         = 8
	// mostWaiting is how many claims may wait for their addresses at a time: some Services have theirs early, instead of all late. They last from one plan to the next.
	mostWaiting = 256
	// patience is for how long a Service doesn't say what it waits for: most have what they need before. Where many Services have no address yet it is longer by turn
	// for each of them, which is more than two processors take, and never more than mostPatience.
	patience     = 3 * time.Second
	turn         = 50 * time.Millisecond
	mostPatience = 5 * time.Minute
	// unseen is for how long a claim that was made isn't made again, though no event has shown it.
	unseen = 10 * time.Second
	// coolDown is for how long, in seconds, an address of a Service is given to nobody else: its holder has stopped long before.
	coolDown = 10
)

// Config is what the controller is made of. The caller runs the informers.
type Config struct {
	Coil versioned.Interface
	Core kubernetes.Interface
	// Metadata reads the labels of pods of Services that NetworkPolicies may select.
	Metadata metadata.Interface

	Pools    coilinformers.AddressPoolInformer
	Claims   coilinformers.AddressClaimInformer
	Gateways coilinformers.LoadBalancerGatewayInformer
	// Blocks informs of AddressBlocks with the label v2.LabelFloating.
	Blocks cache.SharedIndexInformer
	// Cluster informs of Services, Nodes, EndpointSlices and NetworkPolicies.
	Cluster informers.SharedInformerFactory

	// Namespace has the AddressClaims.
	Namespace string
	// DefaultPool is the AddressPool of Services that name none.
	DefaultPool string
	// WithoutClass says that Services without a class are served, too.
	WithoutClass bool
	Recorder     kube.Recorder
	// LoopMetrics and Registry take metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	Registry    prometheus.Registerer
}

// Controller serves Services.
type Controller struct {
	cfg      Config
	services kube.Cache[corev1.Service]
	pools    kube.Cache[v2.AddressPool]
	claims   kube.Cache[v2.AddressClaim]
	blocks   kube.Index[v2.AddressBlock] // by their claim's name
	gateways kube.Cache[v2.LoadBalancerGateway]
	nodes    kube.Cache[corev1.Node]
	slices   kube.Index[discoveryv1.EndpointSlice] // by namespace/name of their Service
	synced   []cache.DoneChecker
	plans    *reconcile.Loop[struct{}]
	steps    *reconcile.Loop[types.NamespacedName]
	places   *reconcile.Loop[string]
	contacts *reconcile.Loop[string]
	now      func() metav1.Time
	metrics  *collector
	written  written
	policies policies

	mu sync.Mutex // guards the plan
	// given is what each Service gets, by UID.
	given map[types.UID]loadbalancer.Given
	// users are the Services that have the address of a claim, by its name. It is nil before the first plan.
	users map[string][]types.NamespacedName
	// waiting is until when Services wait without saying so, by UID.
	waiting map[types.UID]time.Time
	// without counts the Services that have no address yet.
	without int
	// made is when claims were made that no event has shown yet, by name.
	made  map[string]time.Time
	heard heard
	// asks are what Services ask for.
	asks findings[corev1.Service, loadbalancer.Service]

	// next is when the next plan may be made, nil before the first one.
	next atomic.Pointer[time.Time]
	load load
	// nodesVersion counts changes of Nodes.
	nodesVersion atomic.Int64
	known        atomic.Pointer[knownNodes]
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	core, discovery := cfg.Cluster.Core().V1(), cfg.Cluster.Discovery().V1()
	c := &Controller{
		cfg:      cfg,
		services: kube.CacheOf[corev1.Service](core.Services().Informer()),
		pools:    kube.CacheOf[v2.AddressPool](cfg.Pools.Informer()),
		claims:   kube.CacheOf[v2.AddressClaim](cfg.Claims.Informer()),
		blocks:   kube.CacheOf[v2.AddressBlock](cfg.Blocks).IndexBy(func(b *v2.AddressBlock) []string { return claimOf(cfg.Namespace, b) }),
		nodes:    kube.CacheOf[corev1.Node](core.Nodes().Informer()),
		slices:   kube.CacheOf[discoveryv1.EndpointSlice](discovery.EndpointSlices().Informer()).IndexBy(serviceOf),
		now:      metav1.Now,
		given:    map[types.UID]loadbalancer.Given{},
		waiting:  map[types.UID]time.Time{},
		made:     map[string]time.Time{},
		gateways: kube.CacheOf[v2.LoadBalancerGateway](cfg.Gateways.Informer()),
		heard:    heard{map[string]contact{}, map[types.NamespacedName]bool{}},
	}
	c.metrics = newCollector(c.services, cfg.WithoutClass)
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(c.metrics, newGatewayCollector(c))
	}
	c.plans = reconcile.New("services", func(ctx context.Context, _ struct{}) error { return c.plan(ctx) }, cfg.LoopMetrics)
	c.steps = reconcile.New("service", c.step, cfg.LoopMetrics)
	c.contacts = reconcile.New("gateway", c.contact, cfg.LoopMetrics)
	c.places = reconcile.New("service-address", c.place, cfg.LoopMetrics)
	return c, errors.Join(c.register(), c.followPolicies())
}

// register adds handlers, which only add keys.
func (c *Controller) register() (err error) {
	core, discovery := c.cfg.Cluster.Core().V1(), c.cfg.Cluster.Discovery().V1()
	c.synced, err = reconcile.Register(
		reconcile.On(core.Services().Informer(), reconcile.Changes(c.serviceChanged)),
		reconcile.On(c.cfg.Pools.Informer(), reconcile.ChangeHandler(func(*v2.AddressPool) { c.replan() }, samePool)),
		reconcile.On(c.cfg.Claims.Informer(), reconcile.Handler(c.claimChanged)),
		reconcile.On(c.cfg.Blocks, reconcile.Changes(c.blockChanged)),
		reconcile.On(c.cfg.Gateways.Informer(), reconcile.Changes(c.gatewayChanged)),
		reconcile.On(core.Nodes().Informer(), reconcile.ChangeHandler(c.nodeChanged, loadbalancer.SameNode)),
		reconcile.On(discovery.EndpointSlices().Informer(), reconcile.Changes(c.sliceChanged)),
	)
	return err
}

func (c *Controller) serviceChanged(before, after *corev1.Service) {
	s := cmp.Or(after, before)
	c.steps.Add(keyOf(s))
	if before == nil || after == nil || !reflect.DeepEqual(before.Spec, after.Spec) { // an address doesn't depend on what else Services say
		c.placeOf(s)
	}
	c.replan()
}

func (c *Controller) claimChanged(a *v2.AddressClaim) {
	if isOurs(c.cfg.Namespace, a) {
		c.mu.Lock()
		delete(c.made, a.Name)
		c.mu.Unlock()
		c.replan()
		c.changed(a.Name)
		c.places.Add(a.Name) // its block may have been seen before it
	}
}

func (c *Controller) blockChanged(before, after *v2.AddressBlock) {
	for _, b := range []*v2.AddressBlock{before, after} {
		if b == nil {
			continue
		}
		for _, claim := range claimOf(c.cfg.Namespace, b) {
			c.places.Add(claim)
			c.changed(claim)
		}
	}
	switch {
	case after == nil:
		c.load.put(before.Name, "")
	case after.Floating != nil && holderOf(after) != "":
		c.load.put(after.Name, holderOf(after))
	}
}

// nodeChanged looks at all addresses.
func (c *Controller) nodeChanged(*corev1.Node) {
	c.nodesVersion.Add(1)
	for _, claim := range c.blocks.Keys() {
		c.places.Add(claim)
	}
}

// placeOf looks at the address of a Service.
func (c *Controller) placeOf(s *corev1.Service) {
	c.mu.Lock()
	claim := c.given[s.UID].Claim
	c.mu.Unlock()
	if claim != "" {
		c.places.Add(claim)
	}
}

// sliceChanged looks at an EndpointSlice's Service and its address, and at the Service that had the EndpointSlice before.
func (c *Controller) sliceChanged(before, after *discoveryv1.EndpointSlice) {
	for _, slice := range []*discoveryv1.EndpointSlice{before, after} {
		if slice == nil {
			continue
		}
		for _, key := range serviceOf(slice) {
			if s := c.services.Find(key); s != nil && loadbalancer.NeedsEndpoints(s) {
				c.placeOf(s)
				c.steps.Add(keyOf(s)) // the address stays if others share it
			}
		}
	}
}

// Synced says of each cache whether it is filled, and its events handled.
func (c *Controller) Synced() []cache.DoneChecker { return c.synced }

// Run serves Services until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	c.metrics.leading.Store(true)
	defer c.metrics.leading.Store(false)
	c.plans.Add(struct{}{})
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.plans.Run(ctx, 1, c.synced...) })
	group.Go(func() error { return c.steps.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.places.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.contacts.Run(ctx, 1, c.synced...) })
	group.Go(func() error { return c.policies.looks.Run(ctx, 1, slices.Concat(c.synced, c.policies.synced)...) })
	return group.Wait()
}

// replan has a plan made soon.
func (c *Controller) replan() {
	wait := settle
	if next := c.next.Load(); next != nil {
		wait = max(wait, time.Until(*next))
	}
	c.plans.AddAfter(struct{}{}, wait)
}

// each does something for each of some items, several at a time.
func each[E any](ctx context.Context, items []E, do func(context.Context, E) error) error {
	errs := make([]error, len(items))
	var group errgroup.Group
	group.SetLimit(workers)
	for i, item := range items {
		group.Go(func() error { errs[i] = do(ctx, item); return nil })
	}
	return errors.Join(group.Wait(), errors.Join(errs...))
}

// changed looks at the Services that have the address of a claim.
func (c *Controller) changed(claim string) {
	c.mu.Lock()
	users := c.users[claim]
	c.mu.Unlock()
	for _, key := range users {
		c.steps.Add(key)
	}
}

func keyOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// isOurs says whether an AddressClaim is one of the controller's.
func isOurs(namespace string, a *v2.AddressClaim) bool {
	return a.Namespace == namespace && a.Labels[loadbalancer.LabelClaim] == "true"
}

// claimOf is the name of the claim of a block's address, if that is in the controller's namespace and was not released.
func claimOf(namespace string, b *v2.AddressBlock) []string {
	if claim, is := loadbalancer.Claims(namespace, b); is {
		return []string{claim}
	}
	return nil
}

func serviceOf(s *discoveryv1.EndpointSlice) []string {
	if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
		return []string{s.Namespace + "/" + name}
	}
	return nil
}

// samePool says whether a change of an AddressPool is none of its addresses.
func samePool(a, b *v2.AddressPool) bool {
	return a.Generation == b.Generation && (a.DeletionTimestamp == nil) == (b.DeletionTimestamp == nil)
}

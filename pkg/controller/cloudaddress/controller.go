// Package cloudaddress has OpenStack provide the addresses of AddressClaims in pools with spec.openstack, and has it let gateways use them.
//
// It owns what the status of these claims says of OpenStack, a finalizer of theirs, and whatever package openstack keeps in the cloud. It must
// not know what the addresses are for, nor which AddressBlocks they get.
//
//	claim                           action
//	new                             the finalizer, then a port and, if the pool has them, a floating IP, both by the name of the claim; then the status tells them
//	new, half of its pair is taken  another pair of addresses takes the place of what the port has
//	provided                        its address is one of the address pairs of the gateways of its pool; then the status tells that
//	being deleted                   the address pairs go, then the port and the floating IP, then the finalizer
//
// Three loops: the pools, which are listed when the program starts and from then on now and then; the claims; and the address pairs of each pool. No call is made
// while nothing changes but these lists. What others change in the cloud is repaired after the next list, and what no claim has is swept.
package cloudaddress

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned"
	informers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/openstack"
	"github.com/coil-net/coil/pkg/reconcile"
)

// Finalizer keeps a claim until its port is deleted.
const Finalizer = "coil.cybozu.com/openstack"

const (
	workers = 8
	// settle is for how long changes of claims are collected before address pairs are written.
	settle = 100 * time.Millisecond
)

// Cloud keeps addresses, as *openstack.Client does.
type Cloud interface {
	List(ctx context.Context) ([]openstack.Address, error)
	Ensure(ctx context.Context, seen openstack.Address, want openstack.Want) (openstack.Address, error)
	Room(ctx context.Context) (openstack.Room, error)
	Delete(ctx context.Context, key string) error
	Sweep(ctx context.Context, keep map[string]bool) ([]openstack.Object, error)
	EnsurePairs(ctx context.Context, gateways []string, want []netip.Prefix, seen []openstack.Address) error
}

// Config is what the controller is made of. The caller runs the informers.
type Config struct {
	Coil     versioned.Interface
	Pools    informers.AddressPoolInformer
	Claims   informers.AddressClaimInformer
	Gateways informers.LoadBalancerGatewayInformer

	// Namespace has the claims. Others get nothing of OpenStack.
	Namespace string
	// Open returns the cloud of a pool.
	Open func(context.Context, v2.PoolOpenStack) (Cloud, error)
	// Resync is how often clouds are listed.
	Resync   time.Duration
	Recorder kube.Recorder
	// LoopMetrics are of the loops; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
}

// Controller serves claims.
type Controller struct {
	cfg      Config
	pools    kube.Cache[v2.AddressPool]
	claims   kube.Cache[v2.AddressClaim]
	byPool   kube.Index[v2.AddressClaim]
	gateways kube.Cache[v2.LoadBalancerGateway]
	synced   []cache.DoneChecker
	lists    *reconcile.Loop[string]
	each     *reconcile.Loop[string] // the claims, by name
	pairs    *reconcile.Loop[string]

	mu     sync.Mutex
	clouds map[string]*cloud // by pool
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	all := kube.CacheOf[v2.AddressClaim](cfg.Claims.Informer())
	c := &Controller{
		cfg:      cfg,
		pools:    kube.CacheOf[v2.AddressPool](cfg.Pools.Informer()),
		claims:   all,
		byPool:   all.IndexBy(func(a *v2.AddressClaim) []string { return []string{a.Spec.Pool} }),
		gateways: kube.CacheOf[v2.LoadBalancerGateway](cfg.Gateways.Informer()),
		clouds:   map[string]*cloud{},
	}
	c.lists = reconcile.New("cloud", c.list, cfg.LoopMetrics)
	c.each = reconcile.New("cloud-address", c.claim, cfg.LoopMetrics)
	c.pairs = reconcile.New("cloud-pairs", c.allow, cfg.LoopMetrics)
	var err error
	c.synced, err = reconcile.Register(
		reconcile.On(cfg.Pools.Informer(), reconcile.ChangeHandler(func(p *v2.AddressPool) { c.lists.Add(p.Name) }, samePool)),
		reconcile.On(cfg.Claims.Informer(), reconcile.Handler(c.claimChanged)),
		reconcile.On(cfg.Gateways.Informer(), reconcile.Changes(c.gatewayChanged)),
	)
	return c, err
}

func samePool(a, b *v2.AddressPool) bool {
	return a.UID == b.UID && equality.Semantic.DeepEqual(a.Spec, b.Spec)
}

func (c *Controller) claimChanged(a *v2.AddressClaim) {
	if a.Namespace == c.cfg.Namespace {
		c.each.Add(a.Name)
		c.pairs.AddAfter(a.Spec.Pool, settle)
	}
}

func (c *Controller) gatewayChanged(before, after *v2.LoadBalancerGateway) {
	if before != nil && after != nil && equality.Semantic.DeepEqual(before.Spec, after.Spec) {
		return
	}
	for _, g := range []*v2.LoadBalancerGateway{before, after} {
		if g != nil {
			for _, pool := range g.Spec.Pools {
				c.pairs.AddAfter(pool, settle)
			}
		}
	}
}

// Synced says of each cache whether it is filled, and its events handled.
func (c *Controller) Synced() []cache.DoneChecker { return c.synced }

// Run serves claims until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.lists.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.each.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.pairs.Run(ctx, workers, c.synced...) })
	return group.Wait()
}

// of are the claims of a pool.
func (c *Controller) of(pool string) (all []*v2.AddressClaim) {
	for _, a := range c.byPool.Under(pool) {
		if a.Namespace == c.cfg.Namespace {
			all = append(all, a)
		}
	}
	return all
}

// look looks at the claims of a pool.
func (c *Controller) look(pool string) {
	for _, a := range c.of(pool) {
		c.each.Add(a.Name)
	}
}

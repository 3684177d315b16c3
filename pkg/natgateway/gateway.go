// Package natgateway makes a pod a router of an Egress: it gives each client a tunnel, a
// route and an entry in the filter, and takes them away when the client is none any more.
//
// It owns the tunnels, table 118, its rules and the nftables table of the pod's network
// namespace. It must not know how any of them is written, nor how clients are chosen.
//
// The wanted state is derived from scratch at each sync: Egress and EndpointSlices -> plan ->
// kernel. The kernel is read at the start, once in a while, and whenever it tells of a change by
// others. In between only clients that came or left are written, which costs the same however
// many clients there are.
//
//	client came        tunnel, route, then the filter lets it in
//	client gone        route, filter, tunnel, then its connections are forgotten
//	address reused     its tunnel stays; connections of the old pod are forgotten
//	client fails       the others go on; it is tried again
//	too many flows     it opens no more until it has fewer
//	first sync         the filter is there before the first tunnel is
//	end of the program everything stays: connections go on while a container restarts
package natgateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/gateway"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
)

const (
	// settle is for how long changes are collected before a sync.
	settle = 20 * time.Millisecond
	// kernelSettle is the time between two looks at changes in the kernel, the
	// first of which is at once.
	kernelSettle = 200 * time.Millisecond
	// lookEvery is the time between two looks at the pod's network and at the rulesets of
	// others.
	lookEvery = time.Second
)

// Tunnels makes and removes tunnels; see package kernel/tunnel.
type Tunnels interface {
	Links(ctx context.Context) (map[netip.Addr]dataplane.TunnelLink, error)
	Ensure(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, dataplane.Result, error)
	Prune(ctx context.Context, keep []dataplane.Tunnel) (dataplane.Result, error)
	Add(ctx context.Context, want []dataplane.Tunnel) (map[netip.Addr]dataplane.TunnelLink, error)
	Remove(ctx context.Context, links []dataplane.TunnelLink) (int, error)
}

// Routes makes and removes routes; see package kernel/route.
type Routes interface {
	Syncer[[]dataplane.Route]
	Add(ctx context.Context, routes ...dataplane.Route) error
	Delete(ctx context.Context, routes ...dataplane.Route) error
}

// Syncer makes one kind of object what is wanted; see packages kernel/route and rule.
type Syncer[T any] interface {
	Sync(ctx context.Context, want T) (dataplane.Result, error)
}

// Filter makes the ruleset what is wanted; see package kernel/nft.
type Filter interface {
	Syncer[ruleset.Gateway]
	// Touched says whether anybody has changed a ruleset since the last Sync.
	Touched(ctx context.Context) (bool, error)
}

// Flows are the connections that are tracked; see package kernel/conntrack.
type Flows interface {
	// Forget forgets the connections of addresses.
	Forget(ctx context.Context, addrs ...netip.Addr) (int, error)
	// Size is how many there are, and may be.
	Size() (count, limit int, err error)
	// Clients counts, by their sources, the connections that leave with an address of the
	// router, or a floating one.
	Clients(ctx context.Context, own ...netip.Addr) (map[netip.Addr]int, error)
}

// Network is the pod's own network.
type Network interface {
	// Uplink returns the link that has the address.
	Uplink(ctx context.Context, a netip.Addr) (rtnl.Link, error)
	// Transits returns the addresses that the pod's node translates to its own.
	Transits(ctx context.Context) ([]netip.Addr, error)
	// Check returns an error if the pod can't be a router, as far as others decide that.
	Check(uplink string, families []dataplane.Family) error
	// Listen opens the UDP port of FoU.
	Listen(ctx context.Context, port uint16, families []dataplane.Family) error
}

// Config has the settings of a gateway.
type Config struct {
	// Namespace and Egress name the Egress.
	Namespace, Egress string
	// Config has the facts about the router that are known before its network is looked at.
	gateway.Config
	// Resync is the longest time between two syncs.
	Resync time.Duration
}

// Kernel has the objects of the kernel that a gateway makes.
type Kernel struct {
	Network Network
	Tunnels Tunnels
	Routes  Routes
	Rules   Syncer[[]dataplane.Rule]
	Filter  Filter
	Flows   Flows
}

// Conditions that Gateway reports: Clients holds from the first sync that was complete,
// Environment as long as the pod's network lets it route.
const (
	Clients     = "clients"
	Environment = "network"
)

// Gateway implements the package's task.
type Gateway struct {
	cfg      Config
	kernel   Kernel
	families []dataplane.Family
	egresses kube.Cache[v2.Egress]
	lists    []kube.Cache[discoveryv1.EndpointSlice]
	loop     *upkeep.Loop
	synced   []cache.DoneChecker
	report   func(condition string, reason error)
	metrics  *metrics
	repairs  *reconcile.Repairs

	// Of the loop's one worker.
	started  bool         // the filter is there
	released []netip.Addr // whose connections are yet to be forgotten
	compared time.Time    // when all was compared with the kernel

	mu sync.Mutex
	// applied is the state that the last sync made, with links, some of which may be missing.
	applied *gateway.State
	links   map[netip.Addr]dataplane.TunnelLink
	// doubtful says that the kernel may have something else than was made.
	doubtful bool
	uplink   rtnl.Link
	watched  map[int]dataplane.Tunnel // by the link's index
	due      time.Time                // of the first change that no sync has seen
	over     []netip.Addr             // clients that have too many connections
}

// New returns a gateway that isn't running. Its clients are those of all lists. report is told of the conditions.
func New(cfg Config, k Kernel, egresses cache.SharedIndexInformer, lists []cache.SharedIndexInformer, reg prometheus.Registerer,
	report func(condition string, reason error)) (*Gateway, error) {
	if len(cfg.Addresses) == 0 {
		return nil, errors.New("the router has no address")
	}
	g := &Gateway{
		cfg: cfg, kernel: k, report: report,
		egresses: kube.CacheOf[v2.Egress](egresses),
		metrics:  newMetrics(cfg, reg),
	}
	for _, a := range cfg.Addresses {
		g.families = append(g.families, dataplane.FamilyOf(a))
	}
	reg.MustRegister(g)
	g.repairs = reconcile.NewRepairs(reg, nil, kinds...)
	g.loop = upkeep.New(upkeep.Config{Name: "natgateway", Sync: g.sync, Settle: settle, Every: cfg.Resync, Lost: g.lost},
		g.repairs, reconcile.NewMetrics(reg))
	sources := []reconcile.Source{reconcile.On(egresses, reconcile.ChangeHandler(func(*v2.Egress) { g.changed() }, plan.SameEgress))}
	for _, list := range lists {
		g.lists = append(g.lists, kube.CacheOf[discoveryv1.EndpointSlice](list))
		sources = append(sources, reconcile.On(list, reconcile.Handler(func(*discoveryv1.EndpointSlice) { g.changed() })))
	}
	var err error
	g.synced, err = reconcile.Register(sources...)
	return g, err
}

// Run works until ctx ends.
func (g *Gateway) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return g.loop.Run(ctx, g.synced...) })
	for every, look := range map[time.Duration]func(context.Context){lookEvery: g.look, countEvery: g.count} {
		group.Go(func() error {
			if cache.WaitFor(ctx, "", g.synced...) {
				wait.NonSlidingUntilWithContext(ctx, look, every)
			}
			return nil
		})
	}
	return group.Wait()
}

// look reports whether the pod can be a router, and syncs when others have changed rulesets of nftables, which tells
// nobody.
func (g *Gateway) look(ctx context.Context) {
	g.report(Environment, g.environment(ctx))
	// Rulesets that can't be read now can be read the next time.
	if touched, err := g.kernel.Filter.Touched(ctx); err == nil && touched && g.doubt() {
		g.loop.Lost(kindFilter)
	}
	g.lookForTransits(ctx)
}

// lookForTransits syncs when the node has given the router other addresses to translate to, or the first ones.
func (g *Gateway) lookForTransits(ctx context.Context) {
	g.mu.Lock()
	before := g.applied
	g.mu.Unlock()
	if before == nil {
		return
	}
	if now, err := g.kernel.Network.Transits(ctx); err == nil && !slices.Equal(now, before.Transits) {
		g.changed()
	}
}

// environment returns an error if the pod can't be a router.
func (g *Gateway) environment(ctx context.Context) error {
	e := g.egress()
	if e == nil {
		return fmt.Errorf("there is no Egress %s/%s", g.cfg.Namespace, g.cfg.Egress)
	}
	uplink, err := g.kernel.Network.Uplink(ctx, g.cfg.Addresses[0])
	if err != nil {
		return err
	}
	if !uplink.Up {
		return fmt.Errorf("the uplink %s is down", uplink.Name)
	}
	cfg := g.cfg.Config
	if cfg.Transits, err = g.kernel.Network.Transits(ctx); err != nil {
		return err
	}
	if lacking := gateway.Untranslated(cfg, e); len(lacking) > 0 {
		return fmt.Errorf("the node isn't ready to translate the addresses of clients to its own (%v): coild, which does that, tells why in its log", lacking)
	}
	return g.kernel.Network.Check(uplink.Name, g.families)
}

// egress returns the Egress of the pod, nil if it is gone.
func (g *Gateway) egress() *v2.Egress {
	return g.egresses.Find(cache.NewObjectName(g.cfg.Namespace, g.cfg.Egress).String())
}

// changed asks for a sync because the wants have changed.
func (g *Gateway) changed() {
	g.mu.Lock()
	if g.due.IsZero() {
		g.due = time.Now()
	}
	g.mu.Unlock()
	g.loop.Changed()
}

// want returns the state that the router should have now.
func (g *Gateway) want(ctx context.Context) (gateway.State, error) {
	egress := cmp.Or(g.egress(), &v2.Egress{}) // nobody may reach anything through an Egress that is gone
	uplink, err := g.kernel.Network.Uplink(ctx, g.cfg.Addresses[0])
	if err != nil {
		return gateway.State{}, err
	}
	g.mu.Lock()
	g.uplink = uplink
	over := g.over
	g.mu.Unlock()
	_, tracked, err := g.kernel.Flows.Size()
	if err != nil {
		return gateway.State{}, err
	}
	cfg := g.cfg.Config
	if cfg.Transits, err = g.kernel.Network.Transits(ctx); err != nil {
		return gateway.State{}, err
	}
	cfg.Uplink, cfg.UplinkIndex, cfg.MTU, cfg.MaxConnections, cfg.Over = uplink.Name, uplink.Index, uplink.MTU, tracked, over
	var lists []*discoveryv1.EndpointSlice
	for _, list := range g.lists {
		lists = append(lists, list.In(g.cfg.Namespace)...)
	}
	want, skipped := gateway.StateOf(cfg, egress, lists)
	g.loop.Skipped(ctx, "Some of what is listed can't be understood, and is left out", skipped)
	return want, nil
}

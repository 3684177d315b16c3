// Package ipamcontroller composes the program coil-ipam-controller.
//
// It owns the flags and the order in which parts start. It must not know what any of
// them does.
package ipamcontroller

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/informers/externalversions"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/controller/blockgc"
	"github.com/coil-net/coil/pkg/controller/blockrequest"
	"github.com/coil-net/coil/pkg/controller/floating"
	"github.com/coil-net/coil/pkg/controller/floatingkey"
	"github.com/coil-net/coil/pkg/controller/pool"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/ledger"
	"github.com/coil-net/coil/pkg/plan"
)

const (
	programName = "coil-ipam-controller"
	leaseName   = plan.IPAMLease
)

// Main runs the program and returns its exit code.
func Main(args []string) int {
	o := &Options{}
	return program.Main(programName, args, o, func(ctx context.Context) error {
		cfg, err := kube.Config(o.Kubeconfig, programName)
		if err != nil {
			return err
		}
		return Run(ctx, cfg, o)
	})
}

// Run runs the program against the API server of cfg until ctx ends. Losing the lease
// is an error.
func Run(ctx context.Context, cfg *rest.Config, o *Options) error {
	return leading.Program{Name: programName, Lease: leaseName, Options: o.Options, Compose: o.compose}.Run(ctx, cfg)
}

// compose makes the controllers.
func (o *Options) compose(_ context.Context, e leading.Environment) (leading.Controllers, error) {
	coil := externalversions.NewSharedInformerFactoryWithOptions(e.Coil, 0, externalversions.WithTransform(kube.Strip))
	core := informers.NewSharedInformerFactoryWithOptions(e.Core, 0, informers.WithTransform(stripNode))
	v2 := coil.Coil().V2()
	nodes := core.Core().V1().Nodes()
	services := core.Networking().V1().ServiceCIDRs()
	if err := v2.AddressBlocks().Informer().SetTransform(stripBlock); err != nil {
		return leading.Controllers{}, err
	}
	blocks := ledger.New(time.Now)
	requests, err := blockrequest.New(blockrequest.Config{
		Ledger: blocks,
		Coil:   e.Coil, Core: e.Core,
		Requests: v2.BlockRequests(), Blocks: v2.AddressBlocks(), Pools: v2.AddressPools(), Nodes: nodes,
		Recorder: e.Recorder, LoopMetrics: e.Loops, Registry: e.Registry,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	pools, err := pool.New(pool.Config{
		Coil:  e.Coil,
		Pools: v2.AddressPools(), Blocks: v2.AddressBlocks(), Nodes: nodes, Services: services,
		Carver: requests, Recorder: e.Recorder, LoopMetrics: e.Loops, Registry: e.Registry,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	gc, err := blockgc.New(blockgc.Config{
		Coil: e.Coil, Core: e.Core,
		Blocks: v2.AddressBlocks(), Pools: v2.AddressPools(), Nodes: nodes,
		Recorder: e.Recorder, LoopMetrics: e.Loops, Interval: o.GCInterval, Quarantine: o.Quarantine,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	addresses, err := floating.New(floating.Config{
		Coil: e.Coil, Core: e.Core,
		Claims: v2.AddressClaims(), Blocks: v2.AddressBlocks(), Pools: v2.AddressPools(),
		Ledger: blocks, LostBlocks: requests.Claims, Recorder: e.Recorder, LoopMetrics: e.Loops, Registry: e.Registry,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	key := floatingkey.New(e.Core, e.Loops)
	return leading.Controllers{
		Informers: []leading.Informers{coil, core},
		Synced: []cache.DoneChecker{
			v2.BlockRequests().Informer().HasSyncedChecker(), v2.AddressBlocks().Informer().HasSyncedChecker(),
			v2.AddressClaims().Informer().HasSyncedChecker(), v2.AddressPools().Informer().HasSyncedChecker(), nodes.Informer().HasSyncedChecker(), services.Informer().HasSyncedChecker(),
		},
		Run: func(ctx context.Context) error {
			group, ctx := errgroup.WithContext(ctx)
			group.Go(func() error { return requests.Run(ctx) })
			group.Go(func() error { return pools.Run(ctx) })
			group.Go(func() error { return gc.Run(ctx) })
			group.Go(func() error { return addresses.Run(ctx) })
			group.Go(func() error { return key.Run(ctx) })
			return group.Wait()
		},
	}, nil
}

// Package ipamcontroller composes the program coil-ipam-controller.
//
// It owns the flags and the order in which parts start. It must not know what any of
// them does.
package ipamcontroller

import (
	"context"
	"fmt"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/generated/informers/externalversions"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/controller/blockgc"
	"github.com/coil-net/coil/pkg/controller/blockrequest"
	"github.com/coil-net/coil/pkg/controller/pool"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	programName = "coil-ipam-controller"
	leaseName   = "coil-ipam-leader"
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
	clients, err := kube.NewClients(cfg)
	if err != nil {
		return err
	}
	all, err := kubernetes.NewForConfig(kube.Protobuf(cfg))
	if err != nil {
		return fmt.Errorf("client of Kubernetes' resources: %w", err)
	}
	registry := observe.NewRegistry()
	health := observe.NewHealth(leading.Caches)

	group, ctx := errgroup.WithContext(ctx)
	recorder, flush, err := kube.RunRecorder(ctx, clients.Core, programName)
	if err != nil {
		return err
	}
	defer flush()
	own, err := versioned.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("client of Coil's resources: %w", err)
	}
	coil := externalversions.NewSharedInformerFactoryWithOptions(own, 0, externalversions.WithTransform(kube.Strip))
	if err := coil.Coil().V2().AddressBlocks().Informer().SetTransform(stripBlock); err != nil {
		return err
	}
	core := informers.NewSharedInformerFactoryWithOptions(all, 0, informers.WithTransform(stripNode))
	c, err := newControllers(own, all, coil, core, recorder, registry, o)
	if err != nil {
		return err
	}
	coil.Start(ctx.Done())
	defer coil.Shutdown()
	core.Start(ctx.Done())
	defer core.Shutdown()
	group.Go(func() error {
		return observe.Serve(ctx, o.Observe, registry, health)
	})
	group.Go(func() error { return o.Election.Run(ctx, cfg, leaseName, health, c.synced, c.run) })
	return group.Wait()
}

// controllers are what the leader runs.
type controllers struct {
	synced []cache.DoneChecker
	parts  []func(context.Context) error
}

func newControllers(own versioned.Interface, all kubernetes.Interface, coil externalversions.SharedInformerFactory,
	core informers.SharedInformerFactory, recorder kube.Recorder, registry prometheus.Registerer, o *Options) (*controllers, error) {
	loops := reconcile.NewMetrics(registry)
	v2 := coil.Coil().V2()
	nodes := core.Core().V1().Nodes()
	services := core.Networking().V1().ServiceCIDRs()
	requests, err := blockrequest.New(blockrequest.Config{
		Coil: own, Core: all,
		Requests: v2.BlockRequests(), Blocks: v2.AddressBlocks(), Pools: v2.AddressPools(), Nodes: nodes,
		Recorder: recorder, LoopMetrics: loops, Registry: registry,
	})
	if err != nil {
		return nil, err
	}
	pools, err := pool.New(pool.Config{
		Coil:  own,
		Pools: v2.AddressPools(), Blocks: v2.AddressBlocks(), Nodes: nodes, Services: services,
		Carver: requests, Recorder: recorder, LoopMetrics: loops, Registry: registry,
	})
	if err != nil {
		return nil, err
	}
	gc, err := blockgc.New(blockgc.Config{
		Coil: own, Core: all,
		Blocks: v2.AddressBlocks(), Pools: v2.AddressPools(), Nodes: nodes,
		Recorder: recorder, LoopMetrics: loops, Interval: o.GCInterval, Quarantine: o.Quarantine,
	})
	if err != nil {
		return nil, err
	}
	return &controllers{
		synced: []cache.DoneChecker{
			v2.BlockRequests().Informer().HasSyncedChecker(), v2.AddressBlocks().Informer().HasSyncedChecker(),
			v2.AddressPools().Informer().HasSyncedChecker(), nodes.Informer().HasSyncedChecker(), services.Informer().HasSyncedChecker(),
		},
		parts: []func(context.Context) error{requests.Run, pools.Run, gc.Run},
	}, nil
}

// run runs all parts until ctx ends or one of them fails.
func (c *controllers) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, part := range c.parts {
		group.Go(func() error { return part(ctx) })
	}
	return group.Wait()
}

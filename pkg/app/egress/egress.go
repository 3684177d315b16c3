// Package egress composes coil-egress.
//
// It owns the flags, the order in which parts start, and the drain at the end. It must not
// know what any of them does.
package egress

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/rule"
	"github.com/coil-net/coil/pkg/kernel/tunnel"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/natgateway"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

const programName = "coil-egress"

// Main runs coil-egress and returns its exit code.
func Main(args []string) int {
	if len(args) > 0 && args[0] == debugCommand {
		return debugMain(args[1:])
	}
	var o Options
	return program.Main(programName, args, &o, func(ctx context.Context) error {
		health := observe.NewHealth(natgateway.Clients, natgateway.Environment)
		serving, end := context.WithCancel(context.WithoutCancel(ctx))
		defer end()
		defer context.AfterFunc(ctx, func() {
			klog.FromContext(ctx).Info("Draining", "period", o.DrainPeriod)
			// It is ready as before: EndpointSlices say that the pod ends, and that it still serves. A router with floating addresses
			// hands its connections over as long as they say so.
			time.AfterFunc(o.DrainPeriod, end)
		})()
		return run(serving, o, health)
	})
}

// run works until ctx ends. Its objects in the kernel stay.
func run(ctx context.Context, o Options, health *observe.Health) error {
	config, err := o.config()
	if err != nil {
		return err
	}
	clients, err := kube.Connect(o.Kubeconfig, programName)
	if err != nil {
		return err
	}
	registry := observe.NewRegistry()
	handle, err := rtnl.New(nil)
	if err != nil {
		return err
	}
	defer handle.Close()
	table, err := nft.New(nil, dataplane.NftTable)
	if err != nil {
		return err
	}
	defer table.Close()
	filter := natgateway.Nft{Table: table}
	if err := filter.Prepare(ctx); err != nil {
		return err
	}
	connections, err := conntrack.New(nil)
	if err != nil {
		return err
	}
	defer connections.Close()

	egresses := kube.OneEgressInformer(clients.Coil, o.Namespace, o.Egress)
	// A selector can't say "one label or the other".
	listed := func(label string) *kube.Informer {
		return kube.EndpointSliceInformer(clients.Discovery, o.Namespace, labels.Set{label: o.Egress}.String())
	}
	naming, chosen := listed(v2.LabelEgress), listed(v2.LabelPolicyEgress)
	tunnels, routes := tunnel.New(handle), route.New(handle, dataplane.ProtocolNode, dataplane.TableWide)
	rules := rule.New(handle, dataplane.ProtocolNode, dataplane.RouterPriorities...)
	router, err := natgateway.New(config, natgateway.Kernel{
		Network: natgateway.PodNetwork{Handle: handle}, Tunnels: tunnels, Routes: routes, Rules: rules, Filter: filter, Flows: connections,
	}, egresses, []cache.SharedIndexInformer{naming, chosen}, registry, health.Set)
	if err != nil {
		return err
	}
	collector := natgateway.NewCollector(ctx, config, router.Addresses, filter, connections)
	registry.MustRegister(collector)
	changes, err := handle.Subscribe(natgateway.Interest())
	if err != nil {
		return err
	}

	group, ctx := errgroup.WithContext(ctx)
	for _, f := range []*kube.Informer{egresses, naming, chosen} {
		f.Start(ctx.Done())
		defer f.Shutdown()
	}
	group.Go(func() error {
		return observe.Serve(ctx, o.Observe, registry, health, observe.Page{Path: gateway.PressurePath, Handler: collector})
	})
	group.Go(func() error { return errors.Join(router.Watch(ctx, changes), changes.Close()) })
	group.Go(func() error { return router.Run(ctx) })
	readers := natgateway.Readers{Tunnels: tunnels, Routes: routes, Rules: rules, Filter: filter, Way: handle.Way, Traffic: handle.Traffic, Sent: connections.Sent}
	group.Go(func() error {
		return serveDebug(ctx, o.DebugSocket, &natgateway.Debug{Gateway: router, Readers: readers, Version: program.Version(), NotReady: health.Ready})
	})
	return group.Wait()
}

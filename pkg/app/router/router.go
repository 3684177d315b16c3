// Package router composes coil-router.
package router

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/router"
)

// Options are the flags and environment of coil-router.
type Options struct {
	NodeName       string // env COIL_NODE_NAME
	Kubeconfig     string
	Protocol       int
	UpdateInterval time.Duration
	Observe        observe.Options
}

// AddFlags implements program.Options.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.NodeName = os.Getenv("COIL_NODE_NAME")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig file, for use outside a cluster")
	fs.IntVar(&o.Protocol, "protocol-id", dataplane.ProtocolRouter, "protocol number that marks the routes of coil-router")
	fs.DurationVar(&o.UpdateInterval, "update-interval", 10*time.Minute, "longest time between two syncs of the routes")
	fs.StringVar(&o.Observe.MetricsAddr, "metrics-addr", ":9388", "address of /metrics")
	fs.StringVar(&o.Observe.HealthAddr, "health-addr", ":9389", "address of /healthz and /readyz")
}

// Validate implements program.Options.
func (o *Options) Validate() error {
	return errors.Join(
		program.Required("COIL_NODE_NAME", o.NodeName, "the name of the Node"),
		program.Protocol("--protocol-id", o.Protocol),
		program.Positive("--update-interval", o.UpdateInterval),
	)
}

// Main runs coil-router and returns its exit code.
func Main(args []string) int {
	var o Options
	return program.Main("coil-router", args, &o, func(ctx context.Context) error { return run(ctx, o) })
}

func run(ctx context.Context, o Options) error {
	clients, err := kube.Connect(o.Kubeconfig, "coil-router")
	if err != nil {
		return err
	}
	registry := observe.NewRegistry()
	health := observe.NewHealth("routes")
	handle, err := rtnl.New(nil)
	if err != nil {
		return err
	}
	defer handle.Close()

	nodes, blocks := kube.NodeInformer(clients.Core, ""), kube.AddressBlockInformer(clients.Coil, "")
	r, err := router.New(router.Config{
		NodeName: o.NodeName, Table: dataplane.TableMain, Protocol: o.Protocol, UpdateInterval: o.UpdateInterval,
	}, nodes, blocks, route.New(handle, o.Protocol, dataplane.TableMain), registry,
		func(err error) { health.Set("routes", err) })
	if err != nil {
		return err
	}

	changes, err := handle.Subscribe(rtnl.Interest{Protocol: o.Protocol, Tables: []int{dataplane.TableMain}})
	if err != nil {
		return err
	}

	group, ctx := errgroup.WithContext(ctx)
	for _, f := range []*kube.Informer{nodes, blocks} {
		f.Start(ctx.Done())
		defer f.Shutdown()
	}
	group.Go(func() error { return observe.Serve(ctx, o.Observe, registry, health) })
	group.Go(func() error { return errors.Join(r.Watch(ctx, changes), changes.Close()) })
	group.Go(func() error { return r.Run(ctx) })
	return group.Wait()
}

// Package lbagent composes the program coil-lb-agent.
//
// It owns the flags and the order in which parts start. It must not know what any of them does.
package lbagent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/keepalived"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/lbgateway"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	programName = "coil-lb-agent"
	// applied is the condition of readiness.
	applied = "applied"
	// kernelSettle is the time between two looks at what others have changed in the kernel.
	kernelSettle = 500 * time.Millisecond
)

// Main runs the program and returns its exit code.
func Main(args []string) int {
	o := &Options{}
	return program.Main(programName, args, o, func(ctx context.Context) error { return run(ctx, o) })
}

func run(ctx context.Context, o *Options) (err error) {
	table, err := nft.New(nil, dataplane.NftTableLB)
	if err != nil {
		return err
	}
	defer table.Close()
	if o.Cleanup {
		return cleanup(ctx, o, table)
	}
	flows, err := conntrack.New(nil)
	if err != nil {
		return err
	}
	defer flows.Close()
	if err := os.MkdirAll(o.StateDir, 0o700); err != nil {
		return err
	}
	if o.Forwarding {
		if _, err := o.settings().Set(nil, sysctl.Setting{Key: "net/ipv4/ip_forward", Value: "1"}, sysctl.Setting{Key: "net/ipv6/conf/all/forwarding", Value: "1"}); err != nil {
			return err
		}
	}
	registry, health := observe.NewRegistry(), observe.NewHealth(applied)
	all, coil, err := o.connect()
	if err != nil {
		return err
	}
	cfg := lbgateway.Config{
		Name: o.Name, Coil: coil, Table: table, Flows: flows, VRRP: keepalived.New(o.Keepalived), File: o.lastFile(), LoopMetrics: reconcile.NewMetrics(registry), Registry: registry,
		Gateways: all.all.Coil().V2().LoadBalancerGateways().Informer(), Pools: all.all.Coil().V2().AddressPools().Informer(), Blocks: all.blocks.Coil().V2().AddressBlocks().Informer(),
		Services: all.cluster.Core().V1().Services().Informer(), Nodes: all.cluster.Core().V1().Nodes().Informer(),
		Slices: all.cluster.Discovery().V1().EndpointSlices().Informer(), Health: func(err error) { health.Set(applied, err) },
	}
	gateway, err := lbgateway.New(ctx, cfg)
	if err != nil {
		return err
	}
	// The rules of before are there. systemd starts keepalived now, which may have addresses at once (Type=notify, sd_notify(3)).
	if _, err := daemon.SdNotify(true, daemon.SdNotifyReady); err != nil {
		klog.FromContext(ctx).Error(err, "systemd doesn't hear that the program is ready")
	}
	watch, err := table.Watch()
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, f := range []factory{all.all, all.blocks, all.cluster} {
		f.Start(ctx.Done())
		defer f.Shutdown()
	}
	group.Go(func() error { return observe.Serve(ctx, o.Observe, registry, health) })
	group.Go(func() error { return errors.Join(watch.Run(ctx, kernelSettle, gateway.Touched), watch.Close()) })
	group.Go(func() error { return gateway.Run(ctx) })
	return group.Wait()
}

// lastFile has what the machine did last.
func (o *Options) lastFile() string { return filepath.Join(o.StateDir, "last.json") }

// settings has the kernel's settings before the program.
func (o *Options) settings() *sysctl.Record {
	return sysctl.NewRecord(filepath.Join(o.StateDir, "sysctl.json"))
}

// cleanup takes back what the program has done. Addresses go before the table, which guards them.
func cleanup(ctx context.Context, o *Options, table *nft.Table) error {
	if vrrp := keepalived.New(o.Keepalived); vrrp.Used() {
		if err := vrrp.Remove(ctx); err != nil {
			return err
		}
	}
	_, err := table.Sync(ctx, dataplane.Ruleset{})
	_, e := o.settings().Restore(nil)
	if err := errors.Join(err, e); err != nil {
		return err
	}
	return os.RemoveAll(o.StateDir)
}

// factory is a factory of informers.
type factory interface {
	Start(stop <-chan struct{})
	Shutdown()
}

// caches are the factories of all informers.
type caches struct {
	all, blocks externalversions.SharedInformerFactory
	cluster     informers.SharedInformerFactory
}

// connect makes the informers, which keep only the fields that the gateway reads, and the client.
func (o *Options) connect() (caches, versioned.Interface, error) {
	cfg, err := kube.Config(o.Kubeconfig, programName)
	if err != nil {
		return caches{}, nil, err
	}
	core, err := kubernetes.NewForConfig(kube.Protobuf(cfg))
	if err != nil {
		return caches{}, nil, fmt.Errorf("client of Kubernetes' resources: %w", err)
	}
	coil, err := versioned.NewForConfig(cfg)
	if err != nil {
		return caches{}, nil, fmt.Errorf("client of Coil's resources: %w", err)
	}
	keep := externalversions.WithTransform(strip)
	return caches{
		all: externalversions.NewSharedInformerFactoryWithOptions(coil, 0, keep),
		blocks: externalversions.NewSharedInformerFactoryWithOptions(coil, 0, keep, externalversions.WithTweakListOptions(func(l *metav1.ListOptions) {
			l.LabelSelector = v2.LabelFloating + "=" + v2.FloatingValue + "," + v2.LabelAnnounce + "=" + string(v2.AnnounceGateway)
		})),
		cluster: informers.NewSharedInformerFactoryWithOptions(core, 0, informers.WithTransform(strip)),
	}, coil, nil
}

// Package lbcontroller composes the program coil-lb-controller.
//
// It owns the flags and the order in which parts start. It must not know what any of
// them does.
package lbcontroller

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/rest"

	"github.com/coil-net/coil/generated/informers/externalversions"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/controller/cloudaddress"
	"github.com/coil-net/coil/pkg/controller/loadbalancer"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
)

const (
	programName = "coil-lb-controller"
	leaseName   = plan.LBLease
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

// compose makes the controllers. Their informers keep only the fields that these read.
func (o *Options) compose(_ context.Context, e leading.Environment) (leading.Controllers, error) {
	pools := externalversions.NewSharedInformerFactoryWithOptions(e.Coil, 0, externalversions.WithTransform(kube.Strip))
	claims := externalversions.NewSharedInformerFactoryWithOptions(e.Coil, 0, externalversions.WithTransform(kube.Strip), externalversions.WithNamespace(o.Namespace))
	blocks := externalversions.NewSharedInformerFactoryWithOptions(e.Coil, 0, externalversions.WithTransform(kube.Strip),
		externalversions.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = v2.LabelFloating + "=" + v2.FloatingValue }))
	cluster := informers.NewSharedInformerFactoryWithOptions(e.Core, 0, informers.WithTransform(strip))
	services, err := loadbalancer.New(loadbalancer.Config{
		Coil: e.Coil, Core: e.Core, Metadata: e.Clients.Metadata,
		Pools: pools.Coil().V2().AddressPools(), Claims: claims.Coil().V2().AddressClaims(), Gateways: pools.Coil().V2().LoadBalancerGateways(), Blocks: blocks.Coil().V2().AddressBlocks().Informer(), Cluster: cluster,
		Namespace: o.Namespace, DefaultPool: o.DefaultPool, WithoutClass: o.WithoutClass, Recorder: e.Recorder, LoopMetrics: e.Loops,
		Registry: e.Registry,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	clouds, err := cloudaddress.New(cloudaddress.Config{
		Coil: e.Coil, Pools: pools.Coil().V2().AddressPools(), Claims: claims.Coil().V2().AddressClaims(), Gateways: pools.Coil().V2().LoadBalancerGateways(),
		Namespace: o.Namespace, Open: o.open(e.Core, cloudaddress.NewMetrics(e.Registry)), Resync: o.CloudResync, Recorder: e.Recorder, LoopMetrics: e.Loops,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	return leading.Controllers{
		Informers: []leading.Informers{pools, claims, blocks, cluster},
		Synced:    slices.Concat(services.Synced(), clouds.Synced()),
		Run: func(ctx context.Context) error {
			group, ctx := errgroup.WithContext(ctx)
			group.Go(func() error { return services.Run(ctx) })
			group.Go(func() error { return clouds.Run(ctx) })
			return group.Wait()
		},
	}, nil
}

// strip keeps the fields of Services, Nodes, EndpointSlices and NetworkPolicies that the controller reads, since there may be thousands and they are large. Of a Service the
// status is written as a whole.
func strip(obj any) (any, error) {
	switch o := obj.(type) {
	case *corev1.Node:
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{
				Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion, DeletionTimestamp: o.DeletionTimestamp,
				Labels: kube.Only(o.Labels, corev1.LabelNodeExcludeBalancers),
			},
			Spec:   corev1.NodeSpec{Taints: o.Spec.Taints},
			Status: corev1.NodeStatus{Addresses: o.Status.Addresses, Conditions: o.Status.Conditions},
		}, nil
	case *discoveryv1.EndpointSlice:
		kept := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
			Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion, Labels: kube.Only(o.Labels, discoveryv1.LabelServiceName),
		}}
		for _, e := range o.Endpoints {
			kept.Endpoints = append(kept.Endpoints, discoveryv1.Endpoint{NodeName: e.NodeName, Conditions: e.Conditions})
		}
		return kept, nil
	case *networkingv1.NetworkPolicy:
		return &networkingv1.NetworkPolicy{
			ObjectMeta: metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion},
			Spec:       networkingv1.NetworkPolicySpec{PodSelector: o.Spec.PodSelector, PolicyTypes: o.Spec.PolicyTypes, Ingress: o.Spec.Ingress},
		}, nil
	}
	return kube.Strip(obj)
}

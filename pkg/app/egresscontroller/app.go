// Package egresscontroller composes the program coil-egress-controller.
//
// It owns the flags and the order in which parts start. It must not know what any of
// them does.
package egresscontroller

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/informers/externalversions"
	coilinformers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	controller "github.com/coil-net/coil/pkg/controller/egress"
	"github.com/coil-net/coil/pkg/controller/egresspolicy"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
)

const (
	programName = "coil-egress-controller"
	leaseName   = plan.EgressLease
	// imagePause is how long to wait before the own pod is asked for again.
	imagePause = time.Second
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

// compose makes the controllers. Their informers select on the server, and keep only the fields that the controllers read.
func (o *Options) compose(ctx context.Context, e leading.Environment) (leading.Controllers, error) {
	externalNodes, err := o.externalNodes()
	if err != nil {
		return leading.Controllers{}, err
	}
	image, err := ownImage(ctx, e.Core, o)
	if err != nil {
		return leading.Controllers{}, err
	}
	selected := func(narrow func(*metav1.ListOptions)) informers.SharedInformerFactory {
		return informers.NewSharedInformerFactoryWithOptions(e.Core, 0, informers.WithTweakListOptions(narrow))
	}
	s := &stripper{}
	coil := externalversions.NewSharedInformerFactoryWithOptions(e.Coil, 0, externalversions.WithTransform(kube.Strip))
	cluster := informers.NewSharedInformerFactoryWithOptions(e.Core, 0, informers.WithTransform(s.strip))
	// Of the next two the managed fields are read.
	routers := selected(func(l *metav1.ListOptions) { l.LabelSelector = plan.RouterSelector() })
	accounts := selected(func(l *metav1.ListOptions) {
		l.FieldSelector = fields.OneTermEqualSelector("metadata.name", egress.RouterAccount).String()
	})
	clients := informers.NewSharedInformerFactoryWithOptions(e.Core, 0, informers.WithTransform(kube.Strip),
		informers.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = egress.ClientSelector() }))
	namespaces := kube.MetadataInformer(e.Clients.Metadata, corev1.SchemeGroupVersion.WithResource("namespaces"), "")
	// Of AddressBlocks only the floating ones are read.
	floating := externalversions.NewSharedInformerFactoryWithOptions(e.Coil, 0, externalversions.WithTransform(kube.Strip),
		externalversions.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = v2.LabelFloating + "=" + v2.FloatingValue }))
	kinds := coil.Coil().V2()
	var pools coilinformers.AddressPoolInformer
	var addresses *controller.FloatingInformers
	if o.EnableIPAM {
		pools = kinds.AddressPools()
	}
	if o.EnableIPAM || o.EnableFloating {
		addresses = &controller.FloatingInformers{
			Claims: kinds.AddressClaims(), Blocks: floating.Coil().V2().AddressBlocks().Informer(),
			Policies: kinds.EgressPolicies().Informer(), ClusterPolicies: kinds.EgressClusterPolicies().Informer(),
		}
	}
	services := informers.NewSharedInformerFactoryWithOptions(e.Core, 0, informers.WithTransform(s.strip))
	routing, err := controller.New(controller.Config{
		Coil: e.Coil, Core: e.Core, Egresses: kinds.Egresses(), Pools: pools, Floating: addresses,
		Cluster: cluster, Namespaces: namespaces, Routers: routers, Accounts: accounts, Clients: clients,
		ExternalNodes: externalNodes, EndpointsPerSlice: o.EndpointsPerSlice, CountEvery: o.CountEvery, Image: image, Recorder: e.Recorder, LoopMetrics: e.Loops, Registry: e.Registry,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	choosing, err := egresspolicy.New(egresspolicy.Config{
		Coil: e.Coil, Core: e.Core,
		Policies: kinds.EgressPolicies().Informer(), ClusterPolicies: kinds.EgressClusterPolicies().Informer(), Egresses: kinds.Egresses().Informer(),
		Pods: cluster.Core().V1().Pods().Informer(), Services: services.Core().V1().Services().Informer(), Namespaces: namespaces,
		Clients: clients.Discovery().V1().EndpointSlices().Informer(), EndpointsPerSlice: o.EndpointsPerSlice, CountEvery: o.CountEvery,
		Recorder: e.Recorder, LoopMetrics: e.Loops, Registry: e.Registry,
	})
	if err != nil {
		return leading.Controllers{}, err
	}
	return leading.Controllers{
		Informers: []leading.Informers{coil, floating, cluster, routers, accounts, clients, services, namespaces},
		Synced:    slices.Concat(routing.Synced(), choosing.Synced()),
		Run: func(ctx context.Context) error {
			group, ctx := errgroup.WithContext(ctx)
			group.Go(func() error { return routing.Run(ctx) })
			group.Go(func() error { return choosing.Run(ctx) })
			return group.Wait()
		},
	}, nil
}

// ownImage returns the image of the pod that the program runs in, and asks for it until it
// gets an answer.
func ownImage(ctx context.Context, core kubernetes.Interface, o *Options) (egress.RouterImage, error) {
	var pod *corev1.Pod
	err := wait.PollUntilContextCancel(ctx, imagePause, true, func(ctx context.Context) (bool, error) {
		var err error
		pod, err = core.CoreV1().Pods(o.PodNamespace).Get(ctx, o.PodName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, fmt.Errorf("find the own pod, whose image routers have (COIL_POD_NAMESPACE, COIL_POD_NAME): %w", err)
		}
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "The own pod can't be read, trying again", "pod", klog.KRef(o.PodNamespace, o.PodName))
		}
		return err == nil, nil
	})
	if err != nil {
		return egress.RouterImage{}, err
	}
	i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == programName })
	if i < 0 {
		return egress.RouterImage{}, fmt.Errorf("pod %s has no container %s, whose image routers would have", klog.KObj(pod), programName)
	}
	c := pod.Spec.Containers[i]
	return egress.RouterImage{Name: c.Image, PullPolicy: c.ImagePullPolicy, Port: o.EgressPort}, nil
}

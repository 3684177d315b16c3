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

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/generated/informers/externalversions"
	coilinformers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	controller "github.com/coil-net/coil/pkg/controller/egress"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	programName = "coil-egress-controller"
	leaseName   = "coil-egress-leader"
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
	externalNodes, err := o.externalNodes()
	if err != nil {
		return err
	}
	clients, err := kube.NewClients(cfg)
	if err != nil {
		return err
	}
	core, err := kubernetes.NewForConfig(kube.Protobuf(cfg))
	if err != nil {
		return fmt.Errorf("client of Kubernetes' resources: %w", err)
	}
	coil, err := versioned.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("client of Coil's resources: %w", err)
	}
	registry := observe.NewRegistry()
	health := observe.NewHealth(leading.Caches)

	group, ctx := errgroup.WithContext(ctx)
	recorder, flush, err := kube.RunRecorder(ctx, clients.Core, programName)
	if err != nil {
		return err
	}
	defer flush()
	group.Go(func() error { return observe.Serve(ctx, o.Observe, registry, health) })
	group.Go(func() error {
		image, err := ownImage(ctx, core, o)
		if err != nil || ctx.Err() != nil {
			return err
		}
		s := newSources(clients, core, coil, o)
		c, err := controller.New(controller.Config{
			Coil: coil, Core: core, Egresses: s.coil.Coil().V2().Egresses(), Pools: s.pools,
			Cluster: s.cluster, Namespaces: s.namespaces, Routers: s.routers, Accounts: s.accounts, Clients: s.slices,
			ExternalNodes: externalNodes, EndpointsPerSlice: o.EndpointsPerSlice, Image: image, Recorder: recorder, LoopMetrics: reconcile.NewMetrics(registry), Registry: registry,
		})
		if err != nil {
			return err
		}
		// Who loses the lease ends, and waits for nothing that only an end of the program ends.
		ctx, cancel := context.WithCancel(ctx)
		s.start(ctx)
		defer func() { cancel(); s.shutdown() }()
		return o.Election.Run(ctx, cfg, leaseName, health, c.Synced(), c.Run)
	})
	return group.Wait()
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
	if err != nil || pod == nil {
		if ctx.Err() != nil {
			return egress.RouterImage{}, nil
		}
		return egress.RouterImage{}, err
	}
	i := slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == programName })
	if i < 0 {
		return egress.RouterImage{}, fmt.Errorf("pod %s has no container %s, whose image routers would have", klog.KObj(pod), programName)
	}
	c := pod.Spec.Containers[i]
	return egress.RouterImage{Name: c.Image, PullPolicy: c.ImagePullPolicy, Port: o.EgressPort}, nil
}

// sources are the informers, which select on the server and keep only what is read.
type sources struct {
	coil                               externalversions.SharedInformerFactory
	cluster, routers, accounts, slices informers.SharedInformerFactory
	namespaces                         *kube.Informer
	pools                              coilinformers.AddressPoolInformer
}

func newSources(clients kube.Clients, core kubernetes.Interface, coil versioned.Interface, o *Options) *sources {
	selected := func(narrow func(*metav1.ListOptions)) informers.SharedInformerFactory {
		return informers.NewSharedInformerFactoryWithOptions(core, 0, informers.WithTweakListOptions(narrow))
	}
	s := &sources{
		coil:    externalversions.NewSharedInformerFactoryWithOptions(coil, 0, externalversions.WithTransform(kube.Strip)),
		cluster: informers.NewSharedInformerFactoryWithOptions(core, 0, informers.WithTransform(strip)),
		// Of the next two the managed fields are read.
		routers: selected(func(l *metav1.ListOptions) { l.LabelSelector = plan.RouterSelector() }),
		accounts: selected(func(l *metav1.ListOptions) {
			l.FieldSelector = fields.OneTermEqualSelector("metadata.name", egress.RouterAccount).String()
		}),
		slices: informers.NewSharedInformerFactoryWithOptions(core, 0, informers.WithTransform(kube.Strip),
			informers.WithTweakListOptions(func(l *metav1.ListOptions) { l.LabelSelector = egress.ClientSelector() })),
		namespaces: kube.MetadataInformer(clients.Metadata, corev1.SchemeGroupVersion.WithResource("namespaces"), ""),
	}
	if o.EnableIPAM {
		s.pools = s.coil.Coil().V2().AddressPools()
	}
	return s
}

func (s *sources) start(ctx context.Context) {
	s.coil.Start(ctx.Done())
	for _, f := range []informers.SharedInformerFactory{s.cluster, s.routers, s.accounts, s.slices} {
		f.Start(ctx.Done())
	}
	s.namespaces.Start(ctx.Done())
}

// shutdown waits until all have ended.
func (s *sources) shutdown() {
	s.coil.Shutdown()
	for _, f := range []informers.SharedInformerFactory{s.cluster, s.routers, s.accounts, s.slices} {
		f.Shutdown()
	}
	s.namespaces.Shutdown()
}

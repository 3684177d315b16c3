// Package egress makes routers of Egresses and tells them their clients.
//
// It owns the Deployment, the Service and the PodDisruptionBudget of each Egress, the
// ServiceAccount of the routers in each namespace that has one and its RoleBinding, the
// EndpointSlices with clients, the AddressClaim of its floating addresses and where these are to be, and the status of Egresses. It must not know what routers and clients
// do to packets.
//
//	Egress                               action
//	gone, deleting                       none: the garbage collector deletes what it owns; the account
//	                                     and its binding with the last Egress of its namespace
//	alive                                apply what isn't as it should be; nothing is written otherwise
//	template isn't a pod spec            all but the Deployment; condition InvalidTemplate
//	an object of its name is another's   all but that object; Available is False for Conflict
//	the API server refuses an object     all but that object, which is tried again; Available says so, and
//	                                     is False if clients can't be served without it
//	no budget in spec                    delete the budget if it is its own
//	addresses in spec                    an AddressClaim of them; one of before is deleted
//	a router becomes ready, or fails     its node is one of those that may have addresses, or none
//
//	pod that names the Egress            its EndpointSlices
//	has an address, lives                have each of its addresses, once
//	host network, Succeeded, Failed      don't have it
//	namespace isn't allowed              don't have it; an Event on the pod
//	more of them within half a second    are collected: only the first is written at once
//
// Five loops: objects and status, clients, the places of floating addresses, the ClusterRoleBinding of former versions, and
// what routers say about their pressure. The clients of one Egress so never wait for its objects, nor its
// objects for a router's answer. Each coild gets each Egress that changes: a status of which only the numbers of
// clients and policies differ is written every 30 seconds at most.
package egress

import (
	"context"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned"
	coilinformers "github.com/coil-net/coil/generated/informers/externalversions/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/lists"
	"github.com/coil-net/coil/pkg/kube/object"
	"github.com/coil-net/coil/pkg/plan/cluster"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/syncmap"
)

const (
	// settle is for how long changes are collected that only the status follows.
	settle = time.Second
	// countEvery is how often the status of an Egress is written for the numbers of its clients and policies alone.
	countEvery = 30 * time.Second
	// foreignPause is how long to wait for somebody else's object to go: it need not have
	// labels by which its end would be an event.
	foreignPause = 15 * time.Second
	workers      = 4
)

// Config is what the controller is made of. The caller runs the informers.
type Config struct {
	Coil versioned.Interface
	Core kubernetes.Interface

	Egresses coilinformers.EgressInformer
	// Pools are nil when Coil doesn't give pods their addresses.
	Pools coilinformers.AddressPoolInformer
	// Floating is nil when there are no floating addresses.
	Floating *FloatingInformers
	// Cluster informs of Pods, Nodes and ServiceCIDRs.
	Cluster informers.SharedInformerFactory
	// Namespaces informs of the metadata of all namespaces.
	Namespaces cache.SharedIndexInformer
	// Routers informs of Deployments, Services and PodDisruptionBudgets that
	// plan.RouterSelector selects, with their managed fields.
	Routers informers.SharedInformerFactory
	// Accounts informs of ServiceAccounts, RoleBindings and ClusterRoleBindings of the name
	// egress.RouterAccount, with their managed fields.
	Accounts informers.SharedInformerFactory
	// Clients informs of EndpointSlices that egress.ClientSelector selects.
	Clients informers.SharedInformerFactory

	// ExternalNodes are the ranges in which ExternalIPs of Nodes are the cluster's.
	ExternalNodes []netip.Prefix
	// EndpointsPerSlice is how many clients are in a slice; 0 is egress.EndpointsPerSlice.
	EndpointsPerSlice int
	// CountEvery is how often the status of an Egress is written for the numbers of its clients and policies alone; 0 is 30 s.
	CountEvery time.Duration
	// Image is how routers are started.
	Image    egress.RouterImage
	Recorder kube.Recorder
	// LoopMetrics and Registry take metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	Registry    prometheus.Registerer
}

// Controller keeps Egresses.
type Controller struct {
	cfg      Config
	egresses kube.Cache[v2.Egress]
	pods     kube.Cache[corev1.Pod]
	naming   kube.Index[corev1.Pod]                // by the Egresses that they name
	routers  kube.Index[corev1.Pod]                // by their Egress
	defaults kube.Index[v2.Egress]                 // under isDefault
	slices   kube.Index[discoveryv1.EndpointSlice] // by the Egress that their clients name
	served   kube.Index[discoveryv1.EndpointSlice] // by the Egress whose clients they have, by policies as well
	synced   []cache.DoneChecker
	objects  *reconcile.Loop[types.NamespacedName]
	clients  *reconcile.Loop[types.NamespacedName]
	binding  *reconcile.Loop[string]
	pressure *reconcile.Loop[types.NamespacedName]
	places   *reconcile.Loop[types.NamespacedName]
	// addresses is nil when there are no floating addresses.
	addresses *addresses
	ranges    atomic.Pointer[func() cluster.Ranges] // computes them once
	now       func() metav1.Time
	gauges    gauges
	// refused are the pods that may not use an Egress and were told so.
	refused perEgress[sets.Set[types.UID]]
	// lists keeps the slices.
	lists *lists.Keeper
	// counted is when the numbers of users were written to the status last.
	counted perEgress[time.Time]
	// askTimeout is how long a round of questions to the routers of an Egress may take.
	askTimeout time.Duration
	// pressures are written by the loop pressure, and read by objects.
	pressures perEgress[answers]
	// verdicts are by kind of object.
	verdicts perEgress[map[string]verdict]
}

// perEgress has a value for each Egress.
type perEgress[T any] = syncmap.Map[types.NamespacedName, T]

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	pods := kube.CacheOf[corev1.Pod](cfg.Cluster.Core().V1().Pods().Informer())
	egresses := kube.CacheOf[v2.Egress](cfg.Egresses.Informer())
	slices := kube.CacheOf[discoveryv1.EndpointSlice](cfg.Clients.Discovery().V1().EndpointSlices().Informer())
	c := &Controller{
		cfg:      cfg,
		egresses: egresses,
		defaults: egresses.IndexBy(defaultEgress),
		pods:     pods,
		naming:   pods.IndexBy(egressesOfPod),
		routers:  pods.IndexBy(egressOfRouter),
		slices:   slices.IndexBy(egressOfSlice),
		served:   slices.IndexBy(egressesOfSlice),
		lists:    lists.New(cfg.Core.DiscoveryV1(), cfg.EndpointsPerSlice),
		now:      metav1.Now,
		gauges:   newGauges(cfg.Registry),

		addresses: newAddresses(cfg.Floating),

		askTimeout: askTimeout,
	}
	c.expireRanges()
	c.objects = reconcile.New("egress", c.syncObjects, cfg.LoopMetrics)
	c.clients = reconcile.New("egress-clients", c.syncClients, cfg.LoopMetrics)
	c.binding = reconcile.New("egress-binding", c.syncBinding, cfg.LoopMetrics)
	c.places = reconcile.New("egress-addresses", c.syncPlaces, cfg.LoopMetrics)
	c.pressure = reconcile.New("egress-pressure", c.syncPressure, cfg.LoopMetrics)
	return c, c.register()
}

// Synced says of each cache whether it is filled, and its events handled.
func (c *Controller) Synced() []cache.DoneChecker { return c.synced }

// Run keeps Egresses until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	defer c.gauges.reset()
	c.binding.Add(egress.RouterAccount) // also when there is no Egress
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.objects.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.clients.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.binding.Run(ctx, 1, c.synced...) })
	group.Go(func() error { return c.places.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.pressure.Run(ctx, workers, c.synced...) })
	return group.Wait()
}

// ownedBy returns whether an object is an Egress's own: by its owner or, where somebody
// has taken that away, by the mark of the controller's applies.
func ownedBy[T metav1.Object](e *v2.Egress) func(T) bool {
	return func(o T) bool {
		return metav1.IsControlledBy(o, e) || metav1.GetControllerOf(o) == nil && o.GetAnnotations()[v2.AnnotationApplied] != ""
	}
}

// formerManagers are the field managers of Coil 2.x, which wrote by Update.
var formerManagers = sets.New(egress.ControllerName, "coil-controller")

// writer keeps objects of a kind in one namespace.
func writer[T object.Object](c object.Client[T], owned func(T) bool) object.Writer[T] {
	return object.Writer[T]{Client: c, Manager: egress.ControllerName, Former: formerManagers, Owned: owned}
}

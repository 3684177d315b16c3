// Package egresspolicy says what EgressPolicies and EgressClusterPolicies mean, and tells routers the pods that they select.
//
// It owns the status of the policies and the EndpointSlices with their clients. It must not know what routers and clients do
// to packets, nor how the clients that name an Egress themselves are listed.
//
//	policy                               its EndpointSlices
//	in force, see policy.InForce         have the addresses of the pods that it selects, in the namespace of its Egress
//	changed, and not yet looked at       stay as they are
//	names another Egress                 are made there, then deleted where they were; if that one has addresses for clients, they say no address for a while
//	gone                                 are deleted
//	not in force                         are deleted or, if the Egress has addresses for clients, say no address: see policy.Decides
//	annotation that can't be understood  are deleted: no policy says that they are its own
//
//	pod that a policy selects
//	also selected by one that decides    is listed when that one lists it, if the Egress has addresses for clients
//	host network, Succeeded, Failed      isn't listed
//	namespace isn't allowed              isn't listed; the policy says NamespaceNotAllowed
//	router of an Egress                  isn't listed
//
// Three loops: the addresses of all policies of an Egress, status, and lists, so that clients never wait for conflicts to be found. A pod that changes is compared with the policies of
// its namespace and with EgressClusterPolicies. A status of which only the number of clients differs is written every 30 seconds
// at most, since each coild gets it. One of which only the addresses of nodes differ is written when they have stayed so for 10 seconds.
package egresspolicy

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/lists"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/syncmap"
)

const (
	// settle is for how long changes are collected that only the status follows.
	settle = time.Second
	// countEvery is how often the status of a policy is written for the number of its clients alone.
	countEvery = 30 * time.Second
	// settlePlace is for how long the pods of a policy have left by other nodes' addresses when its status says so: a router that isn't ready
	// for a moment would have the status of all policies of its Egress written twice.
	settlePlace = 10 * time.Second
	workers     = 4
)

// Config is what the controller is made of. The caller runs the informers.
type Config struct {
	Coil versioned.Interface
	Core kubernetes.Interface

	// Policies, ClusterPolicies and Egresses inform of all of them.
	Policies, ClusterPolicies, Egresses cache.SharedIndexInformer
	// Pods and Services inform of all of them, Namespaces of their metadata.
	Pods, Services, Namespaces cache.SharedIndexInformer
	// Clients informs of EndpointSlices that egress.ClientSelector selects.
	Clients cache.SharedIndexInformer

	// EndpointsPerSlice is how many clients are in a slice; 0 is egress.EndpointsPerSlice.
	EndpointsPerSlice int
	// CountEvery is how often the status of a policy is written for the number of its clients alone; 0 is 30 s.
	CountEvery time.Duration
	Recorder   kube.Recorder
	// LoopMetrics and Registry take metrics; nil ones are not exported.
	LoopMetrics *reconcile.Metrics
	Registry    prometheus.Registerer
}

// Controller keeps policies. A key is the name of a policy, for an EgressClusterPolicy without a namespace.
type Controller struct {
	cfg        Config
	policies   kinds
	egresses   kube.Cache[v2.Egress]
	defaults   kube.Index[v2.Egress] // under isDefault
	pods       kube.Cache[corev1.Pod]
	naming     kube.Index[corev1.Pod] // by the Egresses that they name
	services   kube.Cache[corev1.Service]
	namespaces kube.Cache[metav1.PartialObjectMetadata]
	slices     kube.Index[discoveryv1.EndpointSlice] // by their policy
	named      kube.Index[discoveryv1.EndpointSlice] // by the Egress, those of pods that name it
	keeper     *lists.Keeper
	synced     []cache.DoneChecker
	status     *reconcile.Loop[types.NamespacedName]
	lists      *reconcile.Loop[types.NamespacedName]
	assign     *reconcile.Loop[types.NamespacedName] // by Egress
	// assigned has, by Egress, the floating addresses of its policies.
	assigned syncmap.Map[types.NamespacedName, assignment]
	now      func() metav1.Time
	metrics  *collector
	// counted is when the number of clients was written to the status last.
	counted syncmap.Map[types.NamespacedName, time.Time]
	turns   turns
	// keeping is since when the list of a policy has had a pod that isn't its own any more.
	keeping syncmap.Map[types.NamespacedName, time.Time]
	// left is since when policies haven't named Egresses that still have their lists.
	left syncmap.Map[types.NamespacedName, map[types.NamespacedName]time.Time]
	// moved is since when the pods of a policy leave by other nodes' addresses than its status says.
	moved syncmap.Map[types.NamespacedName, time.Time]
}

// New returns a controller that isn't running.
func New(cfg Config) (*Controller, error) {
	egresses, pods := kube.CacheOf[v2.Egress](cfg.Egresses), kube.CacheOf[corev1.Pod](cfg.Pods)
	clients := kube.CacheOf[discoveryv1.EndpointSlice](cfg.Clients)
	c := &Controller{
		cfg:        cfg,
		policies:   newKinds(cfg),
		egresses:   egresses,
		defaults:   egresses.IndexBy(defaultEgress),
		pods:       pods,
		naming:     pods.IndexBy(egressesOfPod),
		services:   kube.CacheOf[corev1.Service](cfg.Services),
		namespaces: kube.CacheOf[metav1.PartialObjectMetadata](cfg.Namespaces),
		slices:     clients.IndexBy(policyOfSlice),
		named:      clients.IndexBy(egressOfSlice),
		keeper:     lists.New(cfg.Core.DiscoveryV1(), cfg.EndpointsPerSlice),
		now:        metav1.Now,
	}
	c.metrics = newCollector(c.policies)
	if cfg.Registry != nil {
		cfg.Registry.MustRegister(c.metrics)
	}
	c.status = reconcile.New("egress-policies", c.syncStatus, cfg.LoopMetrics)
	c.lists = reconcile.New("egress-policy-clients", c.syncClients, cfg.LoopMetrics)
	c.assign = reconcile.New("egress-policy-addresses", c.syncAssignment, cfg.LoopMetrics)
	return c, c.register()
}

// Synced says of each cache whether it is filled, and its events handled.
func (c *Controller) Synced() []cache.DoneChecker { return c.synced }

// Run keeps policies until ctx ends. Call it when this process leads.
func (c *Controller) Run(ctx context.Context) error {
	c.metrics.leading.Store(true)
	defer c.metrics.leading.Store(false)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return c.status.Run(ctx, workers, c.synced...) })
	group.Go(func() error { return c.assign.Run(ctx, 1, c.synced...) })
	group.Go(func() error { return c.lists.Run(ctx, workers, c.synced...) })
	return group.Wait()
}

func keyOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

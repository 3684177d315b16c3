package view

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
)

// EgressHandlers are called at each change of an object that Egresses need; they must not
// block. A Service, and so its EndpointSlices, has the name of its Egress.
type EgressHandlers struct {
	Pod, Egress func(types.NamespacedName)
	Namespace   func(string)
	// Policies is called with a namespace of which another policy may select pods of the node, or another pod.
	Policies func(namespace string)
}

// Egresses has the objects that pods need to use Egresses. Its methods may be called concurrently.
type Egresses struct {
	nodeName   string
	clients    kube.Clients
	namespaces *Namespaces
	pods       kube.Cache[metav1.PartialObjectMetadata]
	egresses   kube.Cache[v2.Egress]
	services   kube.Cache[corev1.Service]
	endpoints  kube.Cache[discoveryv1.EndpointSlice]
	routers    routers
	policies   policies
	floating   kube.Cache[v2.AddressBlock]           // see Floating
	listing    kube.Index[discoveryv1.EndpointSlice] // by the pods that they list
}

// WatchEgresses returns the Egresses of a node.
func WatchEgresses(w *kube.Watches, clients kube.Clients, nodeName string, all *Namespaces, h EgressHandlers) *Egresses {
	onNode := metadata(clients, pods, fields.OneTermEqualSelector("spec.nodeName", nodeName).String())
	egresses, services := kube.EgressInformer(clients.Coil), kube.ServiceInformer(clients.Core, plan.RouterSelector())
	// They have the labels of their Service.
	endpoints := kube.EndpointSliceInformer(clients.Discovery, metav1.NamespaceAll, plan.RouterSelector())
	e := &Egresses{
		nodeName: nodeName, clients: clients, namespaces: all, pods: kube.CacheOf[metav1.PartialObjectMetadata](onNode),
		egresses: kube.CacheOf[v2.Egress](egresses), services: kube.CacheOf[corev1.Service](services), endpoints: kube.CacheOf[discoveryv1.EndpointSlice](endpoints),
	}
	e.listing = e.endpoints.IndexBy(podsOfSlice)
	all.OnChange(h.Namespace)
	e.policies.pods.asking = reconcile.New("policies-of-new-pods", e.ask, nil)
	w.Add(onNode, e.policies.pods.handler(func(p *metav1.PartialObjectMetadata) { h.Pod(cache.MetaObjectToName(p).AsNamespacedName()) }))
	w.Add(egresses, egressHandler(h.Egress))
	w.Add(services, reconcile.Handler(func(s *corev1.Service) { h.Egress(cache.MetaObjectToName(s).AsNamespacedName()) }))
	w.Add(endpoints, reconcile.Handler(func(s *discoveryv1.EndpointSlice) {
		egress := types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}
		e.routers.changed(egress)
		h.Egress(egress)
	}))
	e.watchPolicies(w, h.Policies)
	return e
}

// egressHandler tells of an Egress when its clients have something to do.
func egressHandler(changed func(types.NamespacedName)) cache.ResourceEventHandler {
	return reconcile.ChangeHandler(func(e *v2.Egress) { changed(cache.MetaObjectToName(e).AsNamespacedName()) }, plan.SameEgress)
}

// isPod says whether an object is the Pod that has a UID at the runtime; an empty one matches any.
func isPod(p *metav1.PartialObjectMetadata, uid string) bool {
	return uid == "" || string(p.UID) == uid || plan.PodUID(p) == uid
}

// Pod returns a Pod of the node. One with another UID isn't it; an empty UID matches any.
// With live, an object that the cache doesn't have is read from the API server, here and below; so is a Pod
// without a UID, as long as there is an answer, for the cache may have a former one of its name.
func (e *Egresses) Pod(ctx context.Context, pod store.Pod, live bool) (*metav1.PartialObjectMetadata, error) {
	name := cache.NewObjectName(pod.Namespace, pod.Name).String()
	cached := e.pods.Find(name)
	if cached != nil && !isPod(cached, pod.UID) {
		cached = nil
	}
	trusted := cached
	if pod.UID == "" && live {
		trusted = nil
	}
	return orLive(ctx, trusted, live, "Pod", name, func(ctx context.Context) (*metav1.PartialObjectMetadata, error) {
		p, err := e.clients.Metadata.Resource(pods).Namespace(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		switch {
		case err == nil && !isPod(p, pod.UID):
			return nil, apierrors.NewNotFound(pods.GroupResource(), pod.Name)
		case err != nil && !apierrors.IsNotFound(err) && cached != nil:
			return cached, nil
		}
		return p, err
	})
}

// PodsByAddress reads from the API server the pods of the node by their addresses, without pods in the node's network.
func (e *Egresses) PodsByAddress(ctx context.Context) (map[netip.Addr]store.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	var list corev1.PodList
	selector := fields.OneTermEqualSelector("spec.nodeName", e.nodeName).String()
	if err := e.clients.Core.Get().Resource("pods").Param("fieldSelector", selector).Do(ctx).Into(&list); err != nil {
		return nil, fmt.Errorf("list the node's Pods: %w", err)
	}
	pods := map[netip.Addr]store.Pod{}
	for _, p := range list.Items {
		if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		for _, ip := range p.Status.PodIPs {
			if a, err := netip.ParseAddr(ip.IP); err == nil {
				pods[a] = store.Pod{Namespace: p.Namespace, Name: p.Name, UID: plan.PodUID(&p)}
			}
		}
	}
	return pods, nil
}

// Namespace returns a Namespace.
func (e *Egresses) Namespace(ctx context.Context, name string, live bool) (*metav1.PartialObjectMetadata, error) {
	return e.namespaces.Get(ctx, name, live)
}

// Egress returns an Egress, without its template if it is from the cache.
func (e *Egresses) Egress(ctx context.Context, name types.NamespacedName, live bool) (*v2.Egress, error) {
	return orLive(ctx, e.egresses.Find(name.String()), live, "Egress", name.String(), func(ctx context.Context) (*v2.Egress, error) {
		return e.clients.Coil.Egresses(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
	})
}

// Service returns the Service of an Egress.
func (e *Egresses) Service(ctx context.Context, name types.NamespacedName, live bool) (*corev1.Service, error) {
	return orLive(ctx, e.services.Find(name.String()), live, "Service", name.String(), func(ctx context.Context) (*corev1.Service, error) {
		s := &corev1.Service{}
		err := e.clients.Core.Get().Namespace(name.Namespace).Resource("services").Name(name.Name).Do(ctx).Into(s)
		if _, ok := plan.RouterOf(s.Labels); err == nil && !ok {
			err = apierrors.NewNotFound(corev1.Resource("services"), name.Name)
		}
		return s, err
	})
}

// Routers returns the routers of an Egress that its Service has, as far as known. They must not be changed.
func (e *Egresses) Routers(name types.NamespacedName) []client.Router {
	return e.routers.get(name, func() []client.Router {
		lists := slices.DeleteFunc(e.endpoints.In(name.Namespace), func(s *discoveryv1.EndpointSlice) bool {
			return s.Labels[discoveryv1.LabelServiceName] != name.Name
		})
		return client.RoutersOf(lists)
	})
}

// HostNetwork reads from the API server whether a Pod has the network of its node.
func (e *Egresses) HostNetwork(ctx context.Context, pod types.NamespacedName) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	var p corev1.Pod
	if err := e.clients.Core.Get().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).Do(ctx).Into(&p); err != nil {
		return false, fmt.Errorf("read Pod %s: %w", pod, err)
	}
	return p.Spec.HostNetwork, nil
}

package kube

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	typed "github.com/coil-net/coil/generated/clientset/versioned/typed/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Strip drops the fields that no program of Coil reads from an object before it is cached.
func Strip(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetManagedFields(nil)
	}
	return obj, nil
}

// Only returns the named entries of a map, for functions that strip objects. Its keys are the given ones, where the keys of
// a decoded map are strings of their own in each object.
func Only[M ~map[K]V, K comparable, V any](m M, keys ...K) M {
	kept := make(M, len(keys))
	for _, k := range keys {
		if v, ok := m[k]; ok {
			kept[k] = v
		}
	}
	return kept
}

// Informer is an informer that can be awaited.
type Informer struct {
	cache.SharedIndexInformer
	running sync.WaitGroup
	opened  atomic.Pointer[time.Time] // when the present watch was opened, nil for none; only if it is followed
}

// watchSettle is for how long a watch must be open before its cache counts as current: earlier events
// are sent first.
const watchSettle = time.Second

// Current says whether a watch is open, so that the cache follows the API server. Without one, as
// while the API server is away and until the next attempt, the cache is of an earlier time. A
// connection that broke without a sign counts as open until the client's health check closes it.
func (i *Informer) Current() bool {
	opened := i.opened.Load()
	return opened != nil && time.Since(*opened) >= watchSettle
}

// follow makes the informer know when a watch is open.
func (i *Informer) follow(lw *cache.ListWatch) {
	watches := lw.WatchFuncWithContext
	lw.WatchFuncWithContext = func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
		w, err := watches(ctx, o)
		if err != nil {
			return nil, err
		}
		f := &followed{Interface: w, informer: i}
		if o.SendInitialEvents == nil || !*o.SendInitialEvents {
			f.opened()
			return f, nil
		}
		// The watch begins with a whole list: until that has ended, the cache is of the time before.
		f.Interface = watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
			if o, err := meta.Accessor(e.Object); err == nil && e.Type == watch.Bookmark && o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
				f.opened()
			}
			return e, true
		})
		return f, nil
	}
}

// followed is a watch that tells its informer when it is open and when it ends: the reflector stops each,
// also one that the server has closed.
type followed struct {
	watch.Interface
	informer *Informer

	mu    sync.Mutex
	since *time.Time // when it was open
	ended bool
}

func (f *followed) opened() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		f.since = new(time.Now())
		f.informer.opened.Store(f.since)
	}
}

// Stop implements watch.Interface.
func (f *followed) Stop() {
	f.Interface.Stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended = true; f.since != nil {
		f.informer.opened.CompareAndSwap(f.since, nil)
	}
}

// NodeInformer returns an informer of Nodes, with the fields that the server selects
// by; an empty selector selects all.
func NodeInformer(core rest.Interface, fieldSelector string) *Informer {
	return newInformer(&corev1.Node{}, cache.NewFilteredListWatchFromClient(core, "nodes", metav1.NamespaceAll, byFields(fieldSelector)))
}

// MetadataInformer returns an informer of the metadata of a resource in all namespaces,
// with the fields that the server selects by; an empty selector selects all. Its watch is followed.
func MetadataInformer(client metadata.Interface, r schema.GroupVersionResource, fieldSelector string) *Informer {
	lw := selected(client.Resource(r), byFields(fieldSelector))
	i := newInformer(&metav1.PartialObjectMetadata{}, lw)
	i.follow(lw)
	return i
}

// AddressBlockInformer returns an informer of AddressBlocks, with the labels that the
// server selects by; an empty selector selects all.
func AddressBlockInformer(client typed.CoilV2Interface, labelSelector string) *Informer {
	return newInformer(&v2.AddressBlock{}, selected(client.AddressBlocks(), byLabels(labelSelector)))
}

// BlockRequestInformer returns an informer of BlockRequests, with the labels that the
// server selects by; an empty selector selects all.
func BlockRequestInformer(client typed.CoilV2Interface, labelSelector string) *Informer {
	return newInformer(&v2.BlockRequest{}, selected(client.BlockRequests(), byLabels(labelSelector)))
}

// EgressInformer returns an informer of all Egresses, without their templates.
func EgressInformer(client typed.CoilV2Interface) *Informer {
	return newInformer(&v2.Egress{}, selected(client.Egresses(metav1.NamespaceAll), byLabels(""))).Transformed(func(obj any) (any, error) {
		if e, ok := obj.(*v2.Egress); ok {
			e.Spec.Template = nil
		}
		return Strip(obj)
	})
}

// SecretInformer returns an informer of the Secret of a name.
func SecretInformer(core rest.Interface, namespace, name string) *Informer {
	named := byFields(fields.OneTermEqualSelector(metav1.ObjectNameField, name).String())
	return newInformer(&corev1.Secret{}, cache.NewFilteredListWatchFromClient(core, "secrets", namespace, named))
}

// FloatingBlockInformer returns an informer of the AddressBlocks with floating addresses.
func FloatingBlockInformer(client typed.CoilV2Interface) *Informer {
	return newInformer(&v2.AddressBlock{}, selected(client.AddressBlocks(), byLabels(v2.LabelFloating+"="+v2.FloatingValue)))
}

// EgressPolicyInformer returns an informer of the EgressPolicies of all namespaces. It has none while their definition is missing.
func EgressPolicyInformer(client typed.CoilV2Interface) *Informer {
	all := optional(selected(client.EgressPolicies(metav1.NamespaceAll), byLabels("")), &v2.EgressPolicyList{})
	return newInformer(&v2.EgressPolicy{}, all)
}

// EgressClusterPolicyInformer returns an informer of all EgressClusterPolicies. It has none while their definition is missing.
func EgressClusterPolicyInformer(client typed.CoilV2Interface) *Informer {
	return newInformer(&v2.EgressClusterPolicy{}, optional(selected(client.EgressClusterPolicies(), byLabels("")), &v2.EgressClusterPolicyList{}))
}

// OneEgressInformer returns an informer of the Egress of a name.
func OneEgressInformer(client typed.CoilV2Interface, namespace, name string) *Informer {
	named := byFields(fields.OneTermEqualSelector(metav1.ObjectNameField, name).String())
	return newInformer(&v2.Egress{}, selected(client.Egresses(namespace), named))
}

// ServiceInformer returns an informer of Services, with the labels that the server selects
// by; an empty selector selects all.
func ServiceInformer(core rest.Interface, labelSelector string) *Informer {
	return newInformer(&corev1.Service{}, cache.NewFilteredListWatchFromClient(core, "services", metav1.NamespaceAll, byLabels(labelSelector)))
}

// EndpointSliceInformer returns an informer of the EndpointSlices of a namespace, with the
// labels that the server selects by; an empty selector selects all.
func EndpointSliceInformer(discovery rest.Interface, namespace, labelSelector string) *Informer {
	return newInformer(&discoveryv1.EndpointSlice{}, cache.NewFilteredListWatchFromClient(discovery, "endpointslices", namespace, byLabels(labelSelector)))
}

func byLabels(selector string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.LabelSelector = selector }
}

func byFields(selector string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.FieldSelector = selector }
}

// listWatcher is a client of one resource.
type listWatcher[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// selected lists and watches by a client, with narrower options.
func selected[L runtime.Object](client listWatcher[L], narrow func(*metav1.ListOptions)) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			narrow(&o)
			return client.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			narrow(&o)
			return client.Watch(ctx, o)
		},
	}
}

func newInformer(example runtime.Object, lw cache.ListerWatcher) *Informer {
	i := cache.NewSharedIndexInformer(lw, example, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	return (&Informer{SharedIndexInformer: i}).Transformed(Strip)
}

// Transformed lets transform change objects before they are cached, instead of another function. It is for the time before the informer
// starts.
func (i *Informer) Transformed(transform cache.TransformFunc) *Informer {
	_ = i.SetTransform(transform) // its only error is that the informer has started
	return i
}

// Start runs the informer until stop is closed.
func (i *Informer) Start(stop <-chan struct{}) { i.running.Go(func() { i.Run(stop) }) }

// Shutdown waits until it has ended.
func (i *Informer) Shutdown() { i.running.Wait() }

// WaitForSync waits until all caches are filled; the error is that of ctx.
func WaitForSync(ctx context.Context, synced ...cache.DoneChecker) error {
	if !cache.WaitFor(ctx, "", synced...) {
		return ctx.Err()
	}
	return nil
}

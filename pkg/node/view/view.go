// Package view has the objects of the cluster that coild reads besides blocks: its own Node, the Namespaces, the node's pods, and
// the Egresses with their policies. Each is a set of watches that the part which needs it adds to the program's. A program watches nothing else,
// and needs no right for it.
//
// It restricts informers on the server's side to what the node needs. It must not know what they are used for.
package view

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/reconcile"
)

var (
	namespaces = corev1.SchemeGroupVersion.WithResource("namespaces")
	pods       = corev1.SchemeGroupVersion.WithResource("pods")
)

// Namespaces are those of the cluster. Its methods may be called concurrently, but for OnChange and OnUnguarded.
type Namespaces struct {
	clients kube.Clients
	cached  kube.Cache[metav1.PartialObjectMetadata]
	current func() bool // the cache follows the API server
	changed []func(name string)
}

// WatchNamespaces returns the Namespaces.
func WatchNamespaces(w *kube.Watches, clients kube.Clients) *Namespaces {
	i := metadata(clients, namespaces, "")
	n := &Namespaces{clients: clients, cached: kube.CacheOf[metav1.PartialObjectMetadata](i), current: i.Current}
	w.Add(i, reconcile.Handler(func(ns *metav1.PartialObjectMetadata) {
		for _, changed := range n.changed {
			changed(ns.Name)
		}
	}))
	return n
}

// OnChange lets changed be called with the name of each Namespace that changes; it must not block. It is for the time
// before the watches start, and so is OnUnguarded.
func (n *Namespaces) OnChange(changed func(name string)) { n.changed = append(n.changed, changed) }

// OnUnguarded lets told be called when another set of namespaces has pods that may send from any address; it must not
// block.
func (n *Namespaces) OnUnguarded(told func()) {
	unguarded := map[string]bool{}
	n.OnChange(func(name string) {
		if now := n.Unguarded(name); now != unguarded[name] {
			unguarded[name] = true
			if !now {
				delete(unguarded, name)
			}
			told()
		}
	})
}

// metadata returns an informer of the metadata of a resource.
func metadata(clients kube.Clients, r schema.GroupVersionResource, fieldSelector string) *kube.Informer {
	return kube.MetadataInformer(clients.Metadata, r, fieldSelector).Transformed(trim)
}

// trim leaves of an object the annotations that Coil reads. The others may be large, and there
// are as many Namespaces in a cache as the cluster has.
func trim(obj any) (any, error) {
	if o, ok := obj.(*metav1.PartialObjectMetadata); ok {
		maps.DeleteFunc(o.Annotations, func(key, _ string) bool {
			return key != v2.AnnotationPool && key != v2.AnnotationSourceGuard && key != corev1.MirrorPodAnnotationKey && !strings.HasPrefix(key, v2.AnnotationEgressPrefix)
		})
	}
	return kube.Strip(obj)
}

// liveTimeout bounds a read from the API server of an object that a cache doesn't have.
const liveTimeout = 5 * time.Second

// orLive returns an object of a cache. With live, an object that the cache doesn't have is read from the API
// server. One that isn't there is an error of apierrors.
func orLive[T any](ctx context.Context, cached *T, live bool, kind, name string, read func(context.Context) (*T, error)) (*T, error) {
	if cached != nil {
		return cached, nil
	}
	err := error(apierrors.NewNotFound(schema.GroupResource{Resource: kind}, name))
	if live {
		ctx, cancel := context.WithTimeout(ctx, liveTimeout)
		defer cancel()
		cached, err = read(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s %s: %w", kind, name, err)
	}
	return cached, nil
}

// staleTimeout bounds a read of an object that a cache has, maybe of an earlier time: without the API
// server, pods start with the cached one.
const staleTimeout = time.Second

// Get returns a Namespace. With live, one that the cache doesn't have is read from the API server.
func (n *Namespaces) Get(ctx context.Context, name string, live bool) (*metav1.PartialObjectMetadata, error) {
	return orLive(ctx, n.cached.Find(name), live, "Namespace", name, func(ctx context.Context) (*metav1.PartialObjectMetadata, error) {
		return n.clients.Metadata.Resource(namespaces).Get(ctx, name, metav1.GetOptions{})
	})
}

// currentNamespace returns a Namespace as it is now, as far as the API server can be asked. While the
// watch is open that is the cached one, and the API server isn't asked.
func (n *Namespaces) currentNamespace(ctx context.Context, name string) (*metav1.PartialObjectMetadata, error) {
	cached := n.cached.Find(name)
	if cached == nil || n.current() {
		return n.Get(ctx, name, true)
	}
	ctx, cancel := context.WithTimeout(ctx, staleTimeout)
	defer cancel()
	live, err := n.clients.Metadata.Resource(namespaces).Get(ctx, name, metav1.GetOptions{})
	switch {
	case err == nil:
		return live, nil
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("read Namespace %s: %w", name, err)
	}
	return cached, nil
}

// PoolOf returns the name of the pool of a namespace. A namespace that is too new
// for the cache, or may have changed since, is read from the API server.
func (n *Namespaces) PoolOf(ctx context.Context, namespace string) (string, error) {
	ns, err := n.currentNamespace(ctx, namespace)
	if err != nil {
		return "", err
	}
	return plan.PoolOf(namespace, ns.Annotations)
}

// Unguarded says whether the pods of a namespace may send from any address, as far as the cache
// knows the namespace.
func (n *Namespaces) Unguarded(namespace string) bool {
	ns := n.cached.Find(namespace)
	return ns != nil && ns.Annotations[v2.AnnotationSourceGuard] == v2.SourceGuardOff
}

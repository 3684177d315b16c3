// Package view is what coild knows of the cluster besides blocks: its own Node,
// the pools of namespaces, the node's pods, and the Egresses.
//
// It owns the informers for these, restricted on the server's side to what the
// node needs. It must not know what they are used for.
package view

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/metadata/metadatalister"
	"k8s.io/client-go/tools/cache"

	listers "github.com/coil-net/coil/generated/listers/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/reconcile"
)

var (
	namespaces = corev1.SchemeGroupVersion.WithResource("namespaces")
	pods       = corev1.SchemeGroupVersion.WithResource("pods")
)

// View implements the package's task. Its methods may be called concurrently.
type View struct {
	nodeName string
	clients  kube.Clients

	informers  []*kube.Informer
	synced     []cache.DoneChecker
	nodes      corelisters.NodeLister
	namespaces metadatalister.Lister
	current    func() bool // the cache of Namespaces follows the API server
	pods       metadatalister.Lister
	egresses   listers.EgressLister
	services   corelisters.ServiceLister
	endpoints  discoverylisters.EndpointSliceLister
	routers    routers

	// addrs is written by the handler of Node events only: who writes later than that might have
	// read earlier.
	addrs atomic.Pointer[ipam.Address]
}

// Config says what a view shows.
type Config struct {
	NodeName string
	// Pools needs Namespaces. What isn't needed isn't watched, and needs no right.
	Pools bool
	// OnNode is called at each change of the node's own Node; it must not block.
	OnNode func()
	// OnUnguarded is called when another set of namespaces has pods that may send from any
	// address; it must not block.
	OnUnguarded func()
	// Egresses is nil if nothing about Egresses is needed.
	Egresses *EgressHandlers
}

// New returns a view of the cluster from a node.
func New(cfg Config, clients kube.Clients) (*View, error) {
	nodeName := cfg.NodeName
	v := &View{nodeName: nodeName, clients: clients}

	node, err := kube.NodeInformer(clients.Core, fields.OneTermEqualSelector(metav1.ObjectNameField, nodeName).String())
	if err != nil {
		return nil, err
	}
	v.nodes = corelisters.NewNodeLister(node.GetIndexer())
	err = v.add(node, reconcile.Handler(func(*corev1.Node) {
		v.nodeChanged()
		cfg.OnNode()
	}))
	if err != nil {
		return nil, err
	}
	if cfg.Pools || cfg.Egresses != nil {
		var i *kube.Informer
		if v.namespaces, i, err = v.watch(namespaces, "", v.namespaceChanged(cfg)); err != nil {
			return nil, err
		}
		v.current = i.Current
	}
	if cfg.Egresses != nil {
		err = v.watchEgresses(*cfg.Egresses)
	}
	return v, err
}

// namespaceChanged is the handler of Namespace events.
func (v *View) namespaceChanged(cfg Config) func(*metav1.PartialObjectMetadata) {
	unguarded := map[string]bool{}
	return func(n *metav1.PartialObjectMetadata) {
		if now := v.Unguarded(n.Name); cfg.Pools && now != unguarded[n.Name] {
			unguarded[n.Name] = true
			if !now {
				delete(unguarded, n.Name)
			}
			cfg.OnUnguarded()
		}
		if cfg.Egresses != nil {
			cfg.Egresses.Namespace(n.Name)
		}
	}
}

// watch adds an informer of the metadata of a resource; changed may be nil.
func (v *View) watch(r schema.GroupVersionResource, fieldSelector string, changed func(*metav1.PartialObjectMetadata)) (metadatalister.Lister, *kube.Informer, error) {
	i, err := kube.MetadataInformer(v.clients.Metadata, r, fieldSelector)
	if err != nil {
		return nil, nil, err
	}
	if err := i.SetTransform(trim); err != nil {
		return nil, nil, err
	}
	if changed == nil {
		changed = func(*metav1.PartialObjectMetadata) {}
	}
	return metadatalister.New(i.GetIndexer(), r), i, v.add(i, reconcile.Handler(changed))
}

// trim leaves of an object's annotations those that Coil reads. The others may be large, and there
// are as many Namespaces in a cache as the cluster has.
func trim(obj any) (any, error) {
	if o, ok := obj.(*metav1.PartialObjectMetadata); ok {
		maps.DeleteFunc(o.Annotations, func(key, _ string) bool {
			return key != v2.AnnotationPool && key != v2.AnnotationSourceGuard && key != corev1.MirrorPodAnnotationKey && !strings.HasPrefix(key, v2.AnnotationEgressPrefix)
		})
	}
	return kube.Strip(obj)
}

// add keeps an informer, whose events go to a handler.
func (v *View) add(i *kube.Informer, h cache.ResourceEventHandler) error {
	reg, err := i.AddEventHandler(h)
	if err != nil {
		return err
	}
	v.informers = append(v.informers, i)
	v.synced = append(v.synced, reg.HasSyncedChecker())
	return nil
}

// Start starts the informers, which work until ctx ends.
func (v *View) Start(ctx context.Context) {
	for _, i := range v.informers {
		i.Start(ctx.Done())
	}
}

// Shutdown waits until the informers have ended.
func (v *View) Shutdown() {
	for _, i := range v.informers {
		i.Shutdown()
	}
}

// Synced are the functions that say whether the caches are filled.
func (v *View) Synced() []cache.DoneChecker { return v.synced }

// Node returns the node's own Node, as the cache has it.
func (v *View) Node() (*corev1.Node, error) { return v.nodes.Get(v.nodeName) }

// LiveNode reads the node's own Node from the API server.
func (v *View) LiveNode(ctx context.Context) (*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	var n corev1.Node
	if err := v.clients.Core.Get().Resource("nodes").Name(v.nodeName).Do(ctx).Into(&n); err != nil {
		return nil, fmt.Errorf("read Node %s (COIL_NODE_NAME): %w", v.nodeName, err)
	}
	return &n, nil
}

// NodeAddrs returns the InternalIPs of the node's own Node, as far as known.
func (v *View) NodeAddrs() ipam.Address {
	if a := v.addrs.Load(); a != nil {
		return *a
	}
	return v.cachedAddrs()
}

// nodeChanged is the handler of Node events.
func (v *View) nodeChanged() {
	a := v.cachedAddrs()
	v.addrs.Store(&a)
}

func (v *View) cachedAddrs() ipam.Address {
	n, err := v.Node()
	if err != nil {
		return ipam.Address{}
	}
	return routes.InternalIPs(n)
}

// liveTimeout bounds a read from the API server for what a cache doesn't have.
const liveTimeout = 5 * time.Second

// staleTimeout bounds a read of what a cache has that may be of an earlier time: without the API
// server, pods start with what the cache says.
const staleTimeout = time.Second

// currentNamespace returns a Namespace as it is now, as far as the API server can be asked. While the
// watch is open that is what the cache has, and the API server isn't asked.
func (v *View) currentNamespace(ctx context.Context, name string) (*metav1.PartialObjectMetadata, error) {
	cached, err := v.namespaces.Get(name)
	if err != nil || v.current() {
		return v.Namespace(ctx, name, true)
	}
	ctx, cancel := context.WithTimeout(ctx, staleTimeout)
	defer cancel()
	live, err := v.clients.Metadata.Resource(namespaces).Get(ctx, name, metav1.GetOptions{})
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
func (v *View) PoolOf(ctx context.Context, namespace string) (string, error) {
	ns, err := v.currentNamespace(ctx, namespace)
	if err != nil {
		return "", err
	}
	pool := ns.Annotations[v2.AnnotationPool]
	if pool == "" {
		return v2.DefaultPool, nil
	}
	// The text is a user's, of up to 256 KiB: none of it is repeated.
	if len(pool) > validation.LabelValueMaxLength || len(validation.IsDNS1123Subdomain(pool)) > 0 {
		return "", fmt.Errorf("annotation %s of Namespace %s can't be the name of an AddressPool: that has at most %d lower case letters, digits, '-' and '.'",
			v2.AnnotationPool, namespace, validation.LabelValueMaxLength)
	}
	return pool, nil
}

// Unguarded says whether the pods of a namespace may send from any address, as far as the cache
// knows the namespace.
func (v *View) Unguarded(namespace string) bool {
	ns, err := v.namespaces.Get(namespace)
	return err == nil && ns.Annotations[v2.AnnotationSourceGuard] == v2.SourceGuardOff
}

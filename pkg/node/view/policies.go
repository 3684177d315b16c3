package view

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
)

// A watch tells of a change soon, but nothing tells when it has told of all: what is older than a pod's binding to the node may be missing in
// a cache when the pod is added. What is younger comes by the watch. So a cache is compared with the pod by their resource versions. If it is behind, the API server is
// asked. What that answers, and the cache doesn't have yet, counts until the cache has come so far: else the pod would be
// changed back by the cache a moment later.
//
// A cache without changes is behind nearly always: API servers tell how far it is once a minute. An answer may take as long as 100 ms,
// which is the pause between two of the API server's own questions of etcd (consistent reads from its cache). So it is asked for
// when the pod is seen on the node, before kubelet has made the pod's sandbox.

// policies are those of the cluster.
type policies struct {
	own     kind[v2.EgressPolicy, *v2.EgressPolicy]
	cluster kind[v2.EgressClusterPolicy, *v2.EgressClusterPolicy]
	// namespaces are those that were read from the API server.
	namespaces ahead[*metav1.PartialObjectMetadata]
	pods       newPods
}

// kind are policies of one kind.
type kind[T any, P interface {
	*T
	metav1.Object
}] struct {
	cached kube.Cache[T]
	of     func(*T) (policy.Policy, error)
	// list lists those of a namespace. asking has the lists that are asked for.
	list   func(ctx context.Context, namespace string) (items []T, version string, err error)
	asking singleflight.Group
	// ahead are those that lists had and the cache doesn't have.
	ahead ahead[P]
	// undefined says that there was no definition when a list was asked for last.
	undefined atomic.Bool

	mu sync.Mutex
	// parsed are those that were understood, by name: each pod of the node asks for them again and again.
	parsed map[string]*parsed[T]
}

// parsed is what an object says.
type parsed[T any] struct {
	object *T
	policy policy.Policy
	err    error
}

// watchPolicies adds the watches of policies. changed is called with each namespace of the node's pods that a change may concern.
func (e *Egresses) watchPolicies(w *kube.Watches, changed func(namespace string)) {
	client, own, cluster := e.clients.Coil, &e.policies.own, &e.policies.cluster
	own.of, cluster.of = policy.Of, policy.OfCluster
	own.list = func(ctx context.Context, namespace string) ([]v2.EgressPolicy, string, error) {
		l, err := client.EgressPolicies(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, "", fmt.Errorf("list the EgressPolicies of namespace %s: %w", namespace, err)
		}
		return l.Items, l.ResourceVersion, nil
	}
	cluster.list = func(ctx context.Context, _ string) ([]v2.EgressClusterPolicy, string, error) {
		l, err := client.EgressClusterPolicies().List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, "", fmt.Errorf("list EgressClusterPolicies: %w", err)
		}
		return l.Items, l.ResourceVersion, nil
	}
	concerned := func(p policy.Policy) { e.concerned(p, changed) }
	own.watch(w, kube.EgressPolicyInformer(client), concerned)
	cluster.watch(w, kube.EgressClusterPolicyInformer(client), concerned)
	e.namespaces.OnChange(func(namespace string) {
		if len(cluster.cached.ListKeys()) > 0 {
			changed(namespace)
		}
	})
}

// concerned calls changed with the namespaces of the node's pods that a policy concerns.
func (e *Egresses) concerned(p policy.Policy, changed func(namespace string)) {
	for _, namespace := range e.pods.ListIndexFuncValues(cache.NamespaceIndex) {
		if ns := e.namespaces.cached.Find(namespace); ns == nil || p.Concerns(namespace, ns.Labels) {
			changed(namespace)
		}
	}
}

// watch adds the watch of a kind.
func (k *kind[T, P]) watch(w *kube.Watches, i *kube.Informer, concerned func(policy.Policy)) {
	i = i.Transformed(trimPolicy)
	k.cached = kube.CacheOf[T](i)
	w.Add(i, k.handler(concerned))
}

// handler returns an event handler that calls concerned with each policy that has changed, as it was and as it is.
func (k *kind[T, P]) handler(concerned func(policy.Policy)) cache.ResourceEventHandler {
	return reconcile.Changes(func(before, after *T) {
		if before != nil && after != nil && samePolicy(P(before), P(after)) {
			return
		}
		for _, o := range []*T{before, after} {
			if o == nil {
				continue
			}
			if p, err := k.of(o); err == nil {
				concerned(p)
			}
		}
		if after == nil {
			k.forget(nameOf(P(before)))
		}
	})
}

// samePolicy says whether two states of a policy are one to pods: of its status only what is resolved is cached.
func samePolicy(a, b metav1.Object) bool {
	same := func(a, b v2.EgressPolicyStatus) bool { return reflect.DeepEqual(a.Resolved, b.Resolved) }
	if a.GetUID() != b.GetUID() || a.GetGeneration() != b.GetGeneration() {
		return false
	}
	return same(*statusOf(a), *statusOf(b))
}

// statusOf returns the status of a policy.
func statusOf(o any) *v2.EgressPolicyStatus {
	switch p := o.(type) {
	case *v2.EgressPolicy:
		return &p.Status
	case *v2.EgressClusterPolicy:
		return &p.Status
	}
	return &v2.EgressPolicyStatus{}
}

// trimPolicy leaves of a policy what package policy reads.
func trimPolicy(obj any) (any, error) {
	if o, ok := obj.(metav1.Object); ok {
		o.SetAnnotations(nil)
		o.SetLabels(nil)
		status := statusOf(obj)
		*status = v2.EgressPolicyStatus{Resolved: status.Resolved}
	}
	return kube.Strip(obj)
}

// Policies returns the policies that may select a pod, and the labels of its namespace if one asks for labels. They are as the caches
// have them or, with live, at least as new as the pod when it was bound to the node.
func (e *Egresses) Policies(ctx context.Context, pod *metav1.PartialObjectMetadata, live bool) ([]policy.Policy, map[string]string, error) {
	if live {
		return e.policiesAsOf(ctx, pod.Namespace, e.policies.pods.since(pod))
	}
	return e.policiesAsOf(ctx, pod.Namespace, "")
}

// policiesAsOf returns the policies that may select pods of a namespace, and its labels: as the caches have them, or at least as new as a
// resource version.
func (e *Egresses) policiesAsOf(ctx context.Context, namespace, asOf string) ([]policy.Policy, map[string]string, error) {
	var own, cluster []policy.Policy
	if asOf == "" || e.policies.own.has(namespace, asOf) && e.policies.cluster.has(metav1.NamespaceAll, asOf) {
		own, cluster = e.policies.own.in(namespace), e.policies.cluster.in(metav1.NamespaceAll)
	} else {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() (err error) {
			own, err = e.policies.own.current(ctx, namespace, asOf)
			return err
		})
		group.Go(func() (err error) {
			cluster, err = e.policies.cluster.current(ctx, metav1.NamespaceAll, asOf)
			return err
		})
		if err := group.Wait(); err != nil {
			return nil, nil, err
		}
	}
	if len(cluster) == 0 {
		return own, nil, nil
	}
	ns, err := e.namespaceAsOf(ctx, namespace, asOf)
	if err != nil {
		return nil, nil, err
	}
	return append(own, cluster...), ns.Labels, nil
}

// namespaceAsOf returns a Namespace; see Policies.
func (e *Egresses) namespaceAsOf(ctx context.Context, name, asOf string) (*metav1.PartialObjectMetadata, error) {
	cached, ahead := e.namespaces.cached.Version, &e.policies.namespaces
	if asOf == "" || reaches(ahead.upTo(cached, name), asOf) {
		if known, _ := ahead.beyond(cached, name); known[name] != nil {
			return known[name], nil
		}
		return e.namespaces.Get(ctx, name, asOf != "")
	}
	read, err := e.clients.Metadata.Resource(namespaces).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read Namespace %s: %w", name, err)
	}
	ahead.note(cached, name, kube.ParseVersion(asOf), read)
	return read, nil
}

// reaches says whether a cache of a version has what was there at another one.
func reaches(have uint64, asOf string) bool {
	v := kube.ParseVersion(asOf)
	return v != 0 && have >= v
}

// in returns the policies of a namespace as far as they are known.
func (k *kind[T, P]) in(namespace string) []policy.Policy {
	ahead, gone := k.ahead.beyond(k.cached.Version, namespace) // what it leaves out, the cache has by now
	cached := k.cached.In(namespace)
	if len(cached)+len(ahead) == 0 {
		return nil
	}
	all := make([]policy.Policy, 0, len(cached)+len(ahead))
	for _, o := range cached {
		if (len(ahead) == 0 || ahead[nameOf(P(o))] == nil) && !gone(o) {
			all = k.add(all, o)
		}
	}
	for _, o := range ahead {
		if o.GetNamespace() == namespace {
			all = k.add(all, o)
		}
	}
	return all
}

// add adds a policy. One that can't be understood selects nothing; its conditions say so.
func (k *kind[T, P]) add(all []policy.Policy, o *T) []policy.Policy {
	k.mu.Lock()
	defer k.mu.Unlock()
	name := nameOf(P(o))
	last := k.parsed[name]
	if last == nil || last.object != o {
		last = &parsed[T]{object: o}
		last.policy, last.err = k.of(o)
		if k.parsed == nil {
			k.parsed = map[string]*parsed[T]{}
		}
		k.parsed[name] = last
	}
	if last.err != nil {
		return all
	}
	return append(all, last.policy)
}

// forget forgets what a policy said.
func (k *kind[T, P]) forget(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.parsed, name)
}

// has says whether the policies of a namespace are known as they were at a resource version, or later.
func (k *kind[T, P]) has(namespace, asOf string) bool {
	return reaches(k.ahead.upTo(k.cached.Version, namespace), asOf)
}

// currentTimeout bounds a list that pods wait for.
const currentTimeout = 2 * time.Second

// current returns the policies of a namespace as they were at a resource version, or later. Callers share a list if it can serve
// them.
func (k *kind[T, P]) current(ctx context.Context, namespace, asOf string) ([]policy.Policy, error) {
	if k.has(namespace, asOf) {
		return k.in(namespace), nil
	}
	for first := true; ; first = false {
		items, version, err := k.ask(ctx, namespace)
		switch {
		case apierrors.IsNotFound(err):
			k.undefined.Store(true)
			k.ahead.note(k.cached.Version, namespace, kube.ParseVersion(asOf))
			return nil, nil
		case err != nil && k.undefined.Load() && k.cached.Version() == 0:
			return nil, nil // pods start as they did before there were policies
		case err != nil:
			return nil, err
		case first && !reaches(kube.ParseVersion(version), asOf):
			continue // it was asked for before, by another caller
		}
		k.undefined.Store(false)
		var objects []P
		var all []policy.Policy
		for i := range items {
			objects = append(objects, &items[i])
			all = k.add(all, &items[i])
		}
		k.ahead.note(k.cached.Version, namespace, max(kube.ParseVersion(version), kube.ParseVersion(asOf)), objects...)
		return all, nil
	}
}

// answer is a list.
type answer[T any] struct {
	items   []T
	version string
}

// ask lists the policies of a namespace, once for all that ask meanwhile. What it returns must not be changed.
func (k *kind[T, P]) ask(ctx context.Context, namespace string) ([]T, string, error) {
	answers := k.asking.DoChan(namespace, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), currentTimeout)
		defer cancel()
		items, version, err := k.list(ctx, namespace)
		return answer[T]{items, version}, err
	})
	select {
	case r := <-answers:
		a, _ := r.Val.(answer[T])
		return a.items, a.version, r.Err
	case <-ctx.Done():
		return nil, "", errors.Join(errUnanswered, ctx.Err())
	}
}

// errUnanswered: the API server hasn't answered in time.
var errUnanswered = errors.New("the API server hasn't answered which policies there are")

package loadbalancer

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/networkpolicy"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// policySettle is for how long changes are collected before pods of a Service are looked at, and podsAgain when they are at the latest: nobody tells of labels that
	// change. endpointsSettle is for how long endpoints may come and go.
	policySettle    = time.Second
	endpointsSettle = 5 * time.Second
	podsAgain       = 5 * time.Minute
	// podsPage is of how many pods the labels are read at a time.
	podsPage = 500
	// mostNamed is of how many objects a message has the names.
	mostNamed = 3
)

// policies says of Services at gateways that translate sources whether pods of theirs have NetworkPolicies that choose by source. These see the gateway then, not its clients.
//
//	the gateways of the pool                     NetworkPolicies of the namespace            the Service
//	keep sources, or the address is on nodes     any                                         has no condition
//	one masquerades                              let every source reach the Service          has no condition
//	one masquerades                              don't, and none of its pods has them        has no condition
//	one masquerades                              don't, and pods have them                   says that they aren't honoured
//
// The labels of pods are read only in the last two cases: no cache has them.
type policies struct {
	all    kube.Cache[networkingv1.NetworkPolicy]
	looks  *reconcile.Loop[types.NamespacedName]
	synced []cache.DoneChecker

	mu    sync.Mutex // guards known
	known map[types.NamespacedName]honored
}

// honored is what was found of a Service.
type honored struct {
	uid       types.UID
	pool      string
	condition metav1.Condition // without a status if there is nothing to say
}

// followPolicies registers handlers, which only add keys. Services are served also as long as NetworkPolicies can't be read.
func (c *Controller) followPolicies() (err error) {
	informer := c.cfg.Cluster.Networking().V1().NetworkPolicies().Informer()
	c.policies.all = kube.CacheOf[networkingv1.NetworkPolicy](informer)
	c.policies.known = map[types.NamespacedName]honored{}
	c.policies.looks = reconcile.New("service-policies", c.lookAtPolicies, c.cfg.LoopMetrics)
	c.policies.synced, err = reconcile.Register(
		reconcile.On(informer, reconcile.ChangeHandler(c.policyChanged, func(a, b *networkingv1.NetworkPolicy) bool { return reflect.DeepEqual(a.Spec, b.Spec) })),
		reconcile.On(c.cfg.Gateways.Informer(), reconcile.Changes(c.masqueradeChanged)),
		reconcile.On(c.cfg.Cluster.Core().V1().Services().Informer(), reconcile.Changes(c.portsChanged)),
		reconcile.On(c.cfg.Cluster.Discovery().V1().EndpointSlices().Informer(), reconcile.Handler(c.endpointsChanged)),
	)
	return err
}

func (c *Controller) policyChanged(p *networkingv1.NetworkPolicy) {
	c.lookAgain(policySettle, func(key types.NamespacedName) bool { return key.Namespace == p.Namespace })
}

func (c *Controller) masqueradeChanged(before, after *v2.LoadBalancerGateway) {
	if before == nil || after == nil || !slices.Equal(before.Spec.Pools, after.Spec.Pools) || masquerades(before) != masquerades(after) {
		c.lookAgain(policySettle, func(types.NamespacedName) bool { return true })
	}
}

func (c *Controller) portsChanged(before, after *corev1.Service) {
	switch {
	case after == nil:
		c.policies.forget(keyOf(before))
	case before != nil && !reflect.DeepEqual(before.Spec, after.Spec):
		c.lookAgain(policySettle, func(key types.NamespacedName) bool { return key == keyOf(after) })
	}
}

// endpointsChanged looks for pods that have come.
func (c *Controller) endpointsChanged(s *discoveryv1.EndpointSlice) {
	for _, name := range serviceOf(s) {
		c.lookAgain(endpointsSettle, func(key types.NamespacedName) bool { return key.String() == name })
	}
}

// lookAgain looks again at Services at gateways.
func (c *Controller) lookAgain(after time.Duration, which func(types.NamespacedName) bool) {
	c.policies.mu.Lock()
	defer c.policies.mu.Unlock()
	for key := range c.policies.known {
		if which(key) {
			c.policies.looks.AddAfter(key, after)
		}
	}
}

// masquerades says whether a gateway puts its own address in the place of clients'.
func masquerades(g *v2.LoadBalancerGateway) bool { return g.Spec.Masquerade != v2.MasqueradeNever }

// honors is what a Service says of NetworkPolicies; nil if that isn't known yet. Its step comes when it is.
func (c *Controller) honors(s *corev1.Service) *metav1.Condition {
	pool, known := c.gatewayPool(s)
	switch {
	case !known:
		return nil
	case pool == "":
		c.policies.forget(keyOf(s))
		return &metav1.Condition{}
	}
	c.policies.mu.Lock()
	is, ok := c.policies.known[keyOf(s)]
	c.policies.mu.Unlock()
	if !ok || is.uid != s.UID || is.pool != pool {
		c.policies.looks.Add(keyOf(s))
	}
	if !ok || is.uid != s.UID {
		return nil
	}
	return &is.condition
}

func (p *policies) forget(key types.NamespacedName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.known, key)
}

// gatewayPool is the pool of a Service's address if gateways have that, empty if they haven't, or if it has none.
func (c *Controller) gatewayPool(s *corev1.Service) (pool string, known bool) {
	c.mu.Lock()
	given, ok := c.given[s.UID]
	c.mu.Unlock()
	if given.Claim == "" {
		return "", ok
	}
	claim := c.claims.Find(c.cfg.Namespace + "/" + given.Claim)
	if claim == nil {
		return "", false
	}
	b := c.blockOf(claim)
	switch {
	case b == nil:
		return "", false
	case !loadbalancer.OfGateways(b):
		return "", true
	}
	return b.Labels[v2.LabelPool], true
}

// lookAtPolicies finds out what a Service is to say of NetworkPolicies.
func (c *Controller) lookAtPolicies(ctx context.Context, key types.NamespacedName) error {
	s := c.services.Find(key.String())
	if s == nil {
		c.policies.forget(key)
		return nil
	}
	pool, _ := c.gatewayPool(s)
	if pool == "" {
		c.policies.forget(key) // it is looked at when it has an address of gateways again
		return nil
	}
	is := honored{uid: s.UID, pool: pool}
	var gateways []string
	for _, g := range c.gateways.All() {
		if masquerades(g) && slices.Contains(g.Spec.Pools, pool) {
			gateways = append(gateways, g.Name)
		}
	}
	some := networkpolicy.Of(s, c.policies.all.In(s.Namespace))
	again := len(gateways) > 0 && len(some.Closing()) > 0 && len(s.Spec.Selector) > 0
	if again {
		names, err := c.closing(ctx, s, some)
		if err != nil {
			return err
		}
		if len(names) > 0 {
			is.condition = metav1.Condition{Type: loadbalancer.ConditionPolicies, Status: metav1.ConditionFalse, Reason: loadbalancer.ReasonMasquerade, Message: fmt.Sprintf(
				"Pods don't see the addresses of clients, by which they are let in or not by NetworkPolicies (%s): gateways with spec.masquerade: Always (%s) translate them. "+
					"Set spec.masquerade: Never there, or name the clients in spec.loadBalancerSourceRanges of the Service", few(names), few(gateways))}
		}
	}
	c.policies.mu.Lock()
	was, known := c.policies.known[key]
	c.policies.known[key] = is
	c.policies.mu.Unlock()
	if c.services.Find(key.String()) == nil {
		c.policies.forget(key) // it was deleted meanwhile
		return nil
	}
	if !known || was != is {
		c.steps.Add(key)
	}
	if again {
		return reconcile.Later(podsAgain)
	}
	return nil
}

// closing are the names of NetworkPolicies that don't let every source reach a Service at one of its pods. It reads labels of pods only up to the first one of each NetworkPolicy.
func (c *Controller) closing(ctx context.Context, s *corev1.Service, some networkpolicy.Policies) ([]string, error) {
	found := map[string]bool{}
	closing := some.Closing()
	for _, name := range slices.Sorted(maps.Keys(closing)) {
		if found[name] {
			continue
		}
		which, _ := closing[name].Requirements()
		err := eachPod(ctx, c.cfg.Metadata, s.Namespace, labels.SelectorFromSet(s.Spec.Selector).Add(which...), func(pod *metav1.PartialObjectMetadata) (done bool) {
			names := some.Close(pod.Labels)
			for _, n := range names {
				found[n] = true
			}
			return len(names) > 0
		})
		if err != nil {
			return nil, fmt.Errorf("read the labels of the pods of Service %s: %w", klog.KObj(s), err)
		}
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// eachPod calls a function with the metadata of pods until it says that this is enough.
func eachPod(ctx context.Context, client metadata.Interface, namespace string, which labels.Selector, enough func(*metav1.PartialObjectMetadata) bool) error {
	o := metav1.ListOptions{LabelSelector: which.String(), Limit: podsPage}
	for {
		page, err := client.Resource(corev1.SchemeGroupVersion.WithResource("pods")).Namespace(namespace).List(ctx, o)
		if err != nil {
			return err
		}
		for i := range page.Items {
			if enough(&page.Items[i]) {
				return nil
			}
		}
		if o.Continue = page.Continue; o.Continue == "" {
			return nil
		}
	}
}

// tellPolicies records an Event when a Service begins to say that NetworkPolicies aren't honoured.
func (c *Controller) tellPolicies(before, after *corev1.Service) {
	is := meta.FindStatusCondition(after.Status.Conditions, loadbalancer.ConditionPolicies)
	if is != nil && meta.FindStatusCondition(before.Status.Conditions, loadbalancer.ConditionPolicies) == nil {
		c.cfg.Recorder.Eventf(after, nil, corev1.EventTypeWarning, is.Reason, "ServeAddress", "%s", is.Message)
	}
}

// few has the names of the first of some objects.
func few(names []string) string {
	slices.Sort(names)
	if len(names) <= mostNamed {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:mostNamed], ", "), len(names)-mostNamed)
}

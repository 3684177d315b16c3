package egresspolicy

import (
	"cmp"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/reconcile"
)

// register adds handlers, which only add keys.
func (c *Controller) register() error {
	var err error
	c.synced, err = reconcile.Register(
		reconcile.On(c.cfg.Policies, reconcile.Changes(func(a, b *v2.EgressPolicy) { c.policyChanged(subjectOf(a, ofPolicy), subjectOf(b, ofPolicy)) })),
		reconcile.On(c.cfg.ClusterPolicies, reconcile.Changes(func(a, b *v2.EgressClusterPolicy) {
			c.policyChanged(subjectOf(a, ofClusterPolicy), subjectOf(b, ofClusterPolicy))
		})),
		reconcile.On(c.cfg.Egresses, reconcile.Changes(c.egressMayHaveChanged)),
		reconcile.On(c.cfg.Pods, reconcile.Changes(c.podChanged)),
		reconcile.On(c.cfg.Services, reconcile.ChangeHandler(c.serviceChanged, sameSelector)),
		reconcile.On(c.cfg.Namespaces, reconcile.Changes(c.namespaceChanged)),
		reconcile.On(c.cfg.Clients, reconcile.Changes(c.sliceChanged)),
	)
	return err
}

// egressMayHaveChanged looks at all that follows an Egress, or only at the status of its policies if they have their addresses elsewhere.
func (c *Controller) egressMayHaveChanged(a, b *v2.Egress) {
	switch {
	case a == nil || b == nil || a.UID != b.UID || !plan.SameEgress(a, b):
		c.egressChanged(cmp.Or(b, a))
	case !samePlaces(a, b):
		for _, s := range append(c.policies.using(keyOf(b).String()), c.policies.using(byDefault)...) {
			c.status.Add(s.Name)
		}
	}
}

// samePlaces says whether the addresses of an Egress are at the same nodes and routers in two states.
func samePlaces(a, b *v2.Egress) bool {
	return slices.Equal(a.Status.NodeAddresses, b.Status.NodeAddresses) && slices.EqualFunc(a.Status.Addresses, b.Status.Addresses, func(x, y v2.EgressAddressStatus) bool {
		return x.Node == y.Node && x.Router == y.Router
	})
}

func subjectOf[T any](o *T, parse func(*T) *subject) *subject {
	if o == nil {
		return nil
	}
	return parse(o)
}

func defaultEgress(e *v2.Egress) []string {
	if e.Spec.Default {
		return []string{isDefault}
	}
	return nil
}

func egressesOfPod(p *corev1.Pod) (keys []string) {
	for _, ref := range plan.EgressRefs(p.Annotations) {
		keys = append(keys, ref.String())
	}
	return keys
}

// ofNobody is the key of slices whose policy can't be told.
var ofNobody types.NamespacedName

// policyOf returns the policy by which a slice lists clients; false if it doesn't.
func policyOf(s *discoveryv1.EndpointSlice) (types.NamespacedName, bool) {
	if _, ok := s.Labels[v2.LabelPolicyEgress]; !ok {
		return ofNobody, false
	}
	origin, err := policy.ParseOrigin(s.Annotations[v2.AnnotationPolicy])
	if err != nil {
		return ofNobody, true
	}
	return origin.Policy(), true
}

func policyOfSlice(s *discoveryv1.EndpointSlice) []string {
	key, ok := policyOf(s)
	if !ok {
		return nil
	}
	return []string{key.String()}
}

// egressOfSlice returns the Egress whose clients a slice lists by their annotations.
func egressOfSlice(s *discoveryv1.EndpointSlice) []string {
	name, ok := s.Labels[v2.LabelEgress]
	if !ok {
		return nil
	}
	return []string{s.Namespace + "/" + name}
}

// policyChanged looks at a policy at once, unless no more than its status has changed, most likely here; then at its lists if they
// follow that. Of younger policies the conditions may name it.
func (c *Controller) policyChanged(a, b *subject) {
	s := cmp.Or(b, a)
	same := a != nil && b != nil && a.UID == b.UID
	if same && a.object.GetResourceVersion() == b.object.GetResourceVersion() {
		return
	}
	if same && a.object.GetGeneration() == b.object.GetGeneration() {
		c.status.AddAfter(s.Name, settle)
	} else {
		c.status.Add(s.Name)
	}
	if same && sameLists(a, b) {
		return
	}
	c.lists.Add(s.Name)
	for _, s := range []*subject{a, b} {
		if s != nil {
			c.youngerThan(s)
			c.assign.Add(s.Egress)
		}
	}
}

// youngerThan looks, soon, at the policies that may say Conflicting because of one.
func (c *Controller) youngerThan(s *subject) {
	for _, o := range c.policies.beside(s.Name.Namespace) {
		if o.Egress != s.Egress && policy.Compare(s.Policy, o.Policy) < 0 {
			c.status.AddAfter(o.Name, settle)
		}
	}
}

// sameLists says whether two states of a policy select the same pods for the same Egress and destinations.
func sameLists(a, b *subject) bool {
	return a.object.GetGeneration() == b.object.GetGeneration() && a.observed() == b.observed() &&
		policy.InForce(a.status) == policy.InForce(b.status) && reflect.DeepEqual(a.status.Resolved, b.status.Resolved)
}

// both looks at the status and the lists of policies.
func (c *Controller) both(all []*subject) {
	for _, s := range all {
		c.status.Add(s.Name)
		c.lists.Add(s.Name)
	}
}

// egressChanged looks at the policies that use an Egress, at those that would if it were, or weren't, a default, and soon at those
// that may conflict with its users.
func (c *Controller) egressChanged(e *v2.Egress) {
	key := keyOf(e).String()
	users := c.policies.using(key)
	c.both(users)
	c.both(c.policies.using(byDefault))
	c.assign.Add(keyOf(e))
	for _, s := range users {
		c.youngerThan(s)
	}
	namespaces := sets.New[string]()
	for _, p := range c.naming.Under(key) {
		namespaces.Insert(p.Namespace)
	}
	for ns := range namespaces {
		for _, s := range c.policies.beside(ns) {
			c.status.AddAfter(s.Name, settle)
		}
	}
	for _, p := range c.pods.In(e.Namespace) { // pods with the labels of its routers are routers as long as it is there
		if name, labelled := plan.RouterOf(p.Labels); labelled && name == e.Name {
			c.podChanged(nil, p)
		}
	}
}

// serviceChanged looks at the policies that name a Service.
func (c *Controller) serviceChanged(s *corev1.Service) {
	for _, p := range c.policies.selecting.Under(keyOf(s).String()) {
		c.status.Add(keyOf(p))
	}
}

func sameSelector(a, b *corev1.Service) bool {
	return maps.Equal(a.Spec.Selector, b.Spec.Selector) && a.Spec.Type == b.Spec.Type
}

// namespaceChanged looks at the policies of a namespace, and at those of the cluster.
func (c *Controller) namespaceChanged(a, b *metav1.PartialObjectMetadata) {
	if b == nil || a != nil && maps.Equal(a.Labels, b.Labels) && a.Annotations[v2.AnnotationEgress] == b.Annotations[v2.AnnotationEgress] {
		return
	}
	c.both(c.policies.beside(b.Name))
}

// podChanged looks at the clients of the policies that select a pod, or did, and soon at their status.
func (c *Controller) podChanged(a, b *corev1.Pod) {
	if a != nil && b != nil && samePod(a, b) {
		return
	}
	p := cmp.Or(b, a)
	policies := c.policies.beside(p.Namespace)
	if len(policies) == 0 {
		return
	}
	namespace := c.namespaceLabels(p.Namespace)
	for _, p := range []*corev1.Pod{a, b} {
		if p == nil {
			continue
		}
		pod := podOf(p, namespace)
		for _, s := range policies {
			if s.Selects(pod) {
				c.lists.Add(s.Name)
				c.status.AddAfter(s.Name, settle) // for conflicts and namespaces
			}
		}
	}
}

// samePod says whether two states of a pod are one to policies.
func samePod(a, b *corev1.Pod) bool {
	return a.ResourceVersion == b.ResourceVersion || a.UID == b.UID && egress.MayBeClient(a) == egress.MayBeClient(b) &&
		(a.DeletionTimestamp == nil) == (b.DeletionTimestamp == nil) && slices.Equal(a.Status.PodIPs, b.Status.PodIPs) &&
		maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations)
}

// podOf returns a pod as policies see it.
func podOf(p *corev1.Pod, namespace map[string]string) policy.Pod {
	pod := policy.Pod{Namespace: p.Namespace, NamespaceLabels: namespace, Labels: p.Labels}
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			pod.Addresses = append(pod.Addresses, a.Unmap())
		}
	}
	return pod
}

// sliceChanged looks at the lists of the policy that a slice is of, and of the one that it was of before somebody changed
// it, and soon at its count; or at those that wait for a slice of pods that name an Egress.
func (c *Controller) sliceChanged(a, b *discoveryv1.EndpointSlice) {
	if a != nil && b != nil && a.ResourceVersion == b.ResourceVersion {
		return
	}
	for _, s := range []*discoveryv1.EndpointSlice{a, b} {
		if s == nil {
			continue
		}
		if key, ok := policyOf(s); ok {
			c.lists.Add(key)
			c.status.AddAfter(key, settle)
		}
		if name, ok := s.Labels[v2.LabelEgress]; ok {
			c.changed(chooser{egress: types.NamespacedName{Namespace: s.Namespace, Name: name}})
		}
	}
}

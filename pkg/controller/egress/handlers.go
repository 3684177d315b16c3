package egress

import (
	"cmp"
	"maps"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/reconcile"
)

// register adds handlers, which only add keys.
func (c *Controller) register() error {
	cluster, routers, accounts := c.cfg.Cluster, c.cfg.Routers, c.cfg.Accounts
	sources := []reconcile.Source{
		reconcile.On(c.cfg.Egresses.Informer(), reconcile.Changes(c.egressChanged)),
		reconcile.On(cluster.Core().V1().Pods().Informer(), reconcile.Changes(c.podChanged)),
		reconcile.On(c.cfg.Namespaces, reconcile.Changes(c.namespaceChanged)),
		// Heartbeats of Nodes don't matter.
		reconcile.On(cluster.Core().V1().Nodes().Informer(), reconcile.ChangeHandler(func(*corev1.Node) { c.nodeChanged() }, sameAddresses)),
		reconcile.On(cluster.Networking().V1().ServiceCIDRs().Informer(), reconcile.Handler(func(*networkingv1.ServiceCIDR) { c.clusterChanged() })),
		reconcile.On(routers.Apps().V1().Deployments().Informer(), reconcile.Handler(func(d *appsv1.Deployment) { c.objects.Add(keyOf(d)) })),
		reconcile.On(routers.Core().V1().Services().Informer(), reconcile.Handler(func(s *corev1.Service) { c.objects.Add(keyOf(s)) })),
		reconcile.On(routers.Policy().V1().PodDisruptionBudgets().Informer(), reconcile.Handler(func(b *policyv1.PodDisruptionBudget) { c.objects.Add(keyOf(b)) })),
		reconcile.On(accounts.Core().V1().ServiceAccounts().Informer(), reconcile.Handler(func(a *corev1.ServiceAccount) { c.addOne(a.Namespace) })),
		reconcile.On(accounts.Rbac().V1().RoleBindings().Informer(), reconcile.Changes(c.bindingChanged)),
		reconcile.On(accounts.Rbac().V1().ClusterRoleBindings().Informer(), reconcile.Handler(func(b *rbacv1.ClusterRoleBinding) { c.binding.Add(b.Name) })),
		reconcile.On(c.cfg.Clients.Discovery().V1().EndpointSlices().Informer(), reconcile.Changes(c.sliceChanged)),
	}
	if c.cfg.Pools != nil {
		sources = append(sources, reconcile.On(c.cfg.Pools.Informer(), reconcile.Handler(func(*v2.AddressPool) { c.clusterChanged() })))
	}
	sources = append(sources, c.addressSources(c.cfg.Floating)...)
	var err error
	c.synced, err = reconcile.Register(sources...)
	return err
}

func keyOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

func egressesOfPod(p *corev1.Pod) []string {
	var keys []string
	for _, ref := range plan.EgressRefs(p.Annotations) {
		keys = append(keys, ref.String())
	}
	return keys
}

func egressOfRouter(p *corev1.Pod) []string {
	egress, ok := plan.RouterOf(p.Labels)
	if !ok {
		return nil
	}
	return []string{types.NamespacedName{Namespace: p.Namespace, Name: egress}.String()}
}

// egressOfSlice returns the Egress that the clients of a slice name.
func egressOfSlice(s *discoveryv1.EndpointSlice) []string {
	if _, ok := s.Labels[v2.LabelEgress]; !ok {
		return nil
	}
	return []string{types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[v2.LabelEgress]}.String()}
}

// egressesOfSlice returns the Egress whose clients a slice has, by their annotations or by a policy. Somebody may have given it
// both labels.
func egressesOfSlice(s *discoveryv1.EndpointSlice) []string {
	keys := egressOfSlice(s)
	if name, ok := s.Labels[v2.LabelPolicyEgress]; ok {
		keys = append(keys, types.NamespacedName{Namespace: s.Namespace, Name: name}.String())
	}
	return keys
}

// isDefault is the key of Egresses with spec.default.
const isDefault = "default"

func defaultEgress(e *v2.Egress) []string {
	if e.Spec.Default {
		return []string{isDefault}
	}
	return nil
}

// egressChanged looks at an Egress at once, unless no more than its status has changed,
// most likely here.
func (c *Controller) egressChanged(a, b *v2.Egress) {
	if a != nil && b != nil && a.UID == b.UID && a.Generation == b.Generation && (a.DeletionTimestamp == nil) == (b.DeletionTimestamp == nil) {
		if a.ResourceVersion != b.ResourceVersion {
			c.objects.AddAfter(keyOf(b), settle)
		}
		if !plan.SameAddresses(a, b) {
			c.clients.Add(keyOf(b))
		}
		return
	}
	key := keyOf(cmp.Or(b, a))
	c.objects.Add(key)
	if a != nil && a.Spec.Default || b != nil && b.Spec.Default {
		for _, e := range c.defaults.Under(isDefault) { // whose conditions may name it
			c.objects.Add(keyOf(e))
		}
	}
	c.clients.Add(key)
	c.places.Add(key)
	c.pressure.Add(key)
	c.binding.Add(egress.RouterAccount)
	if b == nil {
		c.addOne(key.Namespace) // the account has an owner fewer
	}
}

// bindingChanged looks at all Egresses of the namespace if the binding gives rights that it didn't give, or the
// other way round: their conditions say so. After another change one Egress restores the binding.
func (c *Controller) bindingChanged(a, b *rbacv1.RoleBinding) {
	r := cmp.Or(b, a)
	c.binding.Add(egress.RouterAccount)
	if a != nil && b != nil && egress.BindsRouters(a) == egress.BindsRouters(b) && ownedByEgresses(a) == ownedByEgresses(b) {
		c.addOne(r.Namespace)
		return
	}
	for _, e := range c.living(r.Namespace) {
		c.objects.Add(keyOf(e))
	}
}

// addOne looks at one Egress of a namespace, which brings the account and the binding that all own in order.
func (c *Controller) addOne(namespace string) {
	if all := c.living(namespace); len(all) > 0 {
		c.objects.Add(keyOf(all[0]))
	}
}

// living returns the Egresses of a namespace that aren't being deleted.
func (c *Controller) living(namespace string) []*v2.Egress {
	return slices.DeleteFunc(c.egresses.In(namespace), func(e *v2.Egress) bool { return e.DeletionTimestamp != nil })
}

// podChanged looks at the clients of the Egresses that a pod names, or did, and soon at the
// status of the Egress whose router it is.
func (c *Controller) podChanged(a, b *corev1.Pod) {
	if a != nil && b != nil && a.ResourceVersion == b.ResourceVersion {
		return
	}
	same := a != nil && b != nil && sameClient(a, b)
	for _, p := range []*corev1.Pod{a, b} {
		if p == nil {
			continue
		}
		if egress, ok := plan.RouterOf(p.Labels); ok {
			key := types.NamespacedName{Namespace: p.Namespace, Name: egress}
			c.objects.AddAfter(key, settle)
			c.pressure.AddAfter(key, settle)
			c.places.Add(key)
		}
		if same {
			continue
		}
		for _, ref := range plan.EgressRefs(p.Annotations) {
			c.clients.Add(ref)
		}
	}
}

// sameClient says whether two states of a pod are one to egress.Clients.
func sameClient(a, b *corev1.Pod) bool {
	return a.UID == b.UID && a.Status.Phase == b.Status.Phase && (a.DeletionTimestamp == nil) == (b.DeletionTimestamp == nil) &&
		slices.Equal(a.Status.PodIPs, b.Status.PodIPs) && maps.Equal(a.Annotations, b.Annotations)
}

// sliceChanged looks at the clients of the Egress that a slice is of, and of the one that it was
// of before somebody changed its label.
func (c *Controller) sliceChanged(a, b *discoveryv1.EndpointSlice) {
	if a != nil && b != nil && a.ResourceVersion == b.ResourceVersion {
		return
	}
	for _, s := range []*discoveryv1.EndpointSlice{a, b} {
		if s == nil {
			continue
		}
		if name, ok := s.Labels[v2.LabelEgress]; ok {
			c.clients.Add(types.NamespacedName{Namespace: s.Namespace, Name: name})
		}
		for _, label := range []string{v2.LabelEgress, v2.LabelPolicyEgress} {
			if name, ok := s.Labels[label]; ok {
				c.objects.AddAfter(types.NamespacedName{Namespace: s.Namespace, Name: name}, settle)
			}
		}
	}
}

// namespaceChanged looks at the Egresses that pods of a namespace name.
func (c *Controller) namespaceChanged(a, b *metav1.PartialObjectMetadata) {
	if b == nil || a != nil && maps.Equal(a.Labels, b.Labels) {
		return
	}
	for _, p := range c.pods.In(b.Name) {
		for _, ref := range plan.EgressRefs(p.Annotations) {
			c.clients.Add(ref)
		}
	}
}

// sameAddresses says whether two states of a Node have the same addresses and ranges of pods.
func sameAddresses(a, b *corev1.Node) bool {
	return slices.Equal(a.Status.Addresses, b.Status.Addresses) && slices.Equal(a.Spec.PodCIDRs, b.Spec.PodCIDRs)
}

// nodeChanged looks at the places of all floating addresses, too: their blocks have the addresses of nodes.
func (c *Controller) nodeChanged() {
	c.clusterChanged()
	for _, e := range c.egresses.All() {
		if e.Spec.Addresses != nil {
			c.places.Add(keyOf(e))
		}
	}
}

// clusterChanged looks at the status of all Egresses, soon.
func (c *Controller) clusterChanged() {
	c.expireRanges()
	for _, e := range c.egresses.All() {
		c.objects.AddAfter(keyOf(e), settle)
	}
}

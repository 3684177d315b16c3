package egresspolicy

import (
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/policy"
)

// A pod that several policies select for one Egress leaves by the address of the policy that decides, and routers know no more policies than
// those whose lists have the pod. So a list doesn't get a pod before the lists have it of those that decide in its place. Until then
// routers drop what the pod sends. Its annotation counts as a policy.

// chooser is what lists clients of an Egress: a policy or, if that has no name, the annotations that name the Egress.
type chooser struct{ policy, egress types.NamespacedName }

func chooserOf(p policy.Policy) chooser {
	if p.Annotated() {
		return chooser{egress: p.Egress}
	}
	return chooser{policy: p.Name}
}

// turns has the policies whose lists wait for others.
type turns struct {
	mu      sync.Mutex
	waiting map[chooser]sets.Set[types.NamespacedName]
}

// wait says that a policy waits, and whether that is new.
func (t *turns) wait(key types.NamespacedName, of chooser) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting == nil {
		t.waiting = map[chooser]sets.Set[types.NamespacedName]{}
	}
	if t.waiting[of].Has(key) {
		return false
	}
	if t.waiting[of] == nil {
		t.waiting[of] = sets.Set[types.NamespacedName]{}
	}
	t.waiting[of].Insert(key)
	return true
}

// end returns the policies that have waited.
func (t *turns) end(of chooser) []types.NamespacedName {
	t.mu.Lock()
	defer t.mu.Unlock()
	keys := t.waiting[of].UnsortedList()
	delete(t.waiting, of)
	return keys
}

// changed looks again at the lists that wait for one that may have changed, or whose policy has.
func (c *Controller) changed(of chooser) {
	for _, key := range c.turns.end(of) {
		c.lists.Add(key)
	}
}

// inTurn returns those clients that the list of a policy may have. The pods are those of the clients.
func (c *Controller) inTurn(s *subject, e *v2.Egress, pods []*corev1.Pod, have []*discoveryv1.EndpointSlice, clients []egress.Client) []egress.Client {
	if !e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		return clients
	}
	mine, come := egress.PolicyListOf(e, s.Policy).Addresses(have), map[types.UID][]netip.Addr{}
	for _, cl := range clients {
		if !mine.Has(cl.Addr) {
			come[cl.UID] = append(come[cl.UID], cl.Addr)
		}
	}
	if len(come) == 0 {
		return clients
	}
	pods = slices.DeleteFunc(slices.Clone(pods), func(p *corev1.Pod) bool { return len(come[p.UID]) == 0 })
	for {
		// What the policy waits for may change before it is noted that it waits. So it is looked at afterwards, too.
		early, isNew := c.early(s, e, pods, come)
		if !isNew {
			return slices.DeleteFunc(clients, func(cl egress.Client) bool { return early.Has(cl.UID) && !mine.Has(cl.Addr) })
		}
	}
}

// early returns the pods that come before it is their turn, and whether it wasn't known yet what the policy waits for. come has their addresses.
func (c *Controller) early(s *subject, e *v2.Egress, pods []*corev1.Pod, come map[types.UID][]netip.Addr) (early sets.Set[types.UID], isNew bool) {
	early = sets.Set[types.UID]{}
	beside, before, listed := map[string][]*subject{}, map[string][]policy.Policy{}, map[chooser]sets.Set[netip.Addr]{}
	for _, pod := range pods {
		rivals, known := beside[pod.Namespace]
		if !known {
			rivals = slices.DeleteFunc(c.policies.beside(pod.Namespace), func(o *subject) bool {
				return o.Name == s.Name || o.Egress != s.Egress || o.observed() && !policy.InForce(o.status)
			})
			beside[pod.Namespace] = rivals
		}
		others, key := c.alsoSelecting(pod, e, rivals)
		first, known := before[key]
		if !known {
			first = policy.Before(s.Policy, others, c.egress)
			before[key] = first
		}
		for _, o := range first {
			of := chooserOf(o)
			if listed[of] == nil {
				listed[of] = c.listed(e, o)
			}
			if !listed[of].HasAll(come[pod.UID]...) {
				early.Insert(pod.UID)
				isNew = c.turns.wait(s.Name, of) || isNew
			}
		}
	}
	return early, isNew
}

// alsoSelecting returns which of some policies of an Egress select a pod, and a text that tells these from others.
func (c *Controller) alsoSelecting(pod *corev1.Pod, e *v2.Egress, among []*subject) (all []policy.Policy, key string) {
	var names []string
	if slices.Contains(egressesOfPod(pod), keyOf(e).String()) {
		all, names = append(all, policy.Annotation(keyOf(e))), append(names, "")
	}
	seen := podOf(pod, c.namespaceLabels(pod.Namespace))
	for _, o := range among {
		if o.Selects(seen) {
			all, names = append(all, o.Policy), append(names, o.Name.String())
		}
	}
	return all, strings.Join(names, "\n")
}

// listed returns the addresses of clients that a policy lists for an Egress.
func (c *Controller) listed(e *v2.Egress, p policy.Policy) sets.Set[netip.Addr] {
	if p.Annotated() {
		return egress.ListOf(e).Addresses(c.named.Under(keyOf(e).String()))
	}
	return egress.PolicyListOf(e, p).Addresses(c.slices.Under(p.Name.String()))
}

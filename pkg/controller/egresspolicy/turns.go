package egresspolicy

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/policy"
)

// A pod that several policies select for one Egress leaves by the address of the policy that decides, and routers know no more policies than
// those whose lists have the pod. So its lists change in an order in which, for each destination, one decides that does before or afterwards:
//
//	the pod comes to    when the policies that decide in place of this one list it, with their destinations and addresses of now. Until then
//	                    routers drop its packets
//	it leaves           when all lists have it that are to, and those are left for which this one decides; at the latest after keepFor
//
// The annotation of a pod counts as a policy, but its list waits for no other.

// keepFor is for how long a list keeps a pod that its policy doesn't select any more: another list may be one that can't be written.
const keepFor = 5 * time.Second

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

// inTurn returns the clients that the list of a policy may have now, from those that it should have and those that it has, and when to ask
// again; never, if that is 0.
func (c *Controller) inTurn(s *subject, e *v2.Egress, have []*discoveryv1.EndpointSlice, want []egress.Client) (now []egress.Client, again time.Duration) {
	if !e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		return want, 0
	}
	mine := egress.PolicyListOf(e, s.told()).Clients(have)
	var kept []egress.Client
	for isNew := true; isNew; {
		// What the policy waits for may change before it is noted that it waits. So it is looked at afterwards, too.
		t := &turn{
			Controller: c, of: s, e: e, mine: mine,
			rivals: map[string][]policy.Policy{}, first: map[string][]policy.Policy{}, listed: map[chooser]listed{},
		}
		now, kept = t.come(want), t.stay(want)
		isNew = t.isNew
	}
	if len(kept) == 0 {
		c.keeping.Delete(s.Name)
		return now, 0
	}
	since, known := c.keeping.Find(s.Name)
	if !known {
		since = c.now().Time
		c.keeping.Set(s.Name, since)
	}
	again = keepFor - c.now().Sub(since)
	if again <= 0 {
		return now, 0
	}
	return slices.Concat(now, kept), again
}

// turn is a look at the lists of an Egress, for that of a policy. It knows what it has seen.
type turn struct {
	*Controller
	of   *subject
	e    *v2.Egress
	mine map[netip.Addr]egress.Client
	// rivals are, by namespace, the other policies of the Egress that may select pods there, and first those, by the names of the policies that
	// select a pod, whose lists must have it before.
	rivals, first map[string][]policy.Policy
	listed        map[chooser]listed
	// isNew says that it wasn't known before what the policy waits for.
	isNew bool
}

// come returns the clients without those that come too early, with all addresses that the list doesn't have yet.
func (t *turn) come(want []egress.Client) []egress.Client {
	early := sets.Set[types.UID]{}
	comes := func(cl egress.Client) bool { _, listed := t.mine[cl.Addr]; return !listed }
	for _, cl := range want {
		if comes(cl) && t.isEarly(cl) {
			early.Insert(cl.UID)
		}
	}
	return slices.DeleteFunc(slices.Clone(want), func(cl egress.Client) bool { return comes(cl) && early.Has(cl.UID) })
}

// isEarly says whether a client comes before a list has it of a policy that decides.
func (t *turn) isEarly(cl egress.Client) bool {
	pod := t.pod(cl)
	if pod == nil {
		return false
	}
	var selecting []policy.Policy
	var names strings.Builder
	for _, o := range t.rivalsFor(pod) {
		if t.selects(o, pod) {
			selecting = append(selecting, o)
			names.WriteString(o.Name.String() + "\n")
		}
	}
	first, known := t.first[names.String()]
	if !known {
		first = policy.Before(t.of.Policy, selecting, t.egress)
		t.first[names.String()] = first
	}
	return t.await(first, func(o policy.Policy) bool { return !t.tells(o, cl.Addr) })
}

// stay returns the clients that the list has and should not have, but not yet lose.
func (t *turn) stay(want []egress.Client) (kept []egress.Client) {
	wanted := make(map[netip.Addr]bool, len(want))
	for _, cl := range want {
		wanted[cl.Addr] = true
	}
	for addr, cl := range t.mine {
		if wanted[addr] {
			continue
		}
		pod := t.pod(cl)
		if pod == nil || t.selects(t.of.Policy, pod) || !t.mayUse(pod, addr) {
			continue // it isn't lost to another policy
		}
		if t.await(t.rivalsFor(pod), func(o policy.Policy) bool {
			if t.selects(o, pod) {
				return !t.tells(o, addr)
			}
			return t.lists(o, addr) && len(policy.Before(o, []policy.Policy{t.of.Policy}, t.egress)) > 0
		}) {
			kept = append(kept, cl)
		}
	}
	return kept
}

// await says whether there are some among policies for which something is true. The policy of the turn waits for their lists.
func (t *turn) await(among []policy.Policy, pending func(policy.Policy) bool) (found bool) {
	for _, o := range among {
		if pending(o) {
			found = true
			t.isNew = t.turns.wait(t.of.Name, chooserOf(o)) || t.isNew
		}
	}
	return found
}

// seen is a pod, and the same as policies see it.
type seen struct {
	policy.Pod
	object *corev1.Pod
}

// pod returns the pod of a client, nil if it is gone.
func (c *Controller) pod(cl egress.Client) *seen {
	p := c.pods.Find(cl.Pod.String())
	if p == nil || p.UID != cl.UID {
		return nil
	}
	return &seen{podOf(p, c.namespaceLabels(p.Namespace)), p}
}

// lives says whether a pod still has an address.
func (p *seen) lives(addr netip.Addr) bool {
	return egress.MayBeClient(p.object) && slices.Contains(p.Addresses, addr)
}

// mayUse says whether a pod with an address may be a client of the Egress.
func (t *turn) mayUse(p *seen, addr netip.Addr) bool {
	allowed, _ := plan.AllowsNamespace(t.e, p.NamespaceLabels)
	return allowed && !t.isRouter(p.object) && p.lives(addr)
}

// rivalsFor returns the annotation and the other policies of the Egress that may select a pod.
func (t *turn) rivalsFor(pod *seen) []policy.Policy {
	rivals, known := t.rivals[pod.Namespace]
	if !known {
		rivals = append(rivals, policy.Annotation(keyOf(t.e)))
		for _, o := range t.policies.beside(pod.Namespace) {
			if o.Name != t.of.Name && o.Egress == t.of.Egress && (!o.observed() || policy.Decides(o.status, t.e)) {
				rivals = append(rivals, o.told())
			}
		}
		t.rivals[pod.Namespace] = rivals
	}
	return rivals
}

// selects says whether a policy, or the annotation, selects a pod.
func (t *turn) selects(p policy.Policy, pod *seen) bool {
	if p.Annotated() {
		return slices.Contains(egressesOfPod(pod.object), keyOf(t.e).String())
	}
	return p.Selects(pod.Pod)
}

// listed are the clients in the list of a policy: all, and those in slices with the policy's destinations and address of now.
type listed struct{ all, told map[netip.Addr]egress.Client }

// lists says whether the list of a policy has an address.
func (t *turn) lists(p policy.Policy, addr netip.Addr) bool {
	_, has := t.list(p).all[addr]
	return has
}

// tells says whether the list of a policy has an address in a slice with the policy's destinations and address of now.
func (t *turn) tells(p policy.Policy, addr netip.Addr) bool {
	_, has := t.list(p).told[addr]
	return has
}

// list returns the clients in the list of a policy.
func (t *turn) list(p policy.Policy) listed {
	of := chooserOf(p)
	if l, known := t.listed[of]; known {
		return l
	}
	var l listed
	if p.Annotated() {
		l.all = egress.ListOf(t.e).Clients(t.named.Under(keyOf(t.e).String()))
		l.told = l.all // its list says nothing that changes
	} else {
		list, have := egress.PolicyListOf(t.e, p), t.slices.Under(p.Name.String())
		l.all, l.told = list.Clients(have), list.Clients(list.Telling(have))
	}
	t.listed[of] = l
	return l
}

package selftest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/policy"
)

// mostWays is how many Egresses are tried that nobody has named.
const mostWays = 8

// Way is a way out of the cluster that is tried: by an Egress to destinations.
type Way struct {
	Egress *v2.Egress
	// To are the destinations, mostly one of each family.
	To []netip.AddrPort
	// Host is the node at whose addresses a pod of the selftest serves; empty if they are those that the admin has named.
	Host string
}

// Name is "namespace/name" of the Egress.
func (w Way) Name() string { return w.Egress.Namespace + "/" + w.Egress.Name }

// Annotations make a pod a client of the Egress.
func (w Way) Annotations() map[string]string {
	return map[string]string{v2.AnnotationEgressPrefix + w.Egress.Namespace: w.Egress.Name}
}

// Policy makes a pod of a namespace a client of the Egress.
func (w Way) Policy(namespace, pod string) *v2.EgressPolicy {
	return &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "selftest", Labels: Labels()}, Spec: v2.EgressPolicySpec{
		EgressUse: v2.EgressUse{Egress: &v2.EgressReference{Namespace: w.Egress.Namespace, Name: w.Egress.Name}},
		Pods:      &metav1.LabelSelector{MatchLabels: map[string]string{LabelPod: pod}},
	}}
}

// Outward is what decides which ways out are tried.
type Outward struct {
	Egresses []*v2.Egress
	// Names are those of the Egresses that were chosen, "namespace/name"; none are all.
	Names []string
	// Destinations are those that the admin has named.
	Destinations []netip.AddrPort
	// Nodes are those that are tested.
	Nodes []*corev1.Node
	Port  uint16
}

// Ways returns the ways that are tried, and a check for each other Egress.
func (o Outward) Ways() (ways []Way, left []Check) {
	for _, name := range o.Names {
		if !slices.ContainsFunc(o.Egresses, func(e *v2.Egress) bool { return e.Namespace+"/"+e.Name == name }) {
			left = append(left, Check{Check: CheckEgress, Subject: name, State: Wrong, Seen: "there is no such Egress", Do: "coilctl egresses"})
		}
	}
	all := slices.SortedFunc(slices.Values(o.Egresses), func(a, b *v2.Egress) int {
		return strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name)
	})
	more := 0
	for _, e := range all {
		w := Way{Egress: e}
		named := slices.Contains(o.Names, w.Name())
		if len(o.Names) > 0 && !named {
			continue
		}
		if !named && len(ways) == mostWays {
			more++
			continue
		}
		c := Check{Check: CheckEgress, Subject: w.Name(), State: Skipped}
		if c.Seen, c.Do = o.unfit(&w); c.Seen == "" {
			ways = append(ways, w)
			continue
		}
		if named || c.Do != "" {
			c.State = Wrong
		}
		left = append(left, c)
	}
	if more > 0 {
		left = append(left, Check{Check: CheckEgress, Subject: "others", State: Skipped, Seen: plan.Count(more, "Egress isn't", "Egresses aren't") + " tried: name them with --egress"})
	}
	return ways, left
}

// unfit finds the destinations of a way, or says why it isn't tried and, of what is a fault, the command that explains it.
func (o Outward) unfit(w *Way) (why, do string) {
	e := w.Egress
	if s, err := metav1.LabelSelectorAsSelector(e.Spec.AllowedNamespaces); e.Spec.AllowedNamespaces != nil && (err != nil || !s.Matches(labels.Set(Labels()))) {
		return "spec.allowedNamespaces doesn't let namespaces of selftests in, which have the labels " + Selector(), ""
	}
	if e.Spec.Replicas == 0 {
		return "its spec.replicas is 0", ""
	}
	if !meta.IsStatusConditionTrue(e.Status.Conditions, v2.EgressAvailable) {
		return "no router serves clients", fmt.Sprintf("kubectl -n %s describe egress.coil.cybozu.com %s", e.Namespace, e.Name)
	}
	var texts []string
	for _, d := range o.Destinations {
		texts = append(texts, d.Addr().String())
		if policy.Captures(e, d.Addr()) {
			w.To = append(w.To, d)
		}
	}
	if len(o.Destinations) > 0 {
		if len(w.To) == 0 {
			return fmt.Sprintf("its clients reach %s without its routers", plan.Enumerate(texts)), ""
		}
		return "", ""
	}
	for _, n := range slices.Backward(o.Nodes) { // clients are on the first ones
		for _, a := range plan.NodeInternalIPs(n) {
			if policy.Captures(e, a) && !slices.ContainsFunc(w.To, func(o netip.AddrPort) bool { return o.Addr().Is4() == a.Is4() }) {
				w.To = append(w.To, netip.AddrPortFrom(a, o.Port))
			}
		}
		if len(w.To) > 0 {
			w.Host = n.Name
			return "", ""
		}
	}
	return "its clients reach nodes without its routers: name a destination outside of the cluster with --destination", ""
}

// Sources are the addresses by which clients of an Egress leave: those that annotations make clients, or those of a policy, if one is given.
func Sources(e *v2.Egress, routers []*corev1.Pod, p *v2.EgressPolicy) (all []netip.Addr) {
	add := func(texts ...string) {
		for _, text := range texts {
			if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(all, a) {
				all = append(all, a)
			}
		}
	}
	switch {
	case e.Spec.Addresses.For(v2.EgressAddressOfNode):
		for _, a := range e.Status.NodeAddresses {
			add(a.IPv4, a.IPv6)
		}
	case e.Spec.Addresses.For(v2.EgressAddressOfRouter):
		for _, a := range e.Status.Addresses {
			add(a.IPv4, a.IPv6)
		}
	case e.Spec.Addresses.For(v2.EgressAddressOfClient):
		a := plan.AddressOf(e, "")
		if p != nil {
			if a = nil; p.Status.Resolved != nil && p.Status.Resolved.Address != nil {
				a = &v2.EgressAddressStatus{EgressAddress: p.Status.Resolved.Address.EgressAddress}
			}
		}
		if a != nil {
			add(a.IPv4, a.IPv6)
		}
	default:
		for _, r := range routers {
			for _, ip := range r.Status.PodIPs {
				add(ip.IP)
			}
		}
	}
	return all
}

// Left is what has become of the questions of a client of an Egress.
type Left struct {
	Way
	// Check is CheckEgress, or CheckPolicies.
	Check  string
	Client Pod
	// Host is the pod at the destination; it has no name if that is the admin's.
	Host    Pod
	Answers []Answer
	Err     error
	// Sources are the addresses that may arrive.
	Sources []netip.Addr
	// Unread is why Sources aren't known, and Unallowed says that this is for a lack of rights.
	Unread    error
	Unallowed bool
}

// Questions are what the client asks.
func (l Left) Questions() (all []Question) {
	for _, to := range l.To {
		if ownOf(l.Client, to.Addr()).IsValid() {
			all = append(all, Question{TCP, to})
		}
	}
	return all
}

// check begins a verdict.
func (l Left) check() Check {
	c := Check{Check: l.Check, Subject: fmt.Sprintf("%s, from %s", l.Name(), l.Client.Node), State: Right, Pods: []string{l.Client.Name}}
	if l.Host.Name != "" {
		c.Pods = append(c.Pods, l.Host.Name)
	}
	return c
}

// Egress is the verdict on a way out: the destination is reached, and what arrives there has the source of a router.
func (j Judge) Egress(l Left) Check {
	c := l.check()
	if l.Err != nil {
		return j.unasked(c, l.Err, l.Client)
	}
	var reached, wrong []string
	var first netip.AddrPort
	for i, q := range l.Questions() {
		if i >= len(l.Answers) || l.Answers[i].Question != q.String() {
			wrong = append(wrong, fmt.Sprintf("%s wasn't tried", q.To))
			continue
		}
		text, right := l.judge(q, l.Answers[i])
		if right {
			reached = append(reached, text)
			continue
		}
		if wrong = append(wrong, text); !first.IsValid() {
			first = q.To
		}
	}
	switch {
	case len(wrong) > 0:
		c.State, c.Seen, c.Do = Wrong, strings.Join(wrong, "; "), j.explain(l.Client)
		if first.IsValid() {
			c.Do += j.trace(l.Client, first)
		}
	case len(reached) == 0:
		c.State, c.Seen = Skipped, "the pod has no address of the family of a destination"
	default:
		c.Seen = strings.Join(reached, " and ")
	}
	return c
}

// judge says what has become of one question.
func (l Left) judge(q Question, a Answer) (text string, right bool) {
	to := q.To.String()
	var texts []string
	for _, s := range l.Sources {
		texts = append(texts, s.String())
	}
	switch {
	case !a.Reached:
		return fmt.Sprintf("%s: %s", to, a.Error), false
	case l.Host.Name != "" && a.Name != l.Host.Name:
		return to + " is answered by something other than the pod there", false
	case !a.Source.IsValid():
		return to + " is reached; which source arrives there isn't known, since what answers isn't \"coild selftest serve\"", true
	case a.Source.Addr() == ownOf(l.Client, q.To.Addr()):
		return fmt.Sprintf("%s is reached with the pod's own source %s, so not through a router", to, a.Source.Addr()), false
	case l.Unread != nil:
		return fmt.Sprintf("%s is reached with the source %s; whether that is a router's isn't known: %v", to, a.Source.Addr(), l.Unread), l.Unallowed
	case len(texts) == 0:
		return fmt.Sprintf("%s is reached with the source %s, and no router has an address", to, a.Source.Addr()), false
	case !slices.Contains(l.Sources, a.Source.Addr()):
		return fmt.Sprintf("%s is reached with the source %s, and routers have %s: something translates it", to, a.Source.Addr(), plan.Enumerate(texts)), false
	}
	return fmt.Sprintf("%s is reached with the source %s of the routers", to, a.Source.Addr()), true
}

package diagnosis

import (
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/policy"
)

// use is an Egress that the pod is to use.
type use struct {
	egress types.NamespacedName
	// by is the policy, or the annotation.
	by string
}

// egress walks through the ways out of the pod.
func (w *podWalk) egress() {
	if w.unread(StepPolicies, KindPolicies, KindClusterPolicies, KindNamespace) {
		return
	}
	if egress, is := plan.RouterOf(w.Pod.Labels); is {
		w.right(StepPolicies, "the pod is a router of Egress %s/%s, and uses none itself", w.Pod.Namespace, egress)
		return
	}
	uses, trouble := w.uses()
	switch {
	case trouble != nil:
		w.steps = append(w.steps, *trouble)
	case len(uses) == 0:
		w.right(StepPolicies, "the pod uses no Egress: no annotation names one, and no policy selects the pod")
		return
	default:
		var texts []string
		for _, u := range uses {
			texts = append(texts, u.egress.String()+" by "+u.by)
		}
		w.right(StepPolicies, "the pod uses %s", plan.Enumerate(texts))
	}
	if len(uses) == 0 || w.unread(StepRouter, KindEgresses) {
		return
	}
	w.router(uses)
	w.tunnels(uses)
	w.peers()
	if floating := of(w.objects(), inspection.Floating); len(floating) > 0 {
		w.compare(StepFloating, "floating addresses lead to the pod: "+strings.Join(w.at.Floating, ", "), repaired(w.Answer.Node.Name, "another program deletes routes"), floating)
	}
}

// objects are those of the pod's attachment.
func (w *podWalk) objects() []inspection.Comparison {
	if w.at == nil {
		return nil
	}
	return w.at.Objects
}

// uses are the Egresses that the pod is to use. trouble says what is wrong with a policy that selects it.
func (w *podWalk) uses() (uses []use, trouble *Step) {
	for _, ref := range plan.EgressRefs(w.Pod.Annotations) {
		uses = append(uses, use{ref, "annotation"})
	}
	pod := policy.Pod{Namespace: w.Pod.Namespace, Labels: w.Pod.Labels}
	if w.Namespace != nil {
		pod.NamespaceLabels = w.Namespace.Labels
	}
	for _, ip := range w.Pod.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			pod.Addresses = append(pod.Addresses, a)
		}
	}
	take := func(p policy.Policy, status v2.EgressPolicyStatus) {
		if !p.Selects(pod) {
			return
		}
		accepted := meta.FindStatusCondition(status.Conditions, v2.PolicyAccepted)
		switch {
		case accepted != nil && accepted.Status == metav1.ConditionFalse && !policy.InForce(status):
			trouble = &Step{Step: StepPolicies, State: Wrong, Seen: p.String() + " selects the pod, and isn't followed: " + accepted.Message, Do: "do what the message says"}
		case p.Unresolved && trouble == nil:
			trouble = &Step{Step: StepPolicies, State: Unknown, Seen: "it isn't resolved yet what " + p.String() + " means, which may select the pod", Do: "see that coil-egress-controller runs and leads"}
		}
		if p.Egress.Name != "" {
			uses = append(uses, use{p.Egress, p.String()})
		}
	}
	for _, o := range w.Policies {
		if p, err := policy.Of(o); err == nil {
			take(p, o.Status)
		}
	}
	for _, o := range w.ClusterPolicies {
		if p, err := policy.OfCluster(o); err == nil {
			take(p, o.Status)
		}
	}
	return uses, trouble
}

// router judges the Egresses that the pod uses.
func (w *podWalk) router(uses []use) {
	for _, u := range uses {
		i := slices.IndexFunc(w.Egresses, func(e *v2.Egress) bool { return e.Namespace == u.egress.Namespace && e.Name == u.egress.Name })
		if i < 0 {
			w.wrong(StepRouter, "make the Egress, or change "+u.by, "there is no Egress %s, which %s names", u.egress, u.by)
			return
		}
		e := w.Egresses[i]
		if w.Namespace != nil {
			if allowed, err := plan.AllowsNamespace(e, w.Namespace.Labels); !allowed || err != nil {
				w.wrong(StepRouter, "change spec.allowedNamespaces of the Egress, or the labels of the namespace", "Egress %s doesn't allow pods of namespace %s", u.egress, w.Pod.Namespace)
				return
			}
		}
		switch c := meta.FindStatusCondition(e.Status.Conditions, v2.EgressAvailable); {
		case c == nil && w.late(e.CreationTimestamp.Time):
			w.wrong(StepRouter, "see that coil-egress-controller runs and leads", "no coil-egress-controller has looked at Egress %s", u.egress)
			return
		case c == nil:
			w.unknown(StepRouter, "look again in a moment", "no coil-egress-controller has looked at Egress %s yet", u.egress)
			return
		case c.Status != metav1.ConditionTrue:
			w.wrong(StepRouter, "see kubectl -n "+e.Namespace+" describe egress "+e.Name, "Egress %s has no router that serves: %s", u.egress, c.Message)
			return
		}
	}
	w.right(StepRouter, "each Egress has a router that serves")
}

// tunnels judges what the pod has for its Egresses.
func (w *podWalk) tunnels(uses []use) {
	a := w.Answer
	if a == nil || w.at == nil {
		return // the record says why
	}
	switch {
	case !a.Node.Egress:
		w.wrong(StepTunnels, "run coild with --enable-egress=true", "coild of the node ignores annotations and policies for Egresses")
		return
	case a.Node.NoTunnels != "":
		w.wrong(StepTunnels, "install the kernel's modules fou, fou6, ipip and ip6_tunnel on the node", "the node can't make tunnels: %s", a.Node.NoTunnels)
		return
	}
	if w.at.Client != nil && w.at.Client.Trouble != "" {
		w.wrong(StepTunnels, "see the Events of the pod and the log of coild, which tries again", "the pod isn't set up for its Egresses: %s", w.at.Client.Trouble)
		return
	}
	for _, u := range uses {
		has := w.at.Client != nil && slices.ContainsFunc(w.at.Client.Egresses, func(e inspection.UsedEgress) bool { return e.Name == u.egress.String() && !e.Former })
		if !has && !w.faulty(StepRouter, StepPolicies) {
			w.wrong(StepTunnels, "see the Events of the pod and the log of coild", "coild hasn't set the pod up for Egress %s", u.egress)
			return
		}
		if !has {
			w.unknown(StepTunnels, "", "the pod isn't set up for Egress %s: first put the %s right", u.egress, w.firstWrong())
			return
		}
	}
	n := len(w.at.Client.Tunnels)
	w.compare(StepTunnels, "the pod has "+plan.Count(n, "tunnel", "tunnels")+" as coild made them",
		repaired(a.Node.Name, "look for a container or a service mesh that changes the pod's network"), of(w.at.Objects, inspection.Tunnels))
}

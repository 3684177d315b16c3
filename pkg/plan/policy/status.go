package policy

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/floating"
)

// Reasons of the conditions of a policy.
const (
	// ReasonAccepted: Accepted is True.
	ReasonAccepted = "Accepted"
	// ReasonSelectorInvalid: a selector can't be understood.
	ReasonSelectorInvalid = "SelectorInvalid"
	// ReasonEgressNotFound: there is no Egress of the name, in the spec or in the annotation of the Namespace.
	ReasonEgressNotFound = "EgressNotFound"
	// ReasonNoDefaultEgress: no Egress is named, and there is no default that the namespace may use.
	ReasonNoDefaultEgress = "NoDefaultEgress"
	// ReasonDestinationOutside: the Egress doesn't reach a destination.
	ReasonDestinationOutside = "DestinationOutside"
	// ReasonDestinationInCluster: a destination is reached without an Egress.
	ReasonDestinationInCluster = "DestinationInCluster"
	// ReasonNamespaceNotAllowed: the Egress doesn't allow the namespace, or one of those that are selected.
	ReasonNamespaceNotAllowed = "NamespaceNotAllowed"
	// ReasonServiceNotFound: a Service isn't there.
	ReasonServiceNotFound = "ServiceNotFound"
	// ReasonServiceWithoutSelector: a Service doesn't say which pods are its own.
	ReasonServiceWithoutSelector = "ServiceWithoutSelector"
	// ReasonNoAddresses: an address is named, and the Egress has none.
	ReasonNoAddresses = "NoAddresses"
	// ReasonOlderPolicy: Conflicting is True because of another policy, and ReasonAnnotation because of a pod's annotation.
	ReasonOlderPolicy = "OlderPolicy"
	ReasonAnnotation  = "Annotation"
)

// partial are the reasons for which Accepted is False although the policy is followed for some pods.
var partial = map[string]bool{ReasonNamespaceNotAllowed: true, ReasonServiceNotFound: true, ReasonServiceWithoutSelector: true}

// InForce says whether routers let in pods that a policy selects: it is accepted, or fails only for others than these.
func InForce(status v2.EgressPolicyStatus) bool {
	c := meta.FindStatusCondition(status.Conditions, v2.PolicyAccepted)
	return c != nil && (c.Status == metav1.ConditionTrue || partial[c.Reason])
}

// Decides says whether routers of an Egress know the pods that a policy selects. They do if it is in force. Routers whose clients leave by the addresses of
// policies know those of all others, too, without an address: clients follow such a policy, and the routers would send by the address of another one.
func Decides(status v2.EgressPolicyStatus, e *v2.Egress) bool {
	return InForce(status) || e.Spec.Addresses.For(v2.EgressAddressOfClient)
}

// Namespace is the namespace of an EgressPolicy.
type Namespace struct {
	Name   string
	Labels map[string]string
	// Egress is its annotation v2.AnnotationEgress.
	Egress string
}

// Facts is all that the status of a policy depends on.
type Facts struct {
	// Policy and Selector are what Of or OfCluster return.
	Policy   Policy
	Selector error
	// Use, Services and Generation are those of the object, Status is its present one.
	Use        v2.EgressUse
	Services   []string
	Generation int64
	Status     v2.EgressPolicyStatus
	// Namespace is nil for an EgressClusterPolicy.
	Namespace *Namespace
	// Egress and Service return that of a name, nil if there is none.
	Egress  func(types.NamespacedName) *v2.Egress
	Service func(name string) *corev1.Service
	// Default is the default of the cluster, nil if there is none.
	Default *v2.Egress
	// Refused returns the namespaces that an Egress doesn't allow and that have pods which an EgressClusterPolicy selects.
	Refused func(*v2.Egress) []string
	// Conflict is what decides for some pod in place of the policy, nil for nothing. It is given the Egress, which may be nil.
	Conflict func(*v2.Egress) *Conflict
	// Given is what the Egress has assigned, if it has floating addresses.
	Given floating.Given
	// Clients is how many pods routers let in.
	Clients int
	// Now is the time of a transition.
	Now metav1.Time
}

// Conflict is a pod that follows something else than a policy.
type Conflict struct {
	Rival Rival
	// Pod is one of the pods.
	Pod types.NamespacedName
}

// Status returns the status that a policy should have. It equals the present one when nothing has changed.
func Status(f Facts) v2.EgressPolicyStatus {
	st := *f.Status.DeepCopy()
	st.ObservedGeneration, st.Clients, st.Node, st.Router, st.Summary = f.Generation, int32(f.Clients), "", "", v2.PolicySummary{}
	ref, noEgress := f.resolveEgress()
	pods, badServices := f.resolveServices()
	st.Resolved = &v2.ResolvedPolicy{ObservedGeneration: f.Generation, Egress: ref, Pods: pods}
	var egress *v2.Egress
	if ref != nil {
		st.Summary.Egress = nameOf(*ref).String()
		egress = f.Egress(nameOf(*ref))
	}
	// The first reason is the condition's: those for which nobody is let in come first.
	var problems []*problem
	if f.Selector != nil {
		problems = append(problems, problemf(ReasonSelectorInvalid, "No pod is selected: correct spec.%v", f.Selector))
	}
	if noEgress != nil {
		problems = append(problems, noEgress)
	}
	if egress != nil {
		problems = append(problems, f.checkDestinations(egress)...)
		problems = append(problems, f.checkNamespaces(egress)...)
	}
	if egress != nil {
		var lacking *problem
		st.Resolved.Address, lacking = f.resolveAddress(egress)
		if lacking != nil {
			problems = append(problems, lacking)
		}
	}
	f.locate(&st, egress)
	problems = append(problems, badServices...)
	set := func(kind string, status metav1.ConditionStatus, reason, message string) {
		// The time is kept as it was unless the status changes.
		meta.SetStatusCondition(&st.Conditions, metav1.Condition{
			Type: kind, Status: status, Reason: reason, Message: plan.Message(message), ObservedGeneration: f.Generation, LastTransitionTime: f.Now,
		})
	}
	if len(problems) == 0 {
		set(v2.PolicyAccepted, metav1.ConditionTrue, ReasonAccepted, fmt.Sprintf("The pods use Egress %s", st.Summary.Egress))
	} else {
		var texts []string
		for _, p := range problems {
			texts = append(texts, p.message)
		}
		set(v2.PolicyAccepted, metav1.ConditionFalse, problems[0].reason, strings.Join(texts, ". "))
	}
	if !InForce(st) {
		st.Clients = 0 // routers let none of them in, or drop what they send
	}
	c := f.Conflict(egress)
	switch {
	case c == nil:
		meta.RemoveStatusCondition(&st.Conditions, v2.PolicyConflicting)
	case c.Rival.Annotated():
		set(v2.PolicyConflicting, metav1.ConditionTrue, ReasonAnnotation, fmt.Sprintf(
			"Pod %s reaches %s through Egress %s, by its annotation, which counts as the oldest policy: remove the annotation, or take the pod out here", c.Pod, c.Rival.Destination, c.Rival.Egress))
	default:
		set(v2.PolicyConflicting, metav1.ConditionTrue, ReasonOlderPolicy, fmt.Sprintf(
			"Pod %s reaches %s through Egress %s, by the older %s: remove the destination or the pod from one of the two, or name smaller destinations here", c.Pod, c.Rival.Destination, c.Rival.Egress, c.Rival.Policy))
	}
	return st
}

// checkNamespaces says which namespaces the Egress doesn't allow.
func (f Facts) checkNamespaces(e *v2.Egress) []*problem {
	var refused []string
	var err error
	if ns := f.Namespace; ns != nil {
		var allowed bool
		if allowed, err = plan.AllowsNamespace(e, ns.Labels); !allowed {
			refused = []string{ns.Name}
		}
	} else {
		_, err = plan.AllowedNamespaces(e)
		refused = f.Refused(e)
	}
	if len(refused) == 0 {
		return nil
	}
	why := "spec.allowedNamespaces"
	if err != nil {
		why = err.Error()
	}
	return []*problem{problemf(ReasonNamespaceNotAllowed, "Egress %s doesn't allow Namespace %s (%s): label the Namespace as it asks, or use another Egress", nameOf(*refTo(e)), plan.Enumerate(refused), why)}
}

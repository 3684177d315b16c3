package egress

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// Reasons of the conditions of an Egress.
const (
	// ReasonRoutersReady: Available is True.
	ReasonRoutersReady = "RoutersReady"
	// ReasonNoRouterWanted: Available is False because spec.replicas is 0.
	ReasonNoRouterWanted = "NoRouterWanted"
	// ReasonNoRouterReady: Available is False, and nothing is known to be in the way.
	ReasonNoRouterReady = "NoRouterReady"
	// ReasonRouterNotCreated: Available is False because the API server refuses router
	// pods, such as for a quota.
	ReasonRouterNotCreated = "RouterNotCreated"
	// ReasonRouterNotScheduled: Available is False because no node takes a router.
	ReasonRouterNotScheduled = "RouterNotScheduled"
	// ReasonRouterNotStarted: Available is False because a container of a router doesn't
	// run, such as for want of its image.
	ReasonRouterNotStarted = "RouterNotStarted"
	// ReasonInvalidTemplate: InvalidTemplate is True, and Available is False unless there
	// are routers from before.
	ReasonInvalidTemplate = "InvalidTemplate"
	// ReasonConflict: Available is False because an object of the Egress's name is
	// somebody else's.
	ReasonConflict = "Conflict"
	// ReasonRefused: the API server refuses an object of the Egress. Available is True if
	// routers serve all the same.
	ReasonRefused = "Refused"
	// ReasonInvalidSelector: Available is False because spec.allowedNamespaces can't be
	// used, so that nobody is allowed.
	ReasonInvalidSelector = "InvalidSelector"
	// ReasonSourcePortWithoutAffinity: UnstableFlows is True because of fouSourcePortAuto with the
	// sessionAffinity None.
	ReasonSourcePortWithoutAffinity = "SourcePortWithoutAffinity"
	// ReasonSeveralDefaults: Conflicting is True because of spec.default.
	ReasonSeveralDefaults = "SeveralDefaults"
)

// Facts is all that the status of an Egress depends on.
type Facts struct {
	Egress *v2.Egress
	// Deployment is that of the Egress, nil when there is none.
	Deployment *appsv1.Deployment
	// Routers are its pods.
	Routers []*corev1.Pod
	// Clients is the number of pods that use it.
	Clients int
	// InCluster are the ranges of the cluster that concern it.
	InCluster []netip.Prefix
	// Template is what is wrong with the template, Conflicts are the objects that are
	// somebody else's, Selector is why allowedNamespaces can't be used.
	Template  error
	Conflicts []string
	Selector  error
	// Refused are the objects that the API server refuses.
	Refused []Refusal
	// Defaults are the Egresses with spec.default, as plan.DefaultEgresses returns them.
	Defaults []*v2.Egress
	// Pressure has the answers of routers, by the names of their pods; nil before they
	// were asked.
	Pressure map[string]gateway.Pressure
	// ForeignPods says that another network plugin gives pods their addresses.
	ForeignPods bool
	// NoPools says that there are no AddressPools. Claim is that of the floating addresses, nil when there is none, and Blocks
	// are these addresses.
	NoPools bool
	Claim   *v2.AddressClaim
	Blocks  []*v2.AddressBlock
	// Policies are the names of the policies whose pods leave by the address of a block.
	Policies map[string][]string
	// InternalIPs returns the addresses of a Node.
	InternalIPs func(node string) []string
	// Now is the time of a transition.
	Now metav1.Time
}

// Kinds of objects without which clients aren't served.
const (
	KindServiceAccount = "ServiceAccount"
	KindRoleBinding    = "RoleBinding"
	KindService        = "Service"
)

// Refusal is that of an object by the API server: for a quota, a policy, its content.
type Refusal struct {
	Kind, Name string
	// Absent ones can't be made; others stay as they are.
	Absent bool
	// Reason is the error of the API server.
	Reason string
}

// Status returns the status that an Egress should have. It equals the present one
// when nothing has changed.
func Status(f Facts) v2.EgressStatus {
	st := *f.Egress.Status.DeepCopy()
	st.ObservedGeneration = f.Egress.Generation
	st.Selector = labels.Set(plan.RouterLabels(f.Egress.Name)).String()
	st.Clients = int32(f.Clients)
	f.Deployment = cmp.Or(f.Deployment, &appsv1.Deployment{}) // here and below
	st.Replicas = f.Deployment.Status.Replicas
	st.InClusterCIDRs = nil
	for _, p := range f.InCluster {
		st.InClusterCIDRs = append(st.InClusterCIDRs, p.String())
	}
	set := func(c metav1.Condition) {
		c.ObservedGeneration = f.Egress.Generation
		c.LastTransitionTime = f.Now // kept as it was unless the status changes
		meta.SetStatusCondition(&st.Conditions, c)
	}
	if f.Template != nil {
		set(metav1.Condition{
			Type: v2.EgressInvalidTemplate, Status: metav1.ConditionTrue, Reason: ReasonInvalidTemplate,
			Message: plan.Message("The Deployment is left as it is: " + f.Template.Error()),
		})
	} else {
		meta.RemoveStatusCondition(&st.Conditions, v2.EgressInvalidTemplate)
	}
	if unstable(f.Egress.Spec) {
		set(metav1.Condition{
			Type: v2.EgressUnstableFlows, Status: metav1.ConditionTrue, Reason: ReasonSourcePortWithoutAffinity,
			Message: "With fouSourcePortAuto and the sessionAffinity None, TCP connections that retransmit, or rest for 30 seconds, may reach " +
				"another router, which resets them. To spread flows over routers set peering: Direct; otherwise set sessionAffinity: ClientIP",
		})
	} else {
		meta.RemoveStatusCondition(&st.Conditions, v2.EgressUnstableFlows)
	}
	if message := f.otherDefaults(); message != "" {
		set(metav1.Condition{Type: v2.EgressConflicting, Status: metav1.ConditionTrue, Reason: ReasonSeveralDefaults, Message: message})
	} else {
		meta.RemoveStatusCondition(&st.Conditions, v2.EgressConflicting)
	}
	set(available(f))
	st.Addresses, st.NodeAddresses = AddressStatuses(f.Claim, f.Blocks, f.Routers), NodeAddresses(f.Egress, f.Routers, f.InternalIPs)
	namePolicies(st.Addresses, f.Policies)
	if c := addressesReady(f); c != nil {
		set(*c)
	} else {
		meta.RemoveStatusCondition(&st.Conditions, v2.EgressAddressesReady)
	}
	if f.Pressure != nil {
		setPressure(&st.Conditions, f.Pressure, f.Egress.Spec.Peering, set)
	}
	return st
}

// otherDefaults says which of several Egresses with spec.default is the default; it is empty if the Egress is none, or the only one.
func (f Facts) otherDefaults() string {
	var others []string
	for _, e := range f.Defaults {
		if e.UID != f.Egress.UID {
			others = append(others, e.Namespace+"/"+e.Name)
		}
	}
	switch {
	case len(others) == 0 || len(others) == len(f.Defaults):
		return ""
	case f.Defaults[0].UID == f.Egress.UID:
		return fmt.Sprintf("Egress %s has spec.default, too. This one is the default of the cluster, since it is the oldest: take spec.default off the others", plan.Enumerate(others))
	}
	return fmt.Sprintf("Egress %s is the default of the cluster, since it is older: take spec.default off one of the two", others[0])
}

// unstable says whether the Service draws a router anew for flows that live: the kernel changes the
// source port of a connection that retransmits, and only ClientIP keeps the router then.
func unstable(s v2.EgressSpec) bool {
	return s.FouSourcePortAuto && s.SessionAffinity == corev1.ServiceAffinityNone && s.Peering != v2.EgressPeeringDirect
}

// available says whether routers serve clients, and what is refused.
func available(f Facts) metav1.Condition {
	c := availableRouters(f)
	for _, r := range f.Refused {
		c.Message = plan.Message(fmt.Sprintf("%s. The API server refuses %s %s: %s", c.Message, r.Kind, r.Name, r.Reason))
		// Without an account and its rights routers don't learn of their clients, without a Service these
		// have nobody to send to.
		if r.Absent && (r.Kind == KindServiceAccount || r.Kind == KindRoleBinding || r.Kind == KindService && f.Egress.Spec.Peering != v2.EgressPeeringDirect) {
			c.Status = metav1.ConditionFalse
		}
		if c.Reason == ReasonRoutersReady || c.Reason == ReasonNoRouterReady {
			c.Reason = ReasonRefused
		}
	}
	return c
}

func availableRouters(f Facts) metav1.Condition {
	no := func(reason, format string, args ...any) metav1.Condition {
		return metav1.Condition{
			Type: v2.EgressAvailable, Status: metav1.ConditionFalse, Reason: reason, Message: plan.Message(fmt.Sprintf(format, args...)),
		}
	}
	ready := f.Deployment.Status.ReadyReplicas
	switch {
	case len(f.Conflicts) > 0:
		return no(ReasonConflict, "%s of this name is not this Egress's: delete or rename it", plan.Enumerate(f.Conflicts))
	case f.Selector != nil:
		return no(ReasonInvalidSelector, "No namespace is allowed: %v", f.Selector)
	case ready > 0:
		return metav1.Condition{
			Type: v2.EgressAvailable, Status: metav1.ConditionTrue, Reason: ReasonRoutersReady,
			Message: fmt.Sprintf("%d of %s ready", ready, plan.Count(int(f.Egress.Spec.Replicas), "router is", "routers are")),
		}
	case f.Template != nil:
		return no(ReasonInvalidTemplate, "No router is ready: %v", f.Template)
	case f.Egress.Spec.Replicas == 0:
		return no(ReasonNoRouterWanted, "spec.replicas is 0")
	}
	reason, why := obstacle(f)
	return no(reason, "No router is ready%s", why)
}

// obstacle says what keeps routers from becoming ready, as far as that is known.
func obstacle(f Facts) (reason, why string) {
	for _, c := range f.Deployment.Status.Conditions {
		if c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue {
			return ReasonRouterNotCreated, ": " + c.Message
		}
	}
	routers := slices.SortedFunc(slices.Values(f.Routers), func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	for _, p := range routers {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
				return ReasonRouterNotScheduled, fmt.Sprintf(": Pod %s: %s", p.Name, c.Message)
			}
		}
	}
	for _, p := range routers {
		for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
			// Each pod is creating its containers, or waits for the first, for a while.
			if w := s.State.Waiting; w != nil && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing" {
				return ReasonRouterNotStarted, fmt.Sprintf(": Pod %s, container %s: %s", p.Name, s.Name,
					strings.TrimSuffix(w.Reason+": "+w.Message, ": "))
			}
		}
	}
	return ReasonNoRouterReady, ""
}

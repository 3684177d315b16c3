// Package health says what is wrong in a cluster, from what its objects tell.
//
// It owns which condition of which kind is bad news, and how long an object may wait before that is. It must not know where objects come from, nor how findings are shown.
package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/preflight"
)

// Patience is for how long an object may be on its way, such as one that is deleted, before that is a finding.
const Patience = time.Minute

// quarantine is for how long coil-ipam-controller keeps the blocks of a Node that is gone, unless --quarantine says otherwise.
const quarantine = 10 * time.Minute

// Finding is something that is wrong.
type Finding struct {
	// Kind, Namespace and Name are those of the object.
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Reason is that of the condition, in CamelCase.
	Reason string `json:"reason"`
	// Message says what is wrong and, if that is known, what to do.
	Message string `json:"message"`
	// Since is when it began, zero if that isn't known.
	Since metav1.Time `json:"since,omitzero"`
}

// Object is such as "Egress internet/nat".
func (f Finding) Object() string {
	if f.Namespace == "" {
		return f.Kind + " " + f.Name
	}
	return f.Kind + " " + f.Namespace + "/" + f.Name
}

// good says which status of a condition is no finding.
type good struct {
	condition string
	status    metav1.ConditionStatus
}

// Conditions that are findings with another status than the one here. One that isn't there is none: its controller may be older.
var (
	poolConditions = []good{{v2.PoolExhausted, metav1.ConditionFalse}, {v2.PoolOverlapping, metav1.ConditionFalse}, {v2.PoolSuspended, metav1.ConditionFalse},
		{v2.PoolTerminating, metav1.ConditionFalse}, {v2.PoolExcludedInUse, metav1.ConditionFalse}}
	blockConditions  = []good{{v2.BlockConflicting, metav1.ConditionFalse}, {v2.BlockForwardingBlocked, metav1.ConditionFalse}, {v2.BlockStandbyInStep, metav1.ConditionTrue}}
	claimConditions  = []good{{v2.ClaimReady, metav1.ConditionTrue}, {v2.ClaimProvided, metav1.ConditionTrue}, {v2.ClaimAllowed, metav1.ConditionTrue}}
	egressConditions = []good{{v2.EgressAvailable, metav1.ConditionTrue}, {v2.EgressInvalidTemplate, metav1.ConditionFalse}, {v2.EgressConntrackPressure, metav1.ConditionFalse},
		{v2.EgressPortPressure, metav1.ConditionFalse}, {v2.EgressClientPressure, metav1.ConditionFalse}, {v2.EgressUnstableFlows, metav1.ConditionFalse},
		{v2.EgressConflicting, metav1.ConditionFalse}, {v2.EgressAddressesReady, metav1.ConditionTrue}}
	policyConditions  = []good{{v2.PolicyAccepted, metav1.ConditionTrue}, {v2.PolicyConflicting, metav1.ConditionFalse}}
	gatewayConditions = []good{{v2.GatewayApplied, metav1.ConditionTrue}}
	serviceConditions = []good{{loadbalancer.ConditionAssigned, metav1.ConditionTrue}, {loadbalancer.ConditionServed, metav1.ConditionTrue},
		{loadbalancer.ConditionPolicies, metav1.ConditionTrue}}
)

// Findings returns what is wrong with the objects of a cluster, in the order of inventory.Objects.
func Findings(f inventory.Objects) []Finding {
	j := judge{now: f.Now, patience: Patience}
	for _, o := range f.Pools {
		j.object("AddressPool", o, o.Status.Conditions, conditionsOf(o))
	}
	for _, o := range f.Blocks {
		j.patience = Patience
		if _, gone := o.Annotations[v2.AnnotationNodeGone]; gone && !exists(f.Nodes, o.Labels[v2.LabelNode]) {
			j.patience += quarantine
		}
		j.object("AddressBlock", o, o.Status.Conditions, blockConditions)
	}
	j.patience = Patience
	for _, o := range f.Claims {
		j.object("AddressClaim", o, o.Status.Conditions, claimConditions)
	}
	for _, o := range f.Egresses {
		j.object("Egress", o, o.Status.Conditions, egressConditions)
	}
	for _, o := range f.Policies {
		j.object("EgressPolicy", o, o.Status.Conditions, policyConditions)
	}
	for _, o := range f.ClusterPolicies {
		j.object("EgressClusterPolicy", o, o.Status.Conditions, policyConditions)
	}
	for _, o := range f.Gateways {
		j.object("LoadBalancerGateway", o, o.Status.Conditions, gatewayConditions)
		if silent, is := Silent(o, f.Now); is {
			j.findings = append(j.findings, silent)
		}
	}
	for _, o := range f.Services {
		j.conditions("Service", o, o.Status.Conditions, serviceConditions)
		if loadbalancer.Taken(o) { // finalizers of others are theirs
			j.hangs("Service", o)
		}
	}
	j.findings = append(j.findings, Leaders(Leases(f), f.Leases, f.Now)...)
	j.nodes(f.Nodes, f.Coilds)
	return j.findings
}

// judge collects findings.
type judge struct {
	now      time.Time
	patience time.Duration
	findings []Finding
}

// late says whether something that began then has taken longer than it may.
func (j *judge) late(since metav1.Time) bool { return j.now.Sub(since.Time) > j.patience }

func (j *judge) add(kind string, o metav1.Object, reason, message string, since metav1.Time) {
	j.findings = append(j.findings, Finding{Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(), Reason: reason, Message: message, Since: since})
}

// object judges an object by its conditions, and by whether it hangs.
func (j *judge) object(kind string, o metav1.Object, has []metav1.Condition, wants []good) {
	j.conditions(kind, o, has, wants)
	if kind != "AddressPool" { // a pool has a condition for this
		j.hangs(kind, o)
	}
}

// conditions judges an object by its conditions.
func (j *judge) conditions(kind string, o metav1.Object, has []metav1.Condition, wants []good) {
	for _, g := range wants {
		if c := meta.FindStatusCondition(has, g.condition); c != nil && c.Status != g.status {
			j.add(kind, o, c.Reason, c.Message, c.LastTransitionTime)
		}
	}
}

// hangs judges whether an object that is deleted stays.
func (j *judge) hangs(kind string, o metav1.Object) {
	if at := o.GetDeletionTimestamp(); at != nil && j.late(*at) {
		j.add(kind, o, "Terminating", "It is deleted, and waits for whoever has set the finalizer "+strings.Join(o.GetFinalizers(), ", "), *at)
	}
}

// Lease is one by which replicas of a controller elect their leader.
type Lease struct{ Name, Controller string }

// Leases returns those of the controllers that have to do with objects that there are.
func Leases(f inventory.Objects) (all []Lease) {
	if len(f.Pools)+len(f.Blocks)+len(f.Claims) > 0 {
		all = append(all, Lease{plan.IPAMLease, "coil-ipam-controller"})
	}
	if len(f.Egresses)+len(f.Policies)+len(f.ClusterPolicies) > 0 {
		all = append(all, Lease{plan.EgressLease, "coil-egress-controller"})
	}
	if len(inventory.Services(f))+len(f.Gateways) > 0 {
		all = append(all, Lease{plan.LBLease, "coil-lb-controller"})
	}
	return all
}

// Leaders returns what is wrong with the leaders of controllers.
func Leaders(wanted []Lease, leases []*coordinationv1.Lease, now time.Time) []Finding {
	j := judge{now: now, patience: Patience}
	for _, wanted := range wanted {
		says := "No " + wanted.Controller + " leads: see that its pods run"
		i := slices.IndexFunc(leases, func(l *coordinationv1.Lease) bool { return l.Name == wanted.Name })
		if i < 0 {
			j.add("Lease", &metav1.ObjectMeta{Name: wanted.Name}, "NoLeader", says+"; none ever has", metav1.Time{})
			continue
		}
		l := leases[i]
		renewed := l.CreationTimestamp
		if l.Spec.RenewTime != nil {
			renewed = metav1.NewTime(l.Spec.RenewTime.Time)
		}
		if j.late(renewed) {
			j.add("Lease", l, "NoLeader", says, renewed)
		}
	}
	return j.findings
}

// Silent says whether nothing was heard of a gateway for too long, and that as a finding.
func Silent(g *v2.LoadBalancerGateway, now time.Time) (Finding, bool) {
	j := judge{now: now, patience: Patience}
	switch heard := g.Status.LastContact; {
	case heard.IsZero() && j.late(g.CreationTimestamp):
		j.add("LoadBalancerGateway", g, "Silent", "coil-lb-agent has never told anything: start it on the machine", g.CreationTimestamp)
	case !heard.IsZero() && j.late(*heard):
		j.add("LoadBalancerGateway", g, "Silent", "coil-lb-agent doesn't reach the API server, or doesn't run", *heard)
	}
	if len(j.findings) == 0 {
		return Finding{}, false
	}
	return j.findings[0], true
}

// nodes judges which nodes can start pods.
func (j *judge) nodes(nodes []*corev1.Node, coilds []*corev1.Pod) {
	on := map[string][]*corev1.Pod{}
	for _, p := range coilds {
		on[p.Spec.NodeName] = append(on[p.Spec.NodeName], p)
	}
	for _, n := range nodes {
		if c := condition(n.Status.Conditions, corev1.NodeReady); c == nil || c.Status != corev1.ConditionTrue {
			since := n.CreationTimestamp
			if c != nil {
				since = c.LastTransitionTime
			}
			j.add("Node", n, "NotReady", "kubelet isn't ready, or isn't heard", since)
			continue // its coild may well not run
		}
		pods := on[n.Name]
		if !preflight.Runs(n) || slices.ContainsFunc(pods, inventory.PodReady) {
			continue
		}
		// The one that isn't ready for the shortest time is the one that is to be.
		slices.SortFunc(pods, func(a, b *corev1.Pod) int {
			return cmp.Or(unready(b).Compare(unready(a).Time), cmp.Compare(a.Name, b.Name))
		})
		switch {
		case len(pods) == 0 && j.late(n.CreationTimestamp):
			j.add("Node", n, "NoCoild", "No pod of coild is on the node: its DaemonSet may not tolerate a taint of it", n.CreationTimestamp)
		case len(pods) > 0 && j.late(unready(pods[0])):
			j.add("Node", n, "CoildNotReady", fmt.Sprintf("coild isn't ready: see the log of pod %s/%s%s", pods[0].Namespace, pods[0].Name, waiting(pods[0])), unready(pods[0]))
		}
	}
}

// unready is since when a pod isn't ready.
func unready(p *corev1.Pod) metav1.Time {
	since := p.CreationTimestamp
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && since.Before(&c.LastTransitionTime) {
			since = c.LastTransitionTime
		}
	}
	return since
}

// exists says whether there is a Node of a name.
func exists(nodes []*corev1.Node, name string) bool {
	return slices.ContainsFunc(nodes, func(n *corev1.Node) bool { return n.Name == name })
}

// conditionsOf are those of a pool. One of floating addresses alone may well be in use as a whole: a claim that waits for an address says so itself.
func conditionsOf(p *v2.AddressPool) []good {
	if p.Spec.Purpose != v2.PurposeFloating || !meta.IsStatusConditionTrue(p.Status.Conditions, v2.PoolExhausted) {
		return poolConditions
	}
	return slices.DeleteFunc(slices.Clone(poolConditions), func(g good) bool { return g.condition == v2.PoolExhausted })
}

func condition(all []corev1.NodeCondition, kind corev1.NodeConditionType) *corev1.NodeCondition {
	i := slices.IndexFunc(all, func(c corev1.NodeCondition) bool { return c.Type == kind })
	if i < 0 {
		return nil
	}
	return &all[i]
}

// waiting says what kubelet tells of the containers of a pod that don't run.
func waiting(p *corev1.Pod) string {
	var all []string
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if c.State.Waiting != nil && c.State.Waiting.Reason != "" {
			all = append(all, c.Name+" is "+c.State.Waiting.Reason)
		}
	}
	if len(all) == 0 {
		return ""
	}
	return "; " + plan.Enumerate(all)
}

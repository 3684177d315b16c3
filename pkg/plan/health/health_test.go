package health_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/health"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

var now = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// ago is a time before now.
func ago(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

func named(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, CreationTimestamp: ago(time.Hour)}
}

func is(kind string, status metav1.ConditionStatus) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: "Because", Message: kind + " is " + string(status), LastTransitionTime: ago(time.Minute)}
}

// Each condition is a finding with one status, and none with the other.
func TestConditions(t *testing.T) {
	kinds := map[string]func(f *inventory.Objects, conditions ...metav1.Condition){
		"AddressPool": func(f *inventory.Objects, c ...metav1.Condition) {
			f.Pools = append(f.Pools, &v2.AddressPool{ObjectMeta: named("x"), Status: v2.AddressPoolStatus{Conditions: c}})
		},
		"AddressBlock": func(f *inventory.Objects, c ...metav1.Condition) {
			f.Blocks = append(f.Blocks, &v2.AddressBlock{ObjectMeta: named("x"), Status: v2.AddressBlockStatus{Conditions: c}})
		},
		"AddressClaim": func(f *inventory.Objects, c ...metav1.Condition) {
			f.Claims = append(f.Claims, &v2.AddressClaim{ObjectMeta: named("x"), Status: v2.AddressClaimStatus{Conditions: c}})
		},
		"Egress": func(f *inventory.Objects, c ...metav1.Condition) {
			f.Egresses = append(f.Egresses, &v2.Egress{ObjectMeta: named("x"), Status: v2.EgressStatus{Conditions: c}})
		},
		"EgressPolicy": func(f *inventory.Objects, c ...metav1.Condition) {
			f.Policies = append(f.Policies, &v2.EgressPolicy{ObjectMeta: named("x"), Status: v2.EgressPolicyStatus{Conditions: c}})
		},
		"EgressClusterPolicy": func(f *inventory.Objects, c ...metav1.Condition) {
			f.ClusterPolicies = append(f.ClusterPolicies, &v2.EgressClusterPolicy{ObjectMeta: named("x"), Status: v2.EgressPolicyStatus{Conditions: c}})
		},
		"LoadBalancerGateway": func(f *inventory.Objects, c ...metav1.Condition) {
			heard := ago(time.Second)
			f.Gateways = append(f.Gateways, &v2.LoadBalancerGateway{ObjectMeta: named("x"), Status: v2.LoadBalancerGatewayStatus{Conditions: c, LastContact: &heard}})
		},
		"Service": func(f *inventory.Objects, c ...metav1.Condition) {
			f.Services = append(f.Services, &corev1.Service{ObjectMeta: named("x"), Status: corev1.ServiceStatus{Conditions: c}})
		},
	}
	for _, c := range []struct {
		kind, condition string
		bad             metav1.ConditionStatus
	}{
		{"AddressPool", v2.PoolExhausted, metav1.ConditionTrue}, {"AddressPool", v2.PoolOverlapping, metav1.ConditionTrue},
		{"AddressPool", v2.PoolSuspended, metav1.ConditionTrue}, {"AddressPool", v2.PoolTerminating, metav1.ConditionTrue},
		{"AddressPool", v2.PoolExcludedInUse, metav1.ConditionTrue},
		{"AddressBlock", v2.BlockConflicting, metav1.ConditionTrue}, {"AddressBlock", v2.BlockForwardingBlocked, metav1.ConditionTrue},
		{"AddressBlock", v2.BlockStandbyInStep, metav1.ConditionFalse},
		{"AddressClaim", v2.ClaimReady, metav1.ConditionFalse}, {"AddressClaim", v2.ClaimProvided, metav1.ConditionFalse}, {"AddressClaim", v2.ClaimAllowed, metav1.ConditionFalse},
		{"Egress", v2.EgressAvailable, metav1.ConditionFalse}, {"Egress", v2.EgressInvalidTemplate, metav1.ConditionTrue}, {"Egress", v2.EgressConntrackPressure, metav1.ConditionTrue},
		{"Egress", v2.EgressPortPressure, metav1.ConditionTrue}, {"Egress", v2.EgressClientPressure, metav1.ConditionTrue}, {"Egress", v2.EgressUnstableFlows, metav1.ConditionTrue},
		{"Egress", v2.EgressConflicting, metav1.ConditionTrue}, {"Egress", v2.EgressAddressesReady, metav1.ConditionFalse},
		{"EgressPolicy", v2.PolicyAccepted, metav1.ConditionFalse}, {"EgressPolicy", v2.PolicyConflicting, metav1.ConditionTrue},
		{"EgressClusterPolicy", v2.PolicyAccepted, metav1.ConditionFalse}, {"EgressClusterPolicy", v2.PolicyConflicting, metav1.ConditionTrue},
		{"LoadBalancerGateway", v2.GatewayApplied, metav1.ConditionFalse},
		{"Service", loadbalancer.ConditionAssigned, metav1.ConditionFalse}, {"Service", loadbalancer.ConditionServed, metav1.ConditionFalse},
		{"Service", loadbalancer.ConditionPolicies, metav1.ConditionFalse},
	} {
		t.Run(c.kind+"/"+c.condition, func(t *testing.T) {
			for status, want := range map[metav1.ConditionStatus]bool{metav1.ConditionTrue: c.bad == metav1.ConditionTrue, metav1.ConditionFalse: c.bad == metav1.ConditionFalse, metav1.ConditionUnknown: true} {
				f := inventory.Objects{Now: now, Leases: leading(ago(0))}
				kinds[c.kind](&f, is(c.condition, status), is("example.org/Other", metav1.ConditionTrue), is("example.org/Another", metav1.ConditionFalse))
				kinds[c.kind](&f)
				var wanted []health.Finding
				if want {
					wanted = []health.Finding{{Kind: c.kind, Name: "x", Reason: "Because", Message: c.condition + " is " + string(status), Since: ago(time.Minute)}}
				}
				if diff := cmp.Diff(wanted, health.Findings(f)); diff != "" {
					t.Errorf("%s: %s", status, diff)
				}
			}
		})
	}
}

// leading has Leases that were renewed, the last one by nobody who said when.
func leading(at metav1.Time) (all []*coordinationv1.Lease) {
	renewed := metav1.NewMicroTime(at.Time)
	for _, name := range []string{plan.IPAMLease, plan.EgressLease, plan.LBLease} {
		l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name, CreationTimestamp: ago(time.Hour)}}
		if l.Spec.RenewTime = &renewed; name == plan.LBLease {
			l.CreationTimestamp, l.Spec.RenewTime = at, nil
		}
		all = append(all, l)
	}
	return all
}

// A controller without a leader is a finding if there is anything that it has to do with.
func TestLeaders(t *testing.T) {
	managed := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{loadbalancer.AnnotationAssigned: ""}}}
	heard := ago(time.Second)
	for _, tt := range []struct {
		name    string
		objects inventory.Objects
		program string
	}{
		{"AddressPool", inventory.Objects{Pools: []*v2.AddressPool{{}}}, "ipam"},
		{"AddressBlock", inventory.Objects{Blocks: []*v2.AddressBlock{{}}}, "ipam"},
		{"AddressClaim", inventory.Objects{Claims: []*v2.AddressClaim{{}}}, "ipam"},
		{"Egress", inventory.Objects{Egresses: []*v2.Egress{{}}}, "egress"},
		{"EgressPolicy", inventory.Objects{Policies: []*v2.EgressPolicy{{}}}, "egress"},
		{"EgressClusterPolicy", inventory.Objects{ClusterPolicies: []*v2.EgressClusterPolicy{{}}}, "egress"},
		{"Service", inventory.Objects{Services: []*corev1.Service{managed}}, "lb"},
		{"LoadBalancerGateway", inventory.Objects{Gateways: []*v2.LoadBalancerGateway{{Status: v2.LoadBalancerGatewayStatus{LastContact: &heard}}}}, "lb"},
		{"Service of others", inventory.Objects{Services: []*corev1.Service{{}}}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := tt.objects
			f.Now, f.Leases = now, leading(ago(time.Minute))
			if got := health.Findings(f); len(got) > 0 {
				t.Errorf("with leaders there are %+v", got)
			}
			f.Leases = leading(ago(2 * time.Minute))
			var stale, never []health.Finding
			if tt.program != "" {
				says := "No coil-" + tt.program + "-controller leads: see that its pods run"
				stale = []health.Finding{{Kind: "Lease", Namespace: "kube-system", Name: "coil-" + tt.program + "-leader", Reason: "NoLeader", Message: says, Since: ago(2 * time.Minute)}}
				never = []health.Finding{{Kind: "Lease", Name: "coil-" + tt.program + "-leader", Reason: "NoLeader", Message: says + "; none ever has"}}
			}
			if diff := cmp.Diff(stale, health.Findings(f)); diff != "" {
				t.Error(diff)
			}
			f.Leases = nil
			if diff := cmp.Diff(never, health.Findings(f)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// What takes longer than a minute is a finding: deletions, and machines that say nothing.
func TestLate(t *testing.T) {
	for _, late := range []bool{false, true} {
		since := ago(time.Second)
		if late {
			since = ago(2 * time.Minute)
		}
		going := named("going")
		going.DeletionTimestamp, going.Finalizers = &since, []string{"coil.cybozu.com/node"}
		fresh := named("fresh")
		fresh.CreationTimestamp = since
		node := &corev1.Node{ObjectMeta: fresh}
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		f := inventory.Objects{
			Blocks: []*v2.AddressBlock{{ObjectMeta: going}}, Leases: leading(ago(0)),
			Gateways: []*v2.LoadBalancerGateway{{ObjectMeta: fresh}, {ObjectMeta: named("old"), Status: v2.LoadBalancerGatewayStatus{LastContact: &since}}},
			Nodes:    []*corev1.Node{node}, Now: now,
		}
		var want []string
		if late {
			want = []string{
				"AddressBlock going: Terminating", "LoadBalancerGateway fresh: Silent", "LoadBalancerGateway old: Silent", "Node fresh: NoCoild",
			}
		}
		if diff := cmp.Diff(want, brief(health.Findings(f))); diff != "" {
			t.Errorf("late %t: %s", late, diff)
		}
	}
}

// What waits for a reason of its own, what others look after, and a coild that isn't ready only now is no finding.
func TestNotLate(t *testing.T) {
	deleted := func(name string, ago metav1.Time) metav1.ObjectMeta {
		m := named(name)
		m.DeletionTimestamp, m.Finalizers = &ago, []string{"example.org/one"}
		return m
	}
	gone := func(name, node string, since time.Duration) *v2.AddressBlock {
		b := &v2.AddressBlock{ObjectMeta: deleted(name, ago(since))}
		b.Labels, b.Annotations = map[string]string{v2.LabelNode: node}, map[string]string{v2.AnnotationNodeGone: "2026-01-01T11:55:00Z uid"}
		return b
	}
	service := func(name string, ours bool) *corev1.Service {
		s := &corev1.Service{ObjectMeta: deleted(name, ago(time.Hour))}
		if ours {
			s.Annotations = map[string]string{loadbalancer.AnnotationAssigned: ""}
		}
		return s
	}
	node := func(name, system string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: named(name)}
		n.Labels = map[string]string{corev1.LabelOSStable: system}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		return n
	}
	coild := func(node, name string, created, unready metav1.Time) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name, CreationTimestamp: created}, Spec: corev1.PodSpec{NodeName: node}}
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse, LastTransitionTime: unready}}
		return p
	}
	pool := func(name string, purpose v2.PoolPurpose, exhausted metav1.ConditionStatus) *v2.AddressPool {
		return &v2.AddressPool{ObjectMeta: named(name), Spec: v2.AddressPoolSpec{Purpose: purpose}, Status: v2.AddressPoolStatus{Conditions: []metav1.Condition{is(v2.PoolExhausted, exhausted)}}}
	}
	got := health.Findings(inventory.Objects{
		Pools:    []*v2.AddressPool{pool("pods", "", metav1.ConditionTrue), pool("floating", v2.PurposeFloating, metav1.ConditionTrue), pool("broken", v2.PurposeFloating, metav1.ConditionUnknown)},
		Blocks:   []*v2.AddressBlock{gone("waits", "away", 10*time.Minute), gone("stays", "away", 12*time.Minute), gone("again", "restarted", 2*time.Minute)},
		Services: []*corev1.Service{service("theirs", false), service("ours", true)},
		Nodes:    []*corev1.Node{node("windows", "windows"), node("linux", "linux"), node("restarted", "linux"), node("updated", "linux"), node("broken", "linux")},
		Coilds: []*corev1.Pod{
			coild("restarted", "coild-a", ago(time.Hour), ago(time.Second)), coild("updated", "coild-b", ago(time.Hour), ago(time.Minute*2)), coild("updated", "coild-c", ago(time.Second), metav1.Time{}),
			coild("broken", "coild-d", ago(time.Hour), ago(2*time.Minute)),
		},
		Leases: leading(ago(0)), Now: now,
	})
	want := []string{
		"AddressPool pods: Because", "AddressPool broken: Because", "AddressBlock stays: Terminating", "AddressBlock again: Terminating", "Service ours: Terminating", "Node linux: NoCoild",
		"Node broken: CoildNotReady",
	}
	if diff := cmp.Diff(want, brief(got)); diff != "" {
		t.Error(diff)
	}
	if last := got[len(got)-1]; last.Since != ago(2*time.Minute) {
		t.Errorf("coild isn't ready since %s", last.Since)
	}
}

// brief is each finding in a line.
func brief(all []health.Finding) (lines []string) {
	for _, f := range all {
		lines = append(lines, fmt.Sprintf("%s: %s", f.Object(), f.Reason))
	}
	return lines
}

// A node can't start pods if it, or its coild, isn't ready.
func TestNodes(t *testing.T) {
	node := func(name string, ready corev1.ConditionStatus) *corev1.Node {
		n := &corev1.Node{ObjectMeta: named(name)}
		if ready != "" {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
		}
		return n
	}
	coild := func(node string, ready bool, reason string) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: named("coild-" + node)}
		p.Namespace, p.Spec.NodeName = "kube-system", node
		if ready {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}
		if reason != "" {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "coild", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}}
		}
		return p
	}
	got := health.Findings(inventory.Objects{
		Nodes: []*corev1.Node{
			node("fine", corev1.ConditionTrue), node("updating", corev1.ConditionTrue), node("without", corev1.ConditionTrue), node("crashing", corev1.ConditionTrue),
			node("away", corev1.ConditionUnknown), node("new", ""),
		},
		Coilds: []*corev1.Pod{
			coild("fine", true, ""), coild("updating", false, ""), coild("updating", true, ""), coild("crashing", false, "CrashLoopBackOff"), coild("away", false, ""),
		},
		Now: now,
	})
	want := []health.Finding{
		{Kind: "Node", Name: "without", Reason: "NoCoild", Message: "No pod of coild is on the node: its DaemonSet may not tolerate a taint of it", Since: ago(time.Hour)},
		{Kind: "Node", Name: "crashing", Reason: "CoildNotReady", Message: "coild isn't ready: see the log of pod kube-system/coild-crashing; coild is CrashLoopBackOff", Since: ago(time.Hour)},
		{Kind: "Node", Name: "away", Reason: "NotReady", Message: "kubelet isn't ready, or isn't heard"},
		{Kind: "Node", Name: "new", Reason: "NotReady", Message: "kubelet isn't ready, or isn't heard", Since: ago(time.Hour)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

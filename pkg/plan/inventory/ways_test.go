package inventory_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inventory"
)

// Policies of both kinds tell their Egress, where packets leave, and what is wrong; those of the cluster come first.
func TestPolicies(t *testing.T) {
	since := metav1.Unix(1000, 0)
	status := v2.EgressPolicyStatus{
		Resolved: &v2.ResolvedPolicy{Egress: &v2.EgressReference{Namespace: "internet", Name: "nat"}}, Node: "n1", Router: "nat-1", Since: &since, Clients: 3,
		Summary: v2.PolicySummary{Address: "192.0.2.1"},
		Conditions: []metav1.Condition{
			{Type: v2.PolicyConflicting, Status: metav1.ConditionTrue, Message: "b"}, {Type: v2.PolicyAccepted, Status: metav1.ConditionFalse, Message: "a"}},
	}
	use := v2.EgressUse{Destinations: []string{"10.0.0.0/8"}, OnFailure: v2.EgressFailureNode}
	well := v2.EgressPolicyStatus{Conditions: []metav1.Condition{{Type: v2.PolicyConflicting, Status: metav1.ConditionFalse}, {Type: v2.PolicyAccepted, Status: metav1.ConditionTrue}}}
	got := inventory.Policies(inventory.Objects{
		Policies: []*v2.EgressPolicy{
			{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "b"}}, {ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "a"}, Spec: v2.EgressPolicySpec{EgressUse: use}, Status: status},
		},
		ClusterPolicies: []*v2.EgressClusterPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "rest"}, Status: well}},
	})
	want := []inventory.Policy{
		{Name: "rest"},
		{Namespace: "shop", Name: "a", Egress: "internet/nat", Address: "192.0.2.1", Node: "n1", Router: "nat-1", Since: &since, Clients: 3, Destinations: []string{"10.0.0.0/8"},
			OnFailure: "Node", Attention: []string{"a", "b"}},
		{Namespace: "shop", Name: "b"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Gateways tell what their kernels know, and when they told it.
func TestGateways(t *testing.T) {
	heard := metav1.Unix(1000, 0)
	g := &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: "g2"}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"edge"}}}
	g.Status = v2.LoadBalancerGatewayStatus{Applied: v2.GatewayState{Services: 1, Ports: 2, Endpoints: 3}, LastContact: &heard,
		Conditions: []metav1.Condition{{Type: v2.GatewayApplied, Status: metav1.ConditionFalse, Message: "no kernel"}}}
	got := inventory.Gateways(inventory.Objects{Gateways: []*v2.LoadBalancerGateway{g, {ObjectMeta: metav1.ObjectMeta{Name: "g1"}}}})
	want := []inventory.Gateway{{Name: "g1"}, {Name: "g2", Pools: []string{"edge"}, Services: 1, Ports: 2, Endpoints: 3, Heard: &heard, Attention: []string{"no kernel"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

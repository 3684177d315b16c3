package egresspolicy

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// The leader counts policies by what is wrong with them.
func TestPoliciesAreCounted(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.s.Put(egressResource, &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "other", Generation: 1}, Spec: v2.EgressSpec{Destinations: []string{"0.0.0.0/0"}}})
		sc.pod(1, "web")
		sc.policy("a", "web", nil)
		sc.policy("b", "db", nil)
		sc.policy("c", "web", func(p *v2.EgressPolicy) { p.Spec.Egress.Name = "other" })
		sc.policy("d", "web", func(p *v2.EgressPolicy) { p.Spec.Egress.Name = "missing" })
		sc.s.Put(clusterResource, &v2.EgressClusterPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all", Generation: 1}, Spec: v2.EgressClusterPolicySpec{
			NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}}, Pods: &metav1.LabelSelector{},
		}})
		sc.run(5 * time.Second)
		want := `
			# HELP coil_egress_policy_conflicting_count EgressPolicies and EgressClusterPolicies that are Conflicting: pods of theirs follow something else. Only the leader exports it.
			# TYPE coil_egress_policy_conflicting_count gauge
			coil_egress_policy_conflicting_count{kind="EgressClusterPolicy"} 0
			coil_egress_policy_conflicting_count{kind="EgressPolicy"} 1
			# HELP coil_egress_policy_count EgressPolicies and EgressClusterPolicies, by the reason of their condition Accepted, Pending before they have one. Only the leader exports it.
			# TYPE coil_egress_policy_count gauge
			coil_egress_policy_count{kind="EgressClusterPolicy",reason="NoDefaultEgress"} 1
			coil_egress_policy_count{kind="EgressPolicy",reason="Accepted"} 3
			coil_egress_policy_count{kind="EgressPolicy",reason="EgressNotFound"} 1
		`
		if err := testutil.CollectAndCompare(sc.metrics, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
		if n := testutil.CollectAndCount(newCollector(sc.policies)); n != 0 {
			t.Errorf("the standby exports %d metrics", n)
		}
	})
}

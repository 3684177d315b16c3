package egresspolicy

import (
	"cmp"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// collector counts policies when it is asked.
type collector struct {
	policies kinds
	// leading says that the policies' conditions are this process's.
	leading            atomic.Bool
	count, conflicting *prometheus.Desc
}

// pending stands for the reason of policies without the condition.
const pending = "Pending"

func newCollector(k kinds) *collector {
	return &collector{
		policies: k,
		count: prometheus.NewDesc("coil_egress_policy_count",
			"EgressPolicies and EgressClusterPolicies, by the reason of their condition Accepted, Pending before they have one. Only the leader exports it.",
			[]string{"kind", "reason"}, nil),
		conflicting: prometheus.NewDesc("coil_egress_policy_conflicting_count",
			"EgressPolicies and EgressClusterPolicies that are Conflicting: pods of theirs follow something else. Only the leader exports it.", []string{"kind"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.count
	ch <- c.conflicting
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	if !c.leading.Load() {
		return
	}
	var ofNamespaces, ofCluster tally
	for _, p := range c.policies.policies.All() {
		ofNamespaces.add(p.Status)
	}
	for _, p := range c.policies.cluster.All() {
		ofCluster.add(p.Status)
	}
	for kind, t := range map[string]tally{"EgressPolicy": ofNamespaces, "EgressClusterPolicy": ofCluster} {
		ch <- prometheus.MustNewConstMetric(c.conflicting, prometheus.GaugeValue, float64(t.conflicting), kind)
		for reason, n := range t.reasons {
			ch <- prometheus.MustNewConstMetric(c.count, prometheus.GaugeValue, float64(n), kind, reason)
		}
	}
}

// tally counts the policies of a kind.
type tally struct {
	reasons     map[string]int
	conflicting int
}

func (t *tally) add(st v2.EgressPolicyStatus) {
	if t.reasons == nil {
		t.reasons = map[string]int{}
	}
	reason := pending
	if c := meta.FindStatusCondition(st.Conditions, v2.PolicyAccepted); c != nil {
		reason = cmp.Or(c.Reason, pending)
	}
	t.reasons[reason]++
	if meta.IsStatusConditionTrue(st.Conditions, v2.PolicyConflicting) {
		t.conflicting++
	}
}

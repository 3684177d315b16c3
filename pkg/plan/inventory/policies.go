package inventory

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Policy is an EgressPolicy, or an EgressClusterPolicy, with its use.
type Policy struct {
	// Namespace is empty for an EgressClusterPolicy.
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Egress is the one that the pods use, as namespace/name; empty, there is none.
	Egress string `json:"egress,omitempty"`
	// Address is the one by which the pods leave, or both of a pair, if the Egress has addresses. Node and Router are where that is, Since since when.
	Address string       `json:"address,omitempty"`
	Node    string       `json:"node,omitempty"`
	Router  string       `json:"router,omitempty"`
	Since   *metav1.Time `json:"since,omitempty"`
	// Clients is how many pods routers let in by it.
	Clients int32 `json:"clients"`
	// Destinations are its own, none if they are those of the Egress.
	Destinations []string `json:"destinations,omitempty"`
	// OnFailure is what becomes of packets that no router can forward.
	OnFailure string `json:"onFailure,omitempty"`
	// Attention are the messages of conditions that somebody should look at.
	Attention []string `json:"attention,omitempty"`
}

// Policies returns the EgressPolicies and EgressClusterPolicies, sorted by namespace and name, the latter first.
func Policies(o Objects) []Policy {
	all := make([]Policy, 0, len(o.Policies)+len(o.ClusterPolicies))
	for _, p := range o.ClusterPolicies {
		all = append(all, policy(p, p.Spec.EgressUse, p.Status))
	}
	for _, p := range o.Policies {
		all = append(all, policy(p, p.Spec.EgressUse, p.Status))
	}
	slices.SortFunc(all, func(a, b Policy) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return all
}

func policy(o metav1.Object, use v2.EgressUse, s v2.EgressPolicyStatus) Policy {
	p := Policy{
		Namespace: o.GetNamespace(), Name: o.GetName(), Address: s.Summary.Address, Node: s.Node, Router: s.Router, Since: s.Since, Clients: s.Clients,
		Destinations: use.Destinations, OnFailure: string(use.OnFailure),
	}
	if r := s.Resolved; r != nil && r.Egress != nil {
		p.Egress = r.Egress.Namespace + "/" + r.Egress.Name
	}
	for kind, good := range map[string]metav1.ConditionStatus{v2.PolicyAccepted: metav1.ConditionTrue, v2.PolicyConflicting: metav1.ConditionFalse} {
		if c := meta.FindStatusCondition(s.Conditions, kind); c != nil && c.Status != good {
			p.Attention = append(p.Attention, c.Message)
		}
	}
	slices.Sort(p.Attention)
	return p
}

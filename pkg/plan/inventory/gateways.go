package inventory

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Gateway is a LoadBalancerGateway with its use.
type Gateway struct {
	Name  string   `json:"name"`
	Pools []string `json:"pools"`
	// Services, Ports and Endpoints are how many its kernel knows.
	Services  int32 `json:"services"`
	Ports     int32 `json:"ports"`
	Endpoints int32 `json:"endpoints"`
	// Heard is when it told of itself last.
	Heard *metav1.Time `json:"heard,omitempty"`
	// Attention are the messages of conditions that somebody should look at.
	Attention []string `json:"attention,omitempty"`
}

// Gateways returns the LoadBalancerGateways, sorted by name.
func Gateways(o Objects) []Gateway {
	all := make([]Gateway, 0, len(o.Gateways))
	for _, g := range o.Gateways {
		s := g.Status
		row := Gateway{Name: g.Name, Pools: g.Spec.Pools, Services: s.Applied.Services, Ports: s.Applied.Ports, Endpoints: s.Applied.Endpoints, Heard: s.LastContact}
		if c := meta.FindStatusCondition(s.Conditions, v2.GatewayApplied); c != nil && c.Status != metav1.ConditionTrue {
			row.Attention = append(row.Attention, c.Message)
		}
		all = append(all, row)
	}
	slices.SortFunc(all, func(a, b Gateway) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

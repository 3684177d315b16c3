package egress

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// Pressure begins where high % of what there is are used, and ends below low %, so that a
// condition doesn't come and go.
const (
	highPressure = 80
	lowPressure  = 70
)

// Reasons of the conditions about pressure of an Egress.
const (
	// ReasonAlmostFull: ConntrackPressure, PortPressure or ClientPressure is True.
	ReasonAlmostFull = "AlmostFull"
	// ReasonEnough: ConntrackPressure, PortPressure or ClientPressure is False.
	ReasonEnough = "Enough"
)

// kindsOfPressure are the conditions, with the figures and the texts of each.
var kindsOfPressure = []struct {
	condition string
	of        func(gateway.Pressure) (used, most int)
	high      func(gateway.Pressure, v2.EgressPeering) string
	low       string
}{
	{
		v2.EgressConntrackPressure,
		func(p gateway.Pressure) (int, int) { return p.Connections, p.MaxConnections },
		func(p gateway.Pressure, peering v2.EgressPeering) string {
			return fmt.Sprintf("tracks more than %d %% of the %d connections that it can; when all are used, new ones fail. "+
				"Raise net.netfilter.nf_conntrack_max of the node, or %s", highPressure, p.MaxConnections, spread(peering))
		},
		"Routers can track more connections",
	},
	{
		v2.EgressPortPressure,
		func(p gateway.Pressure) (int, int) { return p.Ports, p.MaxPorts },
		func(p gateway.Pressure, peering v2.EgressPeering) string {
			return fmt.Sprintf("uses more than %d %% of its %d ports towards %s; when all are used, new connections there fail. "+
				"To relieve it, %s", highPressure, p.MaxPorts, p.Destination, spread(peering))
		},
		"Routers have ports left towards each destination",
	},
	{
		v2.EgressClientPressure,
		func(p gateway.Pressure) (int, int) { return p.Limited, 1 },
		func(p gateway.Pressure, _ v2.EgressPeering) string {
			return fmt.Sprintf("refuses new connections of clients that have as many as one may have: %s, %d in all. "+
				"If they need more, raise spec.maxConnectionsPerClient", p.Client, p.Limited)
		},
		"No client has as many connections as one may have",
	},
}

// spread is advice on how clients use fewer of a router. Each has one of a Service's routers for as long
// as it sends: only a later client may get another one.
func spread(peering v2.EgressPeering) string {
	if peering == v2.EgressPeeringDirect {
		return "add replicas: each client uses all of them"
	}
	return "add replicas for clients that come later, and set spec.peering to Direct so that those that there are use all of them; " +
		"spec.maxConnectionsPerClient bounds what one takes"
}

// setPressure sets the conditions about pressure from the answers of routers, by the names
// of their pods. Without an answer nothing is known.
func setPressure(conditions *[]metav1.Condition, answers map[string]gateway.Pressure, peering v2.EgressPeering, set func(metav1.Condition)) {
	for _, kind := range kindsOfPressure {
		if len(answers) == 0 {
			meta.RemoveStatusCondition(conditions, kind.condition)
			continue
		}
		limit := highPressure
		if meta.IsStatusConditionTrue(*conditions, kind.condition) {
			limit = lowPressure
		}
		c := metav1.Condition{Type: kind.condition, Status: metav1.ConditionFalse, Reason: ReasonEnough, Message: kind.low}
		for _, pod := range slices.Sorted(maps.Keys(answers)) {
			used, most := kind.of(answers[pod])
			if most > 0 && used*100 >= most*limit {
				c.Status, c.Reason, c.Message = metav1.ConditionTrue, ReasonAlmostFull, fmt.Sprintf("Pod %s %s", pod, kind.high(answers[pod], peering))
				break
			}
		}
		set(c)
	}
}

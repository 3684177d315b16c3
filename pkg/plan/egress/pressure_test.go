package egress

import (
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// The conditions about pressure, one status after another.
func TestPressure(t *testing.T) {
	connections := func(n int) gateway.Pressure {
		return gateway.Pressure{Connections: n, MaxConnections: 1000, MaxPorts: gateway.SourcePorts}
	}
	ports := func(n int) gateway.Pressure {
		return gateway.Pressure{MaxConnections: 1000, Ports: n, MaxPorts: 1000, Destination: "udp 192.0.2.1:53"}
	}
	limited := func(n int) gateway.Pressure {
		return gateway.Pressure{MaxConnections: 1000, MaxPorts: gateway.SourcePorts, Limited: n, Client: "10.1.0.5"}
	}
	type answers = map[string]gateway.Pressure
	e := testEgress("")
	for i, step := range []struct {
		name             string
		answers          answers
		conntrack, ports metav1.ConditionStatus // empty is no condition
		says             string
	}{
		{"not asked yet", nil, "", "", ""},
		{"no answer", answers{}, "", "", ""},
		{"little", answers{"a": connections(1), "b": ports(1)}, "False", "False", ""},
		{"almost much", answers{"a": connections(799), "b": ports(799)}, "False", "False", ""},
		{"many connections", answers{"a": connections(1), "b": connections(800)}, "True", "False", "Pod b tracks more than 80 % of the 1000 connections"},
		{"asked by another process", nil, "True", "False", "Pod b tracks"},
		{"hardly fewer", answers{"a": connections(1), "b": connections(700)}, "True", "False", "Pod b tracks"},
		{"fewer", answers{"a": connections(1), "b": connections(699)}, "False", "False", ""},
		{"hardly more", answers{"a": connections(799)}, "False", "False", ""},
		{"full", answers{"a": connections(1000)}, "True", "False", "Pod a"},
		{"many ports", answers{"a": ports(900)}, "False", "True", "Pod a uses more than 80 % of its 1000 ports towards udp 192.0.2.1:53"},
		{"a client is refused", answers{"a": connections(1), "b": limited(2)}, "False", "False", "Pod b refuses new connections of clients that have as many as one may have: 10.1.0.5, 2 in all"},
		{"none is", answers{"a": connections(1), "b": limited(0)}, "False", "False", ""},
		{"a kernel that tracks nothing", answers{"a": {MaxPorts: gateway.SourcePorts}}, "False", "False", ""},
		{"no router is left", answers{}, "", "", ""},
	} {
		now := metav1.NewTime(time.Unix(int64(i), 0))
		e.Status = Status(Facts{Egress: e, Pressure: step.answers, Now: now})
		said := ""
		clients := step.conntrack
		if clients != "" {
			clients = metav1.ConditionFalse
			for _, a := range step.answers {
				if a.Limited > 0 {
					clients = metav1.ConditionTrue
				}
			}
		}
		for condition, want := range map[string]metav1.ConditionStatus{
			v2.EgressConntrackPressure: step.conntrack, v2.EgressPortPressure: step.ports, v2.EgressClientPressure: clients,
		} {
			c := meta.FindStatusCondition(e.Status.Conditions, condition)
			switch {
			case c == nil && want != "", c != nil && c.Status != want:
				t.Errorf("%s: %s is %+v, want %q", step.name, condition, c, want)
			case c != nil && c.Status == metav1.ConditionTrue:
				said += c.Message
			}
		}
		if step.says == "" && said != "" || !strings.Contains(said, step.says) {
			t.Errorf("%s: it says %q, want %q", step.name, said, step.says)
		}
		again := Status(Facts{Egress: e, Pressure: step.answers, Now: metav1.NewTime(now.Add(time.Hour))})
		if len(again.Conditions) != len(e.Status.Conditions) {
			t.Errorf("%s: the second time %+v", step.name, again.Conditions)
		}
		for j, c := range again.Conditions {
			if c != e.Status.Conditions[j] {
				t.Errorf("%s: the second time %+v", step.name, c)
			}
		}
	}
}

// More replicas relieve a router only of clients that use all of them.
func TestPressureAdvice(t *testing.T) {
	full := gateway.Pressure{Connections: 1000, MaxConnections: 1000, Ports: 1000, MaxPorts: 1000, Destination: "tcp 192.0.2.1:443"}
	for peering, want := range map[v2.EgressPeering]string{
		"":                      "set spec.peering to Direct",
		v2.EgressPeeringService: "set spec.peering to Direct",
		v2.EgressPeeringDirect:  "add replicas: each client uses all of them",
	} {
		e := testEgress("")
		e.Spec.Peering = peering
		status := Status(Facts{Egress: e, Pressure: map[string]gateway.Pressure{"a": full}})
		for _, condition := range []string{v2.EgressConntrackPressure, v2.EgressPortPressure} {
			c := meta.FindStatusCondition(status.Conditions, condition)
			if c == nil || !strings.Contains(c.Message, want) {
				t.Errorf("%q: %s is %+v, want %q", peering, condition, c, want)
			}
		}
	}
}

package egress_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// The status names the node of each router that is ready, with the addresses of the router's families. Nothing floats.
func TestNodeAddressesOfTheStatus(t *testing.T) {
	router := func(node, name string, ips ...string) *corev1.Pod {
		p := routerOn(node, name, 1)
		for _, ip := range ips {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: ip})
		}
		return p
	}
	waiting, ending := router("a", "waiting", "10.1.0.3"), router("a", "ending", "10.1.0.4")
	waiting.Status.Conditions[0].Status = corev1.ConditionFalse
	ending.DeletionTimestamp = new(metav1.Now())
	e := &v2.Egress{Spec: v2.EgressSpec{Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfNode}}}
	facts := egress.Facts{Egress: e, Routers: []*corev1.Pod{waiting}, Now: metav1.Now(), InternalIPs: func(node string) []string {
		return map[string][]string{"a": {"192.0.2.1", "2001:db8::a"}, "b": {"192.0.2.2"}}[node]
	}}
	is := func(status metav1.ConditionStatus, reason string, want ...v2.EgressNodeAddress) {
		t.Helper()
		st := egress.Status(facts)
		i := slices.IndexFunc(st.Conditions, func(c metav1.Condition) bool { return c.Type == v2.EgressAddressesReady })
		if i < 0 || st.Conditions[i].Status != status || st.Conditions[i].Reason != reason {
			t.Errorf("conditions %+v, want AddressesReady %s for %s", st.Conditions, status, reason)
		}
		if d := cmp.Diff(want, st.NodeAddresses); d != "" || len(st.Addresses) > 0 {
			t.Errorf("addresses %+v, those of nodes (-want +got):\n%s", st.Addresses, d)
		}
	}
	is(metav1.ConditionFalse, egress.ReasonNoNodeReady)
	facts.Routers = []*corev1.Pod{
		waiting, ending, router("b", "r3", "10.1.0.5", "fd01::5"), router("a", "r2", "10.1.0.6"), router("a", "r1", "fd01::7", "10.1.0.7"), router("gone", "r4", "10.1.0.8"),
	}
	is(metav1.ConditionTrue, egress.ReasonNodeAddresses,
		v2.EgressNodeAddress{Router: "r1", Node: "a", EgressAddress: v2.EgressAddress{IPv4: "192.0.2.1", IPv6: "2001:db8::a"}},
		v2.EgressNodeAddress{Router: "r2", Node: "a", EgressAddress: v2.EgressAddress{IPv4: "192.0.2.1"}},
		v2.EgressNodeAddress{Router: "r3", Node: "b", EgressAddress: v2.EgressAddress{IPv4: "192.0.2.2"}},
		v2.EgressNodeAddress{Router: "r4", Node: "gone"})
	if claim, places := egress.AddressClaim(e), egress.Places(e, []*v2.AddressBlock{floatingBlock(0)}, facts.Routers, internalIPs); claim != nil || places != nil {
		t.Errorf("the claim %v, the places %v", claim, places)
	}
	facts.ForeignPods = true
	facts.Routers = nil
	is(metav1.ConditionFalse, egress.ReasonForeignPods)
	facts.Egress = &v2.Egress{Status: v2.EgressStatus{NodeAddresses: []v2.EgressNodeAddress{{Router: "r"}}}}
	if st := egress.Status(facts); len(st.NodeAddresses) > 0 {
		t.Errorf("an Egress without addresses has the status %+v", st)
	}
}

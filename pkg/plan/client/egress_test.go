package client

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

func TestClientEgressOf(t *testing.T) {
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "net", Name: "gw"}}
	e.Spec.Destinations = []string{"192.0.2.5/24", "nonsense", "2001:db8::/32"}
	e.Spec.FouSourcePortAuto = true
	e.Status.InClusterCIDRs = []string{"100.64.0.0/16"}
	service := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIPs: []string{"fd96::7", "10.96.0.7"}}}
	want := Egress{
		Name: "net/gw", Destinations: prefixes.Valid([]string{"192.0.2.0/24", "2001:db8::/32"}), InCluster: prefixes.Valid([]string{"100.64.0.0/16"}),
		Peers: clientAddrs("46", "10.96.0.7", "fd96::7"), SourcePortAuto: true,
	}
	comparable := cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})
	if d := cmp.Diff(want, EgressOf(e, service), comparable); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	e.Spec.Peering = v2.EgressPeeringDirect
	direct := want
	direct.Direct = true
	if d := cmp.Diff(direct, EgressOf(e, service), comparable); d != "" {
		t.Errorf("direct (-want +got):\n%s", d)
	}
	e.Spec.Peering = v2.EgressPeeringService
	want.Peers = clientAddrs("", "", "")
	for _, s := range []*corev1.Service{nil, {Spec: corev1.ServiceSpec{ClusterIPs: []string{corev1.ClusterIPNone}}}, {}} {
		if d := cmp.Diff(want, EgressOf(e, s), comparable); d != "" {
			t.Errorf("without addresses (-want +got):\n%s", d)
		}
	}
}

package lbgateway

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// A gateway exports the state of each election.
func TestElectionsAreExported(t *testing.T) {
	sc := newScene(t)
	sc.mu.Lock()
	sc.Gateway.vrrp.states = []v2.GatewayVRRPState{{RouterID: 10, Family: corev1.IPv4Protocol, State: "MASTER"}, {RouterID: 10, Family: corev1.IPv6Protocol, State: "FAULT"}}
	sc.mu.Unlock()
	const want = `
		# HELP coil_lb_gateway_vrrp_state 1 for each election by VRRP, by the state in which keepalived is.
		# TYPE coil_lb_gateway_vrrp_state gauge
		coil_lb_gateway_vrrp_state{family="IPv4",router_id="10",state="MASTER"} 1
		coil_lb_gateway_vrrp_state{family="IPv6",router_id="10",state="FAULT"} 1
	`
	if err := testutil.CollectAndCompare(sc.metrics, strings.NewReader(want), "coil_lb_gateway_vrrp_state"); err != nil {
		t.Error(err)
	}
}

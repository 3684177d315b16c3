package loadbalancer

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// The leader tells how each gateway is, and how many are the master of each election. A silent one is none.
func TestScenario37GatewaysAreCounted(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		pool := fakeapi.Find[*v2.AddressPool](sc.s, poolResource, "default").DeepCopy()
		pool.Spec.Announce, pool.Spec.VRRP = v2.AnnounceGateway, &v2.PoolVRRP{RouterID: 10, Instances: 2}
		sc.s.Put(poolResource, pool)
		tell := func(name, reason, first, second string) {
			sc.gateway(name, func(g *v2.LoadBalancerGateway) {
				g.Generation = 2
				g.Status.LastContact = new(metav1.Now())
				g.Status.Conditions = []metav1.Condition{{Type: v2.GatewayApplied, Reason: reason, ObservedGeneration: 2}}
				g.Status.VRRP = []v2.GatewayVRRPState{{RouterID: 10, Family: corev1.IPv4Protocol, State: first}, {RouterID: 11, Family: corev1.IPv4Protocol, State: second}}
			})
		}
		wants := func(when, want string) {
			t.Helper()
			sc.run(time.Second)
			if err := testutil.CollectAndCompare(newGatewayCollector(sc.Controller), strings.NewReader(want), "coil_lb_gateway_reason", "coil_lb_gateway_masters"); err != nil {
				t.Errorf("%s: %v", when, err)
			}
		}
		const reason, masters = `
			# HELP coil_lb_gateway_reason 1 for each LoadBalancerGateway, by the reason of its condition Applied; Silent if nothing was heard of it for a minute, Behind while it does what a former spec says, Pending before it tells anything. Only the leader exports it.
			# TYPE coil_lb_gateway_reason gauge
`, `
			# HELP coil_lb_gateway_masters Gateways that say that they are the master of an election by VRRP, without those of which nothing was heard for a minute. Only the leader exports it.
			# TYPE coil_lb_gateway_masters gauge
`
		sc.gateway("gw1", nil)
		wants("before a gateway tells anything", reason+`coil_lb_gateway_reason{gateway="gw1",reason="Pending"} 1
`)
		tell("gw1", v2.ReasonAllServed, "MASTER", "MASTER")
		tell("gw2", v2.ReasonKernelRefused, "BACKUP", "MASTER")
		wants("two masters of one election", masters+`
			coil_lb_gateway_masters{family="IPv4",pool="default",router_id="10"} 1
			coil_lb_gateway_masters{family="IPv4",pool="default",router_id="11"} 2
`+reason+`coil_lb_gateway_reason{gateway="gw1",reason="AllServed"} 1
			coil_lb_gateway_reason{gateway="gw2",reason="KernelRefused"} 1
`)
		for range 4 { // gw1 tells nothing any more
			sc.run(20 * time.Second)
			tell("gw2", v2.ReasonAllServed, "BACKUP", "MASTER")
		}
		sc.gateway("gw2", func(g *v2.LoadBalancerGateway) { g.Generation = 3 })
		wants("a silent master", masters+`
			coil_lb_gateway_masters{family="IPv4",pool="default",router_id="10"} 0
			coil_lb_gateway_masters{family="IPv4",pool="default",router_id="11"} 1
`+reason+`coil_lb_gateway_reason{gateway="gw1",reason="Silent"} 1
			coil_lb_gateway_reason{gateway="gw2",reason="Behind"} 1
`)
	})
}

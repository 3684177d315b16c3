package loadbalancer

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// gateway makes a gateway of the pool default, or changes it.
func (sc *scene) gateway(name string, change func(*v2.LoadBalancerGateway)) {
	g := fakeapi.Find[*v2.LoadBalancerGateway](sc.s, gatewayResource, name)
	if g == nil {
		g = &v2.LoadBalancerGateway{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"default"}, Endpoints: v2.EndpointsPod}}
	}
	if change != nil {
		change(g)
	}
	sc.s.Put(gatewayResource, g)
}

// does has a gateway do what blocks say, and tell so.
func (sc *scene) does(name string) {
	sc.gateway(name, func(g *v2.LoadBalancerGateway) {
		g.Status.LastContact = new(metav1.Now())
		for _, b := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
			g.Status.Applied.Generation, g.Status.Applied.Blocks = g.Generation, b.ResourceVersion
		}
	})
}

// A Service at an address of gateways tells it when one of these serves it, and names those that don't.
func TestServedByGateways(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		says := func(when, want string) {
			t.Helper()
			if c := meta.FindStatusCondition(sc.find("a").Status.Conditions, loadbalancer.ConditionServed); c == nil || c.Reason+": "+c.Message != want {
				t.Errorf("%s: %+v, want %q", when, c, want)
			}
		}
		sc.announce = v2.AnnounceGateway
		sc.service("a", nil)
		sc.run(5 * time.Second)
		says("without a gateway", "NoGateway: No LoadBalancerGateway names AddressPool default in its spec.pools")
		if b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "default-0"); len(b.Floating.Successors)+len(b.Floating.Announcers.Nodes) > 0 || b.Floating.Announcers.All || len(b.Floating.Ports) != 1 || b.Floating.Ports[0].Service != "shop/a" {
			t.Errorf("%+v", b.Floating)
		}
		sc.gateway("gw1", nil)
		sc.gateway("gw2", nil)
		sc.run(5 * time.Second)
		says("with gateways that do nothing yet", "WaitsForGateway: Not all gateways serve the address yet: it waits for gw1, gw2")
		sc.wants("with gateways that do nothing yet", "a", "", "AddressAssigned", "WaitsForGateway")
		sc.does("gw2")
		sc.run(time.Second)
		sc.wants("with one of two gateways", "a", "", "AddressAssigned", "WaitsForGateway")
		sc.does("gw1")
		sc.run(time.Second)
		says("with all gateways", "Served: Gateways serve the address: gw1, gw2")
		sc.wants("with all gateways", "a", "192.0.2.0", "AddressAssigned", "Served")
		sc.gateway("gw1", func(g *v2.LoadBalancerGateway) {
			g.Status.Errors = []v2.GatewayError{{Service: "shop/b", Message: "no"}, {Service: "shop/a", Message: "port 80 has no NodePort"}}
		})
		sc.run(time.Second)
		says("with a gateway that can't", "Served: Gateways serve the address: gw2; gateway gw1: port 80 has no NodePort")
		sc.gateway("gw2", func(g *v2.LoadBalancerGateway) { g.Spec.Pools = []string{"four"} })
		sc.run(time.Second)
		says("without one that can", "GatewayError: No gateway serves the Service; gateway gw1: port 80 has no NodePort")
		sc.gateway("gw1", func(g *v2.LoadBalancerGateway) { g.Status.Errors = nil })
		sc.does("gw1")
		sc.run(time.Second)
		says("when it can", "Served: Gateways serve the address: gw1")
		for range 10 { // which tells no more than that it is there
			sc.does("gw1")
			sc.run(20 * time.Second)
			says("while it is heard of", "Served: Gateways serve the address: gw1")
		}
		sc.run(2 * silence)
		says("when nothing is heard", "GatewaySilent: The gateways of AddressPool default may serve the address, and don't reach the API server: see whether coil-lb-agent runs there; nothing was heard for a minute of gw1")
		sc.wants("when nothing is heard", "a", "192.0.2.0", "AddressAssigned", "GatewaySilent")
		sc.gateway("gw2", func(g *v2.LoadBalancerGateway) { g.Spec.Pools = []string{"default"} })
		sc.does("gw2")
		sc.run(time.Second)
		says("with another one", "Served: Gateways serve the address: gw2; nothing was heard for a minute of gw1")
		sc.does("gw1")
		sc.run(time.Second)
		says("when it comes back", "Served: Gateways serve the address: gw1, gw2")
		sc.s.Drop(gatewayResource, "gw1")
		sc.run(time.Second)
		says("without it", "Served: Gateways serve the address: gw2")
	})
}

// A gateway that can do nothing for any Service, such as one whose keepalived doesn't run, names no Service in its status. All Services say so, and say when the gateway can
// serve them again.
func TestGatewayWithoutKeepalived(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		says := func(when, address, want string) {
			t.Helper()
			s := sc.find("a")
			if c := meta.FindStatusCondition(s.Status.Conditions, loadbalancer.ConditionServed); c == nil || c.Reason+": "+c.Message != want || told(s) != address {
				t.Errorf("%s: %q, %+v; want %q, %q", when, told(s), c, address, want)
			}
		}
		applied := func(name string, status metav1.ConditionStatus, reason, message string) {
			sc.does(name)
			sc.gateway(name, func(g *v2.LoadBalancerGateway) {
				meta.SetStatusCondition(&g.Status.Conditions, metav1.Condition{Type: v2.GatewayApplied, Status: status, Reason: reason, Message: message})
			})
			sc.run(time.Second)
		}
		sc.announce = v2.AnnounceGateway
		applied("gw1", metav1.ConditionFalse, v2.ReasonVRRPFailed, "keepalived isn't running")
		sc.service("a", nil)
		sc.run(5 * time.Second)
		says("before keepalived is started", "", "GatewayError: No gateway serves the Service; gateway gw1: keepalived isn't running")
		applied("gw1", metav1.ConditionTrue, v2.ReasonAllServed, "The machine serves all Services")
		says("when it is started", "192.0.2.0", "Served: Gateways serve the address: gw1")
		applied("gw1", metav1.ConditionFalse, v2.ReasonVRRPFailed, "keepalived isn't running")
		says("when it is stopped", "192.0.2.0", "GatewayError: No gateway serves the Service; gateway gw1: keepalived isn't running")
		applied("gw1", metav1.ConditionFalse, v2.ReasonKernelRefused, "no such file")
		says("when the kernel refuses the rules, too", "192.0.2.0", "GatewayError: No gateway serves the Service; gateway gw1: no such file")
		applied("gw2", metav1.ConditionTrue, v2.ReasonAllServed, "The machine serves all Services")
		says("with another gateway", "192.0.2.0", "Served: Gateways serve the address: gw2; gateway gw1: no such file")
		applied("gw1", metav1.ConditionTrue, v2.ReasonAllServed, "The machine serves all Services")
		says("when all is well", "192.0.2.0", "Served: Gateways serve the address: gw1, gw2")
	})
}

// A Service says that a gateway can't serve it, also if the gateway can't serve more than it lists. It is looked at when the gateway's spec changes.
func TestGatewayListsNoMore(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		says := func(when, address, want string) {
			t.Helper()
			s := sc.find("z")
			if c := meta.FindStatusCondition(s.Status.Conditions, loadbalancer.ConditionServed); c == nil || c.Reason != want || told(s) != address {
				t.Errorf("%s: %q, %+v; want %q, %q", when, told(s), c, address, want)
			}
		}
		sc.announce = v2.AnnounceGateway
		sc.gateway("gw1", func(g *v2.LoadBalancerGateway) {
			g.Spec.Endpoints = v2.EndpointsNodePort
			for i := range v2.MaxGatewayErrors {
				g.Status.Errors = append(g.Status.Errors, v2.GatewayError{Service: fmt.Sprint("shop/", i), Message: "port 80 has no NodePort"})
			}
		})
		sc.service("z", nil)
		sc.run(5 * time.Second)
		sc.does("gw1")
		sc.run(time.Second)
		says("without a NodePort", "", "GatewayError")
		sc.service("z", func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 30080 })
		sc.run(time.Second)
		says("with one", "192.0.2.0", "Served")
		sc.gateway("gw1", func(g *v2.LoadBalancerGateway) { g.Spec.Endpoints = v2.EndpointsClusterIP })
		sc.run(time.Second)
		says("at ClusterIPs", "192.0.2.0", "GatewayError")
	})
}

// A gateway that is given another pool serves that when it says that it has read its spec: the blocks that it has done may be newer.
func TestGatewayGetsAnotherPool(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.announce = v2.AnnounceGateway
		sc.gateway("gw1", func(g *v2.LoadBalancerGateway) { g.Generation, g.Spec.Pools = 1, []string{"four"} })
		sc.service("a", nil)
		sc.run(5 * time.Second)
		sc.does("gw1")
		sc.run(time.Second)
		sc.wants("without a gateway of its pool", "a", "", "AddressAssigned", "NoGateway")
		sc.gateway("gw1", func(g *v2.LoadBalancerGateway) { g.Generation, g.Spec.Pools = 2, []string{"four", "default"} })
		sc.run(5 * time.Second)
		sc.wants("before the gateway has read its spec", "a", "", "AddressAssigned", "WaitsForGateway")
		sc.does("gw1")
		sc.run(time.Second)
		sc.wants("when it has", "a", "192.0.2.0", "AddressAssigned", "Served")
	})
}

// A gateway's kernel that refuses the rules is told once by each Service, though the message names other Services each second.
func TestRefusingKernelIsToldOnce(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.announce = v2.AnnounceGateway
		sc.gateway("gw1", nil)
		for i := range 10 {
			sc.service(fmt.Sprint("s-", i), func(s *corev1.Service) { s.Spec.Ports[0].Port += int32(i) })
		}
		sc.run(5 * time.Second)
		sc.does("gw1")
		sc.run(time.Second)
		before := sc.s.Calls()["update services"]
		for i := range 20 {
			sc.gateway("gw1", func(g *v2.LoadBalancerGateway) {
				meta.SetStatusCondition(&g.Status.Conditions, metav1.Condition{
					Type: v2.GatewayApplied, Status: metav1.ConditionFalse, Reason: v2.ReasonKernelRefused, Message: fmt.Sprintf("change what is done for Service shop/s-%d: no such file", i),
				})
			})
			sc.run(time.Second)
		}
		if n := sc.s.Calls()["update services"] - before; n != 10 {
			t.Errorf("10 Services are written %d times, want once each", n)
		}
	})
}

// The Services of an address are in order, whatever order the cache has: otherwise each plan would look at the address again.
func TestUsersAreInOrder(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		for i := range 20 {
			sc.service(fmt.Sprintf("s-%02d", i), func(s *corev1.Service) { s.Spec.Ports[0].Port += int32(i) })
		}
		sc.run(5 * time.Second)
		for range 10 {
			testkit.Check(t, sc.plan(t.Context()))
			sc.mu.Lock()
			for claim, keys := range sc.users {
				if len(keys) != 20 || !slices.IsSortedFunc(keys, func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) }) {
					t.Errorf("claim %s has %v", claim, keys)
				}
			}
			sc.mu.Unlock()
		}
	})
}

// Only Services that exist, and are the controller's, are looked at when a gateway tells that it is there.
func TestGoneServicesWaitForNoGateway(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.announce = v2.AnnounceGateway
		sc.gateway("gw1", nil)
		for _, name := range []string{"deleted", "of another type", "that waits"} {
			sc.service(name, nil)
		}
		waiting := func() int {
			sc.mu.Lock()
			defer sc.mu.Unlock()
			return len(sc.heard.waiting)
		}
		sc.run(5 * time.Second)
		if n := waiting(); n != 3 {
			t.Errorf("%d Services wait for the gateway, want 3", n)
		}
		sc.service("deleted", deleted)
		sc.service("of another type", func(s *corev1.Service) { s.Spec.Type, s.Spec.LoadBalancerClass = corev1.ServiceTypeClusterIP, nil })
		sc.run(5 * time.Second)
		if n := waiting(); n != 1 {
			t.Errorf("%d Services wait for the gateway, want 1", n)
		}
	})
}

// A change of a Service that gateways follow within seconds is written once: nothing says that it waits.
func TestGatewaysFollowSoon(t *testing.T) {
	inScene(t, func(t *testing.T, sc *scene) {
		sc.announce = v2.AnnounceGateway
		sc.service("a", nil)
		sc.gateway("gw1", nil)
		sc.run(time.Second)
		sc.does("gw1")
		sc.run(5 * time.Second)
		before := sc.s.Calls()["update services"]
		for range 20 {
			sc.service("a", func(s *corev1.Service) { s.Spec.Ports[0].Port++ })
			sc.run(time.Second)
			sc.does("gw1")
			sc.run(time.Second)
		}
		sc.wants("in the end", "a", "192.0.2.0", "AddressAssigned", "Served")
		if n := sc.s.Calls()["update services"] - before; n > 20 { // the generation
			t.Errorf("20 changes wrote the status %d times", n)
		}
		if !slices.ContainsFunc(fakeapi.All[*v2.AddressBlock](sc.s, blockResource), loadbalancer.OfGateways) {
			t.Error("no block is of gateways")
		}
	})
}

package lbgateway

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/keepalived"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// says waits until the condition Applied has a reason, and its message a text.
func (sc *scene) says(when, reason, text string) {
	sc.t.Helper()
	sc.await(when, func() error {
		if st := sc.own().Status; condition(st) != reason || !strings.Contains(st.Conditions[0].Message, text) {
			return fmt.Errorf("%+v", st.Conditions)
		}
		return nil
	})
}

// Scenario 20: what keepalived doesn't do is told, and tried again. keepalived goes on as before, and so does the kernel, which gets new endpoints all the same.
func TestScenario20KeepalivedFails(t *testing.T) {
	sc, d := newElectedScene(t)
	var fails atomic.Pointer[error]
	takes := func() (time.Duration, error) {
		if err := fails.Load(); err != nil {
			return 0, *err
		}
		return 0, nil
	}
	d.takes.Store(&takes)
	sc.service("a", nil)
	sc.endpoints("a", 0, "10.1.0.1")
	sc.block(1, "a", "")
	sc.has(d, "at first", 1)
	fails.Store(new(errors.New("keepalived refuses the configuration: no")))
	sc.block(2, "a", "")
	sc.says("while keepalived refuses", v2.ReasonVRRPFailed, "keepalived refuses the configuration: no")
	if has := addressesOf(d.is); len(has) != 2 {
		t.Errorf("keepalived has %v", has)
	}
	sc.endpoints("a", 0, "10.1.0.9")
	sc.settled("with another endpoint, while keepalived refuses")
	fails.Store(new(fmt.Errorf("the configuration is in place: %w", keepalived.ErrNotRunning)))
	sc.says("without keepalived", v2.ReasonVRRPFailed, "the configuration is in place: keepalived isn't running")
	if message := sc.own().Status.Conditions[0].Message; strings.Count(message, "start it") != 1 {
		t.Errorf("what to do isn't told once: %q", message)
	}
	fails.Store(nil)
	sc.has(d, "when it takes it", 1, 2)
	sc.says("when it takes it", v2.ReasonAllServed, "")
}

// Scenario 21: what is broken in a LoadBalancerGateway or an AddressPool never reaches keepalived. The status says what it is.
func TestScenario21BrokenInput(t *testing.T) {
	sc, d := newElectedScene(t)
	sc.service("a", nil)
	sc.block(1, "a", "")
	sc.has(d, "at first", 1)
	asked := d.asked.Load()
	vrrp := *sc.own().Spec.VRRP.DeepCopy()
	for _, broken := range []struct {
		name, says string
		vrrp       v2.GatewayVRRP
		pool       *v2.AddressPool
	}{
		{"a link that ends its line", "interface", v2.GatewayVRRP{Interface: "eth0\n}", Sources: vrrp.Sources}, nil},
		{"a link that opens a block", "interface", v2.GatewayVRRP{Interface: "eth0 {", Sources: vrrp.Sources}, nil},
		{"an address link with a quote", "interface", v2.GatewayVRRP{Interface: "eth0", AddressInterface: `"`, Sources: vrrp.Sources}, nil},
		{"no link", "interface", v2.GatewayVRRP{Sources: vrrp.Sources}, nil},
		{"a source for many", "224.0.0.1", v2.GatewayVRRP{Interface: "eth0", Sources: []string{"224.0.0.1"}}, nil},
		{"a virtual router ID too large", "256", vrrp, poolOf("dmz", 256, 1)},
	} {
		pool := poolOf("dmz", 10, 1)
		if broken.pool != nil {
			pool = broken.pool
		}
		sc.s.Put(poolResource, pool)
		sc.spec(func(s *v2.LoadBalancerGatewaySpec) { s.VRRP = &broken.vrrp })
		sc.says(broken.name, v2.ReasonVRRPFailed, broken.says)
		if n := d.asked.Load(); n != asked {
			t.Errorf("%s: keepalived was told", broken.name)
			asked = n
		}
	}
	sc.s.Put(poolResource, poolOf("dmz", 10, 1))
	sc.spec(func(s *v2.LoadBalancerGatewaySpec) { s.VRRP = &vrrp })
	sc.says("in the end", v2.ReasonAllServed, "")
	sc.block(2, "a", "")
	sc.has(d, "in the end", 1, 2)
}

// Scenario 36: a Service that can't be served is told, whatever is wrong with it, and delays no other one.
func TestScenario36InvalidServices(t *testing.T) {
	sc := newScene(t)
	sc.service("good", nil)
	sc.block(1, "good", "good")
	sc.settled("at first")
	wrong := func(change func(*corev1.Service)) func() { return func() { sc.service("bad", change) } }
	node, own := v2.EndpointsNodePort, v2.EndpointsClusterIP
	for i, c := range []struct {
		name      string
		endpoints v2.GatewayEndpoints
		breaks    func()
		says      string
	}{
		{"no NodePort", node, wrong(func(s *corev1.Service) { s.Spec.Ports[0].NodePort = 0 }), "NodePort"},
		{"a range that is none", node, wrong(func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/24", "nonsense"} }), "nonsense"},
		{"headless", own, wrong(func(s *corev1.Service) { s.Spec.ClusterIPs = []string{corev1.ClusterIPNone} }), "ClusterIP"},
		{"without a ClusterIP of a family", own, wrong(func(s *corev1.Service) { s.Spec.ClusterIPs = s.Spec.ClusterIPs[:1] }), "IPv6"},
		{"an AddressBlock that is none", node, func() {
			b := fakeapi.Find[*v2.AddressBlock](sc.s, blockResource, "dmz-2")
			b.IPv4 = new("nonsense")
			sc.s.Put(blockResource, b)
		}, "dmz-2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sc.spec(func(s *v2.LoadBalancerGatewaySpec) { s.Endpoints = c.endpoints })
			sc.s.Drop(serviceResource, "shop/bad")
			sc.s.Drop(blockResource, "dmz-2")
			sc.service("bad", nil)
			sc.endpoints("bad", 0, "10.1.0.1", "fd01::1")
			sc.endpoints("good", 0, "10.1.0.1", "fd01::1")
			sc.block(2, "bad", "")
			c.breaks()
			sc.told("broken", func(st v2.LoadBalancerGatewayStatus) error {
				if len(st.Errors) != 1 || st.Errors[0].Service != "shop/bad" || !strings.Contains(st.Errors[0].Message, c.says) || condition(st) != v2.ReasonServiceErrors {
					return fmt.Errorf("%+v", st)
				}
				return nil
			})
			sc.service("good", func(s *corev1.Service) {
				s.Spec.LoadBalancerSourceRanges = []string{fmt.Sprintf("192.0.2.%d/32", i), "2001:db8::/32"}
			})
			sc.await("the other Service is followed", func() error {
				if out := testkit.Must(sc.machine.Run("nft", "list", "table", "inet", "coil_lb"))(sc.t); !strings.Contains(out, fmt.Sprintf("192.0.2.%d ", i)) {
					return errors.New(out)
				}
				return nil
			})
			sc.settled("broken")
		})
	}
}

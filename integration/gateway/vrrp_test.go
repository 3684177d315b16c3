package gateway

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// pair is two gateways between two networks: a client's, in which the pool's addresses are, and one of pods.
type pair struct {
	lab
	gateways []*rig.Gateway
}

const (
	vrrpPool      = "dmz-vrrp"
	vrrpNamespace = "shop-vrrp"
)

func newPair(t *testing.T) *pair {
	t.Helper()
	p, ctx := &pair{lab: lab{Rig: shared.Rig(t), t: t}}, t.Context()
	testkit.Check(t, p.AddPool(ctx, vrrpPool, 0, rig.Dual("192.0.2.128/28", "2001:db8:2::100/124")), p.AddNamespace(ctx, vrrpNamespace, ""))
	patch := []byte(`{"spec":{"announce":"Gateway","purpose":"Floating","vrrp":{"routerID":10,"instances":2}}}`)
	testkit.Must(p.Coil.CoilV2().AddressPools().Patch(ctx, vrrpPool, types.MergePatchType, patch, metav1.PatchOptions{}))(t)
	for ns, addrs := range map[**netlab.NS][]string{&p.client: {"192.0.2.254/24", "2001:db8:2::fe/64"}, &p.pods: {"10.1.0.2/24", "10.1.0.3/24", "fd01::2/64", "fd01::3/64"}} {
		*ns = testkit.Must(netlab.New())(t)
		t.Cleanup(func() { testkit.Check(t, (*ns).Close()) })
		var prefixes []netip.Prefix
		for _, a := range addrs {
			prefixes = append(prefixes, netip.MustParsePrefix(a))
		}
		testkit.Check(t, (*ns).IP(ctx, netlab.AddBridge("br0", prefixes...)...))
	}
	for n := 1; n <= 2; n++ {
		g := testkit.Must(p.NewGateway(ctx, fmt.Sprint("vrrp", n), v2.LoadBalancerGatewaySpec{
			Pools: []string{vrrpPool}, Endpoints: v2.EndpointsPod,
			VRRP: &v2.GatewayVRRP{Interface: "eth0", Sources: []string{fmt.Sprint("192.0.2.", n), fmt.Sprintf("2001:db8:2::%d", n)}},
		}))(t)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the end of the logs of %s:\n%s\n%s", g.Name, g.Logs(40), g.Keepalived.Logs(40))
			}
			testkit.Check(t, g.Close())
		})
		p.gateways = append(p.gateways, g)
		for link, ns := range map[string]*netlab.NS{"eth0": p.client, "eth1": p.pods} {
			testkit.Check(t, g.NS.IP(ctx, fmt.Sprintf("link add %s type veth peer name port%d netns %s", link, n, ns.Path())), ns.IP(ctx, fmt.Sprintf("link set port%d master br0 up", n)))
		}
		p.on(n)
	}
	for _, f := range families {
		for _, a := range endpoints[f] {
			p.serve(p.pods, net.JoinHostPort(a, "8080"))
		}
	}
	p.control(vrrpPool)
	return p
}

// on gives a machine power: it has its own addresses, keepalived and coil-lb-agent.
func (p *pair) on(n int) {
	p.t.Helper()
	g := p.gateways[n-1]
	testkit.Check(p.t, g.NS.IP(p.t.Context(), "addr flush dev eth0", "addr flush dev eth1", "link set eth0 up", "link set eth1 up",
		fmt.Sprintf("addr add 192.0.2.%d/24 dev eth0", n), fmt.Sprintf("addr add 2001:db8:2::%d/64 dev eth0 nodad", n), fmt.Sprintf("addr add fe80::%d/64 dev eth0 nodad", n),
		fmt.Sprintf("addr add 10.1.0.%d/24 dev eth1", 100+n), fmt.Sprintf("addr add fd01::%d/64 dev eth1 nodad", 100+n)), g.Keepalived.Start(), g.Start())
}

// off takes the power away.
func (p *pair) off(n int) {
	p.t.Helper()
	g := p.gateways[n-1]
	testkit.Check(p.t, g.NS.IP(p.t.Context(), "link set eth0 down", "link set eth1 down"))
	g.Kill()
	testkit.Check(p.t, g.KillKeepalived(p.t.Context()))
}

// service makes a Service of both families that has its addresses alone, and two endpoints of each.
func (p *pair) service(name string) {
	p.t.Helper()
	ctx := p.t.Context()
	testkit.Must(p.Core.CoreV1().Services(vrrpNamespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{loadbalancer.AnnotationSharing: loadbalancer.SharingNone}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(loadbalancer.Class), AllocateLoadBalancerNodePorts: new(false),
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack), Ports: []corev1.ServicePort{{Port: 80}},
		},
	}, metav1.CreateOptions{}))(p.t)
	for _, f := range families {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: name + "-" + strings.ToLower(string(f)), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: discoveryv1.AddressType(f), Ports: []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
		}
		for _, a := range endpoints[f] {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
		}
		testkit.Must(p.Core.DiscoveryV1().EndpointSlices(vrrpNamespace).Create(ctx, s, metav1.CreateOptions{}))(p.t)
	}
}

// addresses waits until Services tell their addresses.
func (p *pair) addresses(names ...string) (all []netip.AddrPort) {
	p.t.Helper()
	testkit.Eventually(p.t, 30*time.Second, "Services tell their addresses", func() error {
		all = nil
		for _, name := range names {
			s, err := p.Core.CoreV1().Services(vrrpNamespace).Get(p.t.Context(), name, metav1.GetOptions{})
			if err != nil || len(s.Status.LoadBalancer.Ingress) != 2 {
				return fmt.Errorf("%s: %+v: %w", name, s.Status, err)
			}
			for _, i := range s.Status.LoadBalancer.Ingress {
				all = append(all, netip.AddrPortFrom(netip.MustParseAddr(i.IP), 80))
			}
		}
		return nil
	})
	return all
}

// holders are the gateways that have each of some addresses at a link.
func (p *pair) holders(all []netip.AddrPort) map[netip.Addr][]string {
	p.t.Helper()
	have := map[netip.Addr][]string{}
	for _, g := range p.gateways {
		out := testkit.Must(g.NS.Run(p.t.Context(), "ip", "-o", "address", "show", "dev", "eth0", "up"))(p.t)
		for _, a := range all {
			if strings.Contains(out, " "+a.Addr().String()+"/") {
				have[a.Addr()] = append(have[a.Addr()], g.Name)
			}
		}
	}
	return have
}

// spread waits until each address is at one gateway, and each gateway has as many.
func (p *pair) spread(when string, all []netip.AddrPort, each map[string]int) {
	p.t.Helper()
	testkit.Eventually(p.t, 20*time.Second, when, func() error {
		have, count := p.holders(all), map[string]int{}
		for _, a := range all {
			if at := have[a.Addr()]; len(at) != 1 {
				return fmt.Errorf("%s is at %v", a.Addr(), at)
			}
			count[have[a.Addr()][0]]++
		}
		if !maps.Equal(count, each) {
			return fmt.Errorf("gateways have %v addresses, want %v", count, each)
		}
		return nil
	})
}

// reached waits until all addresses are reached, and returns how long that took from a moment on.
func (p *pair) reached(when string, all []netip.AddrPort, since time.Time) time.Duration {
	p.t.Helper()
	for _, a := range all {
		testkit.Eventually(p.t, 20*time.Second, when, func() error {
			endpoint, _, err := p.ask(a, 300*time.Millisecond)
			if err == nil && !slices.Contains(slices.Concat(endpoints[families[0]], endpoints[families[1]]), endpoint.Addr().String()) {
				err = fmt.Errorf("%s leads to %s", a, endpoint)
			}
			return err
		})
	}
	return time.Since(since)
}

// Scenarios 30, 39: two gateways share the addresses of Services by VRRP. The power of one of them is cut, and new connections go by the other one within three seconds.
func TestScenario30ServiceByVRRP(t *testing.T) {
	p := newPair(t)
	p.service("one")
	p.service("two")
	all := p.addresses("one", "two")
	both := map[string]int{"vrrp1": 2, "vrrp2": 2}
	p.spread("the addresses are spread", all, both)
	p.reached("at first", all, time.Now())
	states := func(when, name string, want map[string]int) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, when, func() error {
			g, err := p.Coil.CoilV2().LoadBalancerGateways().Get(context.Background(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			got := map[string]int{}
			for _, s := range g.Status.VRRP {
				got[s.State]++
			}
			if !maps.Equal(got, want) || g.Status.Conditions[0].Reason != v2.ReasonAllServed {
				return fmt.Errorf("%s says %+v, want %v", name, g.Status, want)
			}
			return nil
		})
	}
	for _, name := range slices.Sorted(maps.Keys(both)) {
		states("each gateway is the master of one instance in each family", name, map[string]int{"MASTER": 2, "BACKUP": 2})
	}
	worst := time.Duration(0)
	for i := range testkit.LBForm.Times(2, 20) {
		n := 1 + i%2
		began := time.Now()
		p.off(n)
		took := p.reached(fmt.Sprintf("without gateway %d", n), all, began)
		worst = max(worst, took)
		p.on(n)
		p.spread("with both again", all, both)
		p.reached("with both again", all, time.Now())
	}
	t.Logf("new connections after a power cut: %s at worst", worst)
	if limit := testkit.Limit(3 * time.Second); worst > limit {
		t.Errorf("new connections took %s after a power cut, want %s at most", worst, limit)
	}
	// keepalived that ends is started again by its unit; meanwhile the status says so.
	testkit.Check(t, p.gateways[0].KillKeepalived(t.Context()))
	testkit.Eventually(t, 20*time.Second, "the status says that keepalived doesn't run", func() error {
		g, err := p.Coil.CoilV2().LoadBalancerGateways().Get(t.Context(), "vrrp1", metav1.GetOptions{})
		if err != nil || g.Status.Conditions[0].Reason != v2.ReasonVRRPFailed {
			return fmt.Errorf("%+v: %w", g.Status, err)
		}
		return nil
	})
	testkit.Check(t, p.gateways[0].Keepalived.Start())
	states("keepalived runs again", "vrrp1", map[string]int{"MASTER": 2, "BACKUP": 2})
	p.reached("keepalived runs again", all, time.Now())
	for _, name := range []string{"one", "two"} {
		testkit.Check(t, p.Core.CoreV1().Services(vrrpNamespace).Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	testkit.Eventually(t, 20*time.Second, "no gateway has an address any more", func() error {
		if have := p.holders(all); len(have) > 0 {
			return fmt.Errorf("%v", have)
		}
		return nil
	})
	t.Run("Scenario39Cleanup", func(t *testing.T) {
		g := p.gateways[1]
		g.Stop()
		testkit.Must(g.Cleanup(t.Context()))(t)
		if out := testkit.Must(g.NS.Run(t.Context(), "sh", "-c", "nft list ruleset; ip -o address show dev lo scope host | grep -v 127.0.0.1/8 || true"))(t); strings.Contains(out, "coil") || strings.Contains(out, "127.112") {
			t.Errorf("--cleanup has left %s", out)
		}
		for _, path := range []string{g.StateDir(), g.Fragment()} {
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("--cleanup has left %s: %v", path, err)
			}
		}
	})
}

package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

const (
	pool      = "dmz"
	namespace = "shop"
	subnet    = "198.51.100.0/28"
	subnet6   = "2001:db8:100::/124"
)

var (
	families  = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	client    = map[corev1.IPFamily]netip.Addr{corev1.IPv4Protocol: netip.MustParseAddr("192.0.2.2"), corev1.IPv6Protocol: netip.MustParseAddr("2001:db8:2::2")}
	endpoints = map[corev1.IPFamily][]string{corev1.IPv4Protocol: {"10.1.0.2", "10.1.0.3"}, corev1.IPv6Protocol: {"fd01::2", "fd01::3"}}
)

// lab is a client outside of the cluster, a gateway machine, and a host with pods. The machine has the pool's addresses, as if a router of the network sent all of them there.
type lab struct {
	*rig.Rig
	t            *testing.T
	gateway      *rig.Gateway
	client, pods *netlab.NS
}

// newLab makes one, the only one of a rig.
func newLab(t *testing.T, r *rig.Rig, spec v2.LoadBalancerGatewaySpec) *lab {
	t.Helper()
	l, ctx := &lab{Rig: r, t: t}, t.Context()
	testkit.Check(t, l.AddPool(ctx, pool, 0, rig.Dual(subnet, subnet6)), l.AddNamespace(ctx, namespace, ""))
	_, err := l.Coil.CoilV2().AddressPools().Patch(ctx, pool, types.MergePatchType, []byte(`{"spec":{"announce":"Gateway","purpose":"Floating"}}`), metav1.PatchOptions{})
	testkit.Check(t, err)
	l.gateway = testkit.Must(l.NewGateway(ctx, "gw1", spec))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of coil-lb-agent:\n%s", l.gateway.Logs(60))
		}
		testkit.Check(t, l.gateway.Close())
	})
	for _, ns := range []**netlab.NS{&l.client, &l.pods} {
		*ns = testkit.Must(netlab.New())(t)
		t.Cleanup(func() { testkit.Check(t, (*ns).Close()) })
	}
	testkit.Check(t,
		l.gateway.NS.IP(ctx, "link add outside type veth peer name eth0 netns "+l.client.Path(), "link add inside type veth peer name eth0 netns "+l.pods.Path(),
			"link set outside up", "link set inside up", "addr add 192.0.2.1/24 dev outside", "addr add 2001:db8:2::1/64 dev outside nodad",
			"addr add 10.1.0.1/24 dev inside", "addr add fd01::1/64 dev inside nodad", "route add local "+subnet+" dev lo", "-6 route add local "+subnet6+" dev lo"),
		l.client.IP(ctx, "link set eth0 up", "addr add 192.0.2.2/24 dev eth0", "addr add 2001:db8:2::2/64 dev eth0 nodad", "route add default via 192.0.2.1", "-6 route add default via 2001:db8:2::1"),
		l.pods.IP(ctx, "link set eth0 up", "addr add 10.1.0.2/24 dev eth0", "addr add 10.1.0.3/24 dev eth0", "addr add fd01::2/64 dev eth0 nodad", "addr add fd01::3/64 dev eth0 nodad",
			"route add default via 10.1.0.1", "-6 route add default via fd01::1"),
	)
	for _, f := range families {
		for _, a := range endpoints[f] {
			l.serve(l.pods, net.JoinHostPort(a, "8080"))
		}
	}
	l.control(pool)
	return l
}

// control runs coil-lb-controller until the test ends.
func (l *lab) control(pool string) {
	l.t.Helper()
	ctx := l.t.Context()
	controller := testkit.Must(l.NewLBController(ctx, pool))(l.t)
	testkit.Check(l.t, controller.Start())
	l.t.Cleanup(func() {
		controller.Kill()
		testkit.Check(l.t, l.TakeLease(context.WithoutCancel(ctx), "coil-lb-leader"))
		if l.t.Failed() {
			l.t.Logf("the end of the log of coil-lb-controller:\n%s", controller.Logs(40))
		}
	})
}

// serve answers each connection with the two ends that it has here, until the test ends.
func (l *lab) serve(ns *netlab.NS, at string) {
	l.t.Helper()
	listener := testkit.Must(ns.Listen(l.t.Context(), "tcp", at))(l.t)
	l.t.Cleanup(func() { listener.Close() })
	go netlab.Serve(listener, func(c net.Conn) { fmt.Fprintf(c, "%s %s", c.LocalAddr(), c.RemoteAddr()) })
}

// ask connects to an address, and returns the endpoint and the client as the endpoint sees it.
func (l *lab) ask(at netip.AddrPort, within time.Duration) (endpoint, from netip.AddrPort, err error) {
	ctx, cancel := context.WithTimeout(l.t.Context(), within)
	defer cancel()
	conn, err := l.client.Dial(ctx, "tcp", at.String())
	if err != nil {
		return endpoint, from, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(within)); err != nil {
		return endpoint, from, err
	}
	text, err := io.ReadAll(conn)
	if err != nil {
		return endpoint, from, err
	}
	here, there, _ := strings.Cut(string(text), " ")
	return netip.MustParseAddrPort(here), netip.MustParseAddrPort(there), nil
}

// slice gives the Service web an EndpointSlice of a family with some endpoints, in place of the one that it had.
func (l *lab) slice(f corev1.IPFamily, addresses ...string) {
	l.t.Helper()
	slices := l.Core.DiscoveryV1().EndpointSlices(namespace)
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-" + strings.ToLower(string(f)), Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressType(f), Ports: []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
	}
	for _, a := range addresses {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
	}
	if _, err := slices.Get(l.t.Context(), s.Name, metav1.GetOptions{}); err != nil {
		testkit.Must(slices.Create(l.t.Context(), s, metav1.CreateOptions{}))(l.t)
		return
	}
	testkit.Must(slices.Update(l.t.Context(), s, metav1.UpdateOptions{}))(l.t)
}

// service makes the Service web of both families.
func (l *lab) service() {
	l.t.Helper()
	testkit.Must(l.Core.CoreV1().Services(namespace).Create(l.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(loadbalancer.Class), AllocateLoadBalancerNodePorts: new(false),
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack), Ports: []corev1.ServicePort{{Port: 80}},
		},
	}, metav1.CreateOptions{}))(l.t)
}

// notify has coil-lb-agent tell a systemd, played by a socket, that it is ready. The returned function waits for that.
func (l *lab) notify() (ready func() string) {
	l.t.Helper()
	path := filepath.Join(l.t.TempDir(), "notify")
	c := testkit.Must(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"}))(l.t)
	before := l.gateway.Env
	l.gateway.Env = append(slices.Clone(before), "NOTIFY_SOCKET="+path)
	return func() string {
		l.t.Helper()
		defer c.Close()
		l.gateway.Env = before
		text := make([]byte, 4096)
		testkit.Check(l.t, c.SetReadDeadline(time.Now().Add(testkit.Timeout(20*time.Second))))
		n := testkit.Must(c.Read(text))(l.t)
		return string(text[:n])
	}
}

// condition is one of the Service web.
func (l *lab) condition(kind string) metav1.Condition {
	l.t.Helper()
	s := testkit.Must(l.Core.CoreV1().Services(namespace).Get(l.t.Context(), "web", metav1.GetOptions{}))(l.t)
	if c := meta.FindStatusCondition(s.Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// Scenarios 1, 19, 22, 23, 26, 31, 33, 39: a Service of both families is reached by a gateway machine, with clients' own addresses, also while the machine doesn't reach the API server and
// after it has started again.
func TestScenario22ServiceByGateway(t *testing.T) {
	l := newLab(t, shared.Rig(t), v2.LoadBalancerGatewaySpec{Pools: []string{pool}, Endpoints: v2.EndpointsPod, Masquerade: v2.MasqueradeNever})
	ctx := t.Context()
	const forwarding = "/proc/sys/net/ipv4/ip_forward"
	before := testkit.Must(l.gateway.NS.Run(ctx, "cat", forwarding))(t)
	l.service()
	testkit.Eventually(t, 20*time.Second, "the Service waits for the machine", func() error {
		if c := l.condition(loadbalancer.ConditionServed); c.Reason != "WaitsForGateway" || !strings.Contains(c.Message, "gw1") {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
	for _, f := range families {
		l.slice(f, endpoints[f]...)
	}
	testkit.Check(t, l.gateway.Start())
	var at []netip.AddrPort
	testkit.Eventually(t, 20*time.Second, "the Service tells its addresses", func() error {
		s, err := l.Core.CoreV1().Services(namespace).Get(ctx, "web", metav1.GetOptions{})
		if err != nil || len(s.Status.LoadBalancer.Ingress) != 2 {
			return fmt.Errorf("%+v: %w", s.Status, err)
		}
		at = nil
		for _, i := range s.Status.LoadBalancer.Ingress {
			at = append(at, netip.AddrPortFrom(netip.MustParseAddr(i.IP), 80))
		}
		return nil
	})
	if c := l.condition(loadbalancer.ConditionServed); c.Reason != "Served" || c.Message != "Gateways serve the address: gw1" {
		t.Errorf("%+v", c)
	}
	all := func(when string, wanted map[corev1.IPFamily][]string) {
		t.Helper()
		for i, f := range families {
			seen := map[string]bool{}
			for range 40 {
				endpoint, from, err := l.ask(at[i], 5*time.Second)
				if err != nil {
					t.Fatalf("%s: %s: %v", when, at[i], err)
				}
				if from.Addr() != client[f] {
					t.Fatalf("%s: the endpoint sees %s, want %s", when, from, client[f])
				}
				seen[endpoint.Addr().String()] = true
			}
			for _, a := range wanted[f] {
				if !seen[a] || len(seen) != len(wanted[f]) {
					t.Errorf("%s: %s led to %v, want %v", when, at[i], seen, wanted[f])
				}
			}
		}
	}
	all("at first", endpoints)
	// Endpoints that go are left, and without any clients are refused.
	for _, f := range families {
		l.slice(f, endpoints[f][1])
	}
	one := map[corev1.IPFamily][]string{}
	for _, f := range families {
		one[f] = endpoints[f][1:]
	}
	l.until(at, "the other endpoint alone", 20, func(endpoint netip.AddrPort, err error) bool { // before, it was luck once in a million times
		return err == nil && slices.Contains([]string{endpoints[families[0]][1], endpoints[families[1]][1]}, endpoint.Addr().String())
	})
	all("with the other endpoint alone", one)
	for _, f := range families {
		l.slice(f)
	}
	l.until(at, "refused", 1, func(_ netip.AddrPort, err error) bool { return errors.Is(err, unix.ECONNREFUSED) })
	for _, f := range families {
		l.slice(f, endpoints[f]...)
	}
	l.until(at, "served again", 1, func(_ netip.AddrPort, err error) bool { return err == nil })
	// Somebody takes all rules away: they come back.
	testkit.Must(l.gateway.NS.Run(ctx, "nft", "flush", "ruleset"))(t)
	l.until(at, "served after all rules were taken away", 1, func(_ netip.AddrPort, err error) bool { return err == nil })
	// Without the API server the machine goes on, also after a power cut.
	testkit.Eventually(t, 30*time.Second, "the state is saved", func() error {
		text, err := os.ReadFile(l.gateway.StateDir() + "/last.json")
		if err != nil || !strings.Contains(string(text), endpoints[families[0]][0]) {
			return fmt.Errorf("%s: %w", text, err)
		}
		return nil
	})
	l.gateway.CutAPI(true)
	l.gateway.Kill()
	testkit.Must(l.gateway.NS.Run(ctx, "nft", "flush", "ruleset"))(t)
	ready := l.notify()
	testkit.Check(t, l.gateway.Start())
	if got := ready(); got != "READY=1" {
		t.Errorf("systemd is told %q", got)
	}
	// systemd starts keepalived now, which may have addresses at once.
	if out := testkit.Must(l.gateway.NS.Run(ctx, "nft", "list", "map", "inet", "coil_lb", "endpoints_ipv4"))(t); !strings.Contains(out, endpoints[families[0]][0]) {
		t.Errorf("when it is ready, it has %s", out)
	}
	l.until(at, "served without the API server", 1, func(_ netip.AddrPort, err error) bool { return err == nil })
	all("without the API server", endpoints)
	l.gateway.CutAPI(false)
	if out := testkit.Must(l.API.Kubectl(ctx, "get", "lbgw", "gw1", "--no-headers"))(t); !strings.Contains(string(out), `["dmz"]`) || !strings.Contains(string(out), "True") {
		t.Errorf("kubectl get lbgw: %s", out)
	}
	// The Service goes, and nothing is left of it.
	testkit.Check(t, l.Core.CoreV1().Services(namespace).Delete(ctx, "web", metav1.DeleteOptions{}))
	testkit.Eventually(t, 30*time.Second, "nothing is left of the Service", func() error {
		out, err := l.gateway.NS.Run(ctx, "nft", "list", "map", "inet", "coil_lb", "endpoints_ipv4")
		if err != nil || strings.Contains(out, "elements") {
			return fmt.Errorf("%s: %w", out, err)
		}
		return nil
	})
	testkit.Eventually(t, 30*time.Second, "the Service is gone", func() error {
		if _, err := l.Core.CoreV1().Services(namespace).Get(ctx, "web", metav1.GetOptions{}); err == nil {
			return errors.New("it is there")
		}
		return nil
	})
	t.Run("Scenario39Cleanup", func(t *testing.T) {
		l.gateway.Stop()
		testkit.Must(l.gateway.Cleanup(ctx))(t)
		if out := testkit.Must(l.gateway.NS.Run(ctx, "sh", "-c", "nft list ruleset; cat "+forwarding))(t); out != before {
			t.Errorf("--cleanup has left %s", out)
		}
		if left, err := os.ReadDir(l.gateway.StateDir()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("--cleanup has left %v in the state directory: %v", left, err)
		}
		testkit.Must(l.gateway.Cleanup(ctx))(t) // there is nothing left to take away
	})
}

// until asks both addresses until so many answers in a row are as wanted, and logs how long that took.
func (l *lab) until(at []netip.AddrPort, what string, n int, is func(endpoint netip.AddrPort, err error) bool) {
	l.t.Helper()
	began := time.Now()
	for _, a := range at {
		testkit.Eventually(l.t, 10*time.Second, what, func() error {
			for range n {
				if endpoint, _, err := l.ask(a, 5*time.Second); !is(endpoint, err) {
					return fmt.Errorf("%s: %s, %w", a, endpoint, err)
				}
			}
			return nil
		})
	}
	l.t.Logf("%s after %s", what, time.Since(began))
}

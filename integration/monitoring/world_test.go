package monitoring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// world is a cluster of which each dashboard has something to show: nodes with coild and coil-router, all controllers, an Egress whose addresses float, and a Service with
// addresses on nodes.
type world struct {
	*rig.Rig
	t       *testing.T
	nodes   []*rig.Node
	targets []target
}

// Subnets of the addresses of Services, and the port of the Service.
const (
	services4, services6 = "10.255.201.0/28", "fd00:255::3:0/124"
	servicePort          = 7000
)

// outside are the addresses of a server that pods reach by the Egress.
var outside = []netip.AddrPort{netip.MustParseAddrPort("203.0.113.1:8000"), netip.MustParseAddrPort("[2001:db8:f::1]:8000")}

func newWorld(t *testing.T) *world {
	t.Helper()
	ctx, ipam := t.Context(), testkit.FreeAddr(t)
	w := &world{t: t, Rig: rigtest.NewWith(t, rig.Options{Tags: []string{rig.StandInTunnels}, ControllerFlags: []string{"--metrics-addr=" + ipam}})}
	testkit.Check(t, w.AddPool(ctx, "default", 2, rig.Dual("10.1.0.0/22", "fd01::/118")),
		w.AddPool(ctx, "partners", 0, rig.Dual("10.255.101.0/28", "fd00:255::1:100/124")), w.Announce(ctx, "partners", v2.AnnounceNeighbor),
		w.AddPool(ctx, "services", 0, rig.Dual(services4, services6)), w.Announce(ctx, "services", v2.AnnounceNeighbor))
	for range 2 {
		n := testkit.Must(w.AddNode(ctx, rig.NodeOptions{}))(t)
		w.nodes = append(w.nodes, n)
		testkit.Check(t, n.ForwardPods())
		router := testkit.Must(n.NewRouter(ctx))(t)
		testkit.Check(t, router.Start())
		t.Cleanup(router.Kill)
		w.inside(n, "127.0.0.1:9384", target{component: "coild", job: "coil"})
		w.inside(n, "127.0.0.1:9388", target{component: "coil-router", job: "coil"})
	}
	w.targets = append(w.targets, target{addr: ipam, component: "coil-ipam-controller", node: w.nodes[0].Name, job: "coil"})
	w.control("coil-egress-controller", testkit.Must(w.NewEgressController(ctx))(t))
	w.control("coil-lb-controller", testkit.Must(w.NewLBController(ctx, "services"))(t))
	return w
}

// inside adds a program whose metrics are reached from a node.
func (w *world) inside(n *rig.Node, address string, as target) {
	client := &http.Client{Transport: &http.Transport{DialContext: n.Dial, DisableKeepAlives: true}}
	s := httptest.NewServer(http.HandlerFunc(func(to http.ResponseWriter, req *http.Request) {
		text, err := netlab.Get(req.Context(), client, "http://"+address+"/metrics")
		if err != nil {
			http.Error(to, err.Error(), http.StatusBadGateway)
			return
		}
		fmt.Fprint(to, text)
	}))
	w.t.Cleanup(s.Close)
	as.addr, as.node = strings.TrimPrefix(s.URL, "http://"), n.Name
	w.targets = append(w.targets, as)
}

// control starts a controller.
func (w *world) control(component string, p *rig.Program) {
	w.t.Helper()
	addr := testkit.FreeAddr(w.t)
	p.Args = append(p.Args, "--metrics-addr="+addr)
	testkit.Check(w.t, p.Start())
	w.t.Cleanup(func() {
		if w.t.Failed() {
			w.t.Logf("the end of the log of %s:\n%s", component, p.Logs(30))
		}
		p.Kill()
	})
	w.targets = append(w.targets, target{addr: addr, component: component, node: w.nodes[0].Name, job: "coil"})
}

// repeat calls a function again and again until the test ends, which an error fails.
func (w *world) repeat(every time.Duration, do func(context.Context) error) {
	ctx, stop := context.WithCancel(w.t.Context())
	var ended sync.WaitGroup
	w.t.Cleanup(ended.Wait)
	w.t.Cleanup(stop)
	ended.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			if err := do(ctx); err != nil && ctx.Err() == nil {
				w.t.Error(err)
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
}

// pods has pods come to a node and go: durations of calls are those of the last moments.
func (w *world) pods(n *rig.Node) {
	var last *rig.Sandbox
	w.repeat(scrapeInterval, func(ctx context.Context) error {
		if last != nil {
			if err := errors.Join(last.Del(ctx), last.Close()); err != nil {
				return err
			}
		}
		s, err := n.NewSandbox(ctx, rig.SandboxOptions{})
		if err == nil {
			_, err = s.Add(ctx)
		}
		last = s
		return err
	})
}

// wayOut makes an Egress with a router on each node.
func (w *world) wayOut() {
	w.t.Helper()
	ctx := w.t.Context()
	testkit.Check(w.t, w.AddNamespace(ctx, "internet", ""))
	w.serveOutside()
	e := testkit.Must(w.NewEgress(ctx, "internet", "nat", v2.EgressSpec{
		Replicas: int32(len(w.nodes)), Destinations: []string{"0.0.0.0/0", "::/0"}, Peering: v2.EgressPeeringDirect,
		Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: "partners", Count: new(int32(2))},
	}))(w.t)
	w.t.Cleanup(func() { testkit.Check(w.t, e.Close()) })
	for _, n := range w.nodes {
		r := testkit.Must(e.AddRouter(ctx, n))(w.t)
		w.inside(n, netip.AddrPortFrom(r.Addrs[0], 8080).String(), target{component: "egress", job: "coil-egress"})
	}
	testkit.Eventually(w.t, 30*time.Second, "routers are ready, and each address is on a node", func() error {
		for _, r := range e.Routers() {
			if !r.Ready() {
				return errors.Join(fmt.Errorf("router %s isn't ready: %s", r.Name, r.Program.Logs(3)), e.Trouble())
			}
		}
		o, err := w.Coil.CoilV2().Egresses("internet").Get(ctx, "nat", metav1.GetOptions{})
		if err == nil && !meta.IsStatusConditionTrue(o.Status.Conditions, v2.EgressAddressesReady) {
			err = errors.Join(fmt.Errorf("%+v", o.Status), e.Trouble())
		}
		return err
	})
	for name, egress := range map[string]string{"checkout": "nat", "lost": "gone"} { // the latter isn't accepted
		p := &v2.EgressPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
		p.Spec.Pods = &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
		p.Spec.Egress = &v2.EgressReference{Namespace: "internet", Name: egress}
		testkit.Must(w.Coil.CoilV2().EgressPolicies(metav1.NamespaceDefault).Create(ctx, p, metav1.CreateOptions{}))(w.t)
	}
}

// serveOutside makes a server that pods reach by routers only. It sends back what it is sent.
func (w *world) serveOutside() {
	w.t.Helper()
	ctx := w.t.Context()
	server := testkit.Must(w.NewHost(ctx, 1))(w.t)
	w.t.Cleanup(func() { testkit.Check(w.t, server.Close()) })
	testkit.Check(w.t, server.IP(ctx, "addr add 203.0.113.1/32 dev lo", "addr add 2001:db8:f::1/128 dev lo nodad", "route add default via 10.255.0.1", "route add default via fd00:255::1"))
	testkit.Must(w.RunRouter(ctx, "sh", "-ec", "ip route replace 203.0.113.0/24 via 10.255.200.1; ip route replace 2001:db8:f::/64 via fd00:255::c8:1"))(w.t)
	l := testkit.Must(server.Listen(ctx, "tcp", ":8000"))(w.t)
	w.t.Cleanup(func() { l.Close() })
	go netlab.Serve(l, func(c net.Conn) { _, _ = io.Copy(c, c) })
}

// client is a pod that leaves by the Egress, and talks to the server outside: now more, now less.
func (w *world) client(n *rig.Node) {
	w.t.Helper()
	pod := testkit.Must(n.NewSandbox(w.t.Context(), rig.SandboxOptions{Labels: map[string]string{"app": "checkout"}}))(w.t)
	var addrs []netip.Addr
	testkit.Eventually(w.t, 20*time.Second, "the pod is added", func() error {
		result, err := pod.Add(w.t.Context())
		addrs = result.Addrs
		return err
	})
	testkit.Check(w.t, pod.Report(w.t.Context(), addrs, true))
	talk := func(ctx context.Context, to netip.AddrPort) error {
		ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(5*time.Second))
		defer cancel()
		conn, err := pod.Dial(ctx, "tcp", to.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		deadline, _ := ctx.Deadline()
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
		text := make([]byte, 1000) // larger packets don't pass the links that stand in for tunnels
		for range int(20 * (1.3 + math.Sin(float64(time.Now().Unix())/15))) {
			if _, err := conn.Write(text); err != nil {
				return err
			}
			if _, err := io.ReadFull(conn, text); err != nil {
				return err
			}
		}
		return nil
	}
	for _, to := range outside {
		testkit.Eventually(w.t, 20*time.Second, "the pod reaches "+to.String(), func() error { return talk(w.t.Context(), to) })
		w.repeat(200*time.Millisecond, func(ctx context.Context) error { return talk(ctx, to) })
	}
}

// wayIn makes a Service whose addresses a node answers for, and a client outside. A rule of each node stands for its Service proxy.
func (w *world) wayIn() {
	w.t.Helper()
	ctx := w.t.Context()
	endpoints := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}}, AddressType: discoveryv1.AddressTypeIPv4}
	for _, n := range w.nodes {
		endpoints.Endpoints = append(endpoints.Endpoints, discoveryv1.Endpoint{Addresses: []string{n.Addr4.String()}, NodeName: &n.Name})
		testkit.Must(n.Run(ctx, "nft", fmt.Sprintf(`table inet proxy {
			chain services {
				type nat hook prerouting priority -100
				ip daddr %s tcp dport %d dnat ip to %s
				ip6 daddr %s tcp dport %[2]d dnat ip6 to %[5]s
			}
		}`, services4, servicePort, n.Addr4, services6, n.Addr6)))(w.t)
		ns := testkit.Must(netlab.Open(n.NetnsPath()))(w.t)
		w.t.Cleanup(func() { testkit.Check(w.t, ns.Close()) })
		l := testkit.Must(ns.Listen(ctx, "tcp", fmt.Sprintf("[::]:%d", servicePort)))(w.t)
		w.t.Cleanup(func() { l.Close() })
		go netlab.Serve(l, func(c net.Conn) { _, _ = io.WriteString(c, strings.Repeat(n.Name, 500)) })
	}
	testkit.Must(w.Core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault).Create(ctx, endpoints, metav1.CreateOptions{}))(w.t)
	services := w.Core.CoreV1().Services(metav1.NamespaceDefault)
	testkit.Must(services.Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(loadbalancer.Class), Ports: []corev1.ServicePort{{Port: servicePort}},
		IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack), ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
	}}, metav1.CreateOptions{}))(w.t)
	ask := func(ctx context.Context) error {
		o, err := services.Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(o.Status.LoadBalancer.Ingress) != 2 {
			return fmt.Errorf("its status is %+v", o.Status)
		}
		for _, in := range o.Status.LoadBalancer.Ingress {
			ctx, cancel := context.WithTimeout(ctx, testkit.Timeout(5*time.Second))
			defer cancel()
			c, err := w.DialOutside(ctx, "tcp", net.JoinHostPort(in.IP, fmt.Sprint(servicePort)))
			if err != nil {
				return err
			}
			_, err = io.ReadAll(c)
			if err := errors.Join(err, c.Close()); err != nil {
				return err
			}
		}
		return nil
	}
	testkit.Eventually(w.t, 30*time.Second, "the Service is reached", func() error { return ask(ctx) })
	w.repeat(scrapeInterval, ask)
}

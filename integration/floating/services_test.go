package floating

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/integration/rig/rigtest"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/lbcontroller"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/kube/leader"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// served are nodes that may have the addresses of Services. A program on each of them listens at all addresses of the node, and says the node's name. Rules that
// stand for a Service proxy translate the first port.
type served struct {
	*rig.Rig
	t     *testing.T
	nodes []*rig.Node
	// ports are that of a Service, that of none, and that of a Service that no proxy serves.
	ports []int
	// subnets are those of the pool.
	subnets [2]string
}

// newServed returns nodes of a rig in which coil-lb-controller runs, and a pool of a name for Services.
func newServed(t *testing.T, pool string, announce v2.PoolAnnounce) *served {
	t.Helper()
	return newServedOf(t, pool, announce, rig.NodeOptions{})
}

// newServedOf is newServed with options of the nodes.
func newServedOf(t *testing.T, pool string, announce v2.PoolAnnounce, options rig.NodeOptions) *served {
	t.Helper()
	s, ctx := &served{Rig: shared.Rig(t), t: t, ports: []int{7000, 7001, 7002}}, t.Context()
	n := pools.Add(1)
	s.subnets = [2]string{fmt.Sprintf("10.255.%d.0/31", 100+n), fmt.Sprintf("fd00:255::1:%x00/127", n)}
	testkit.Check(t, s.AddPool(ctx, pool, 0, rig.Dual(s.subnets[0], s.subnets[1])), s.Announce(ctx, pool, announce))
	for range 3 {
		n := testkit.Must(s.AddNode(ctx, options))(t)
		s.nodes = append(s.nodes, n)
		s.listen(n)
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the end of the log of %s:\n%s", n.Name, n.Coild.Logs(60))
			}
		})
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	o := &lbcontroller.Options{CloudResync: time.Minute, Namespace: "kube-system", DefaultPool: pool, Options: leading.Options{Election: leader.Election{
		Namespace: "kube-system", LeaseDuration: 11 * time.Minute, RenewDeadline: 10 * time.Minute, RetryPeriod: time.Second, // other tests make outages
	}}}
	go func() { ended <- lbcontroller.Run(ctx, s.API.RESTConfig(), o) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("coil-lb-controller ended with %v", err)
		}
	})
	return s
}

// listen starts the program on a node, and makes the rules.
func (s *served) listen(n *rig.Node) {
	s.t.Helper()
	ns := testkit.Must(netlab.Open(n.NetnsPath()))(s.t)
	s.t.Cleanup(func() { testkit.Check(s.t, ns.Close()) })
	s.proxy(n)
	for _, port := range s.ports {
		l := testkit.Must(ns.Listen(s.t.Context(), "tcp", fmt.Sprintf("[::]:%d", port)))(s.t)
		s.t.Cleanup(func() { _ = l.Close() })
		go netlab.Serve(l, func(c net.Conn) {
			_, _ = io.WriteString(c, n.Name)
			_ = c.Close()
		})
	}
}

// proxy makes the rules on a node.
func (s *served) proxy(n *rig.Node) {
	s.t.Helper()
	testkit.Must(n.Run(s.t.Context(), "nft", fmt.Sprintf(`table inet proxy {
		chain services {
			type nat hook prerouting priority -100
			ip daddr %s tcp dport %d dnat ip to %s
			ip6 daddr %s tcp dport %[2]d dnat ip6 to %[5]s
		}
	}`, s.subnets[0], s.ports[0], n.Addr4, s.subnets[1], n.Addr6)))(s.t)
}

// hears returns the answer to a host outside at a port of an address; an error if there is none.
func (s *served) hears(a netip.Addr, port int) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), testkit.Timeout(time.Second))
	defer cancel()
	c, err := s.DialOutside(ctx, "tcp", netip.AddrPortFrom(a, uint16(port)).String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	said, err := io.ReadAll(c)
	return string(said), err
}

// serve makes a Service of a port with an address of its own, which all nodes have endpoints of. Other tests' nodes are in the cluster, too.
func (s *served) serve(name string, port int) {
	s.t.Helper()
	endpoints := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}}, AddressType: discoveryv1.AddressTypeIPv4}
	for _, n := range s.nodes {
		endpoints.Endpoints = append(endpoints.Endpoints, discoveryv1.Endpoint{Addresses: []string{n.Addr4.String()}, NodeName: &n.Name})
	}
	slices := s.Core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	testkit.Must(slices.Create(s.t.Context(), endpoints, metav1.CreateOptions{}))(s.t)
	s.t.Cleanup(func() {
		testkit.Check(s.t, slices.Delete(context.WithoutCancel(s.t.Context()), name, metav1.DeleteOptions{}))
	})
	o := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{loadbalancer.AnnotationSharing: loadbalancer.SharingNone}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(string), Ports: []corev1.ServicePort{{Port: int32(port)}},
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack), ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
		},
	}
	*o.Spec.LoadBalancerClass = loadbalancer.Class
	testkit.Must(s.services().Create(s.t.Context(), o, metav1.CreateOptions{}))(s.t)
}

func (s *served) services() typed.ServiceInterface {
	return s.Core.CoreV1().Services(metav1.NamespaceDefault)
}

// reaches calls the port of a Service until ctx ends, and says by which address the program of a node was reached; nobody translates it.
func (s *served) reaches(ctx context.Context, name string, port int) (reached map[netip.Addr]string) {
	reached = map[netip.Addr]string{}
	for ctx.Err() == nil {
		if o, err := s.services().Get(ctx, name, metav1.GetOptions{}); err == nil {
			for _, in := range o.Status.LoadBalancer.Ingress {
				a := netip.MustParseAddr(in.IP)
				if said, err := s.hears(a, port); err == nil {
					reached[a] = said
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return reached
}

// answers waits until a node answers for the addresses of the Service, which the host outside reaches there, and returns the addresses and the node.
func (s *served) answers(among ...*rig.Node) (addrs []netip.Addr, holder *rig.Node) {
	s.t.Helper()
	return s.answersWithin(30*time.Second, among...)
}

// answersWithin is answers that waits for another time.
func (s *served) answersWithin(within time.Duration, among ...*rig.Node) (addrs []netip.Addr, holder *rig.Node) {
	s.t.Helper()
	testkit.Eventually(s.t, within, "the Service is reached", func() error {
		o, err := s.Core.CoreV1().Services(metav1.NamespaceDefault).Get(s.t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			return err
		}
		c := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionServed)
		i := slices.IndexFunc(among, func(n *rig.Node) bool { return c != nil && strings.Contains(c.Message, "Node "+n.Name+" ") })
		if len(o.Status.LoadBalancer.Ingress) != 2 || i < 0 {
			return fmt.Errorf("its status is %+v", o.Status)
		}
		addrs, holder = nil, among[i]
		for _, in := range o.Status.LoadBalancer.Ingress {
			a := netip.MustParseAddr(in.IP)
			addrs = append(addrs, a)
			if said, err := s.hears(a, s.ports[0]); err != nil || said != holder.Name {
				return fmt.Errorf("from %s the host hears %q, %w", a, said, err)
			}
		}
		return nil
	})
	return addrs, holder
}

// cutPower cuts the power of the node that has the Service's addresses until another one has the same, and returns that node, and for how long none answered.
func (s *served) cutPower(holder *rig.Node, addrs []netip.Addr) (next *rig.Node, silent time.Duration) {
	s.t.Helper()
	var pings []*netlab.Pinger
	for _, a := range addrs {
		pings = append(pings, rigtest.Pings(s.t, func() (*netlab.Pinger, error) { return s.PingOutside(a) }))
	}
	testkit.Check(s.t, holder.PowerCut(s.t.Context()))
	again, next := s.answers(slices.DeleteFunc(slices.Clone(s.nodes), func(n *rig.Node) bool { return n == holder })...)
	silent = outage(s.t, pings)
	if !slices.Equal(again, addrs) {
		s.t.Errorf("%s has %v, and %s had %v", next.Name, again, holder.Name, addrs)
	}
	testkit.Check(s.t, holder.PowerOn(s.t.Context()))
	s.listen(holder)
	testkit.Check(s.t, holder.Start(s.t.Context()))
	return next, silent
}

// A Service gets an address that one node answers for. Hosts outside reach the Service's port by it, and no other program of the node. When the node loses its
// power, another one answers. When the Service is gone, none does. A Service that no proxy serves is reached by nobody, and says so.
func TestAddressOfService(t *testing.T) {
	if testkit.LBForm.Long() { // TestWithoutServiceProxy is the short form
		t.Run("without the rules of the proxy", leavesWithoutServiceProxy)
	}
	s, ctx := newServed(t, "services", v2.AnnounceNeighbor), t.Context()
	s.serve("web", s.ports[0])
	s.serve("odd", s.ports[2])
	calling, end := context.WithCancel(ctx)
	reached := make(chan map[netip.Addr]string, 1)
	go func() { reached <- s.reaches(calling, "odd", s.ports[2]) }()
	addrs, holder := s.answers(s.nodes...)
	for _, a := range addrs {
		if said, err := s.hears(a, s.ports[1]); err == nil {
			t.Errorf("from another port of %s the host hears %q", a, said)
		}
	}
	var taken []time.Duration
	for range testkit.LBForm.Times(1, 20) {
		var silent time.Duration
		holder, silent = s.cutPower(holder, addrs)
		taken = append(taken, silent)
	}
	t.Logf("silent for %s after power cuts", taken)
	if longest := slices.Max(taken); longest > testkit.Limit(5*time.Second) {
		t.Errorf("the address was silent for %s after a power cut, want 5s at most", longest)
	}
	testkit.Eventually(t, 90*time.Second, "the Service that no proxy serves says so", func() error {
		o := testkit.Must(s.services().Get(ctx, "odd", metav1.GetOptions{}))(t)
		if c := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionServed); c == nil || c.Reason != v2.BlockForwardingBlocked {
			return fmt.Errorf("it says %+v", c)
		}
		return nil
	})
	end()
	if got := <-reached; len(got) > 0 {
		t.Errorf("programs of nodes are reached by the address of a Service that no proxy serves: %v", got)
	}
	testkit.Check(t, s.services().Delete(ctx, "web", metav1.DeleteOptions{}), s.services().Delete(ctx, "odd", metav1.DeleteOptions{}))
	testkit.Eventually(t, 30*time.Second, "nothing is left", func() error {
		claims := testkit.Must(s.Coil.CoilV2().AddressClaims("kube-system").List(ctx, metav1.ListOptions{}))(t).Items
		if len(claims) > 0 {
			return fmt.Errorf("there is the claim %s", claims[0].Name)
		}
		for _, n := range s.nodes {
			out := testkit.Must(n.Run(ctx, "sh", "-c", "ip -4 neigh show proxy; ip -6 neigh show proxy; ip -4 route show table all proto 32; ip -6 route show table all proto 32"))(t)
			if strings.Contains(out, addrs[0].String()) || strings.Contains(out, addrs[1].String()) {
				return errors.New(out)
			}
		}
		return nil
	})
}

// reached waits until the host outside reaches the Service at each of some nodes, and until others have nothing of its addresses.
func (s *served) reached(when string, by ...*rig.Node) {
	s.t.Helper()
	ctx := s.t.Context()
	testkit.Eventually(s.t, 30*time.Second, when, func() error {
		o, err := s.services().Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if len(o.Status.LoadBalancer.Ingress) != 2 {
			return fmt.Errorf("its status is %+v", o.Status)
		}
		for _, n := range s.nodes {
			has, err := n.Run(ctx, "sh", "-c", "ip -4 route show table local proto 32; ip -6 route show table local proto 32")
			if err != nil {
				return err
			}
			for _, in := range o.Status.LoadBalancer.Ingress {
				a := netip.MustParseAddr(in.IP)
				want := slices.Contains(by, n)
				if strings.Contains(has, in.IP) != want {
					return fmt.Errorf("%s has %q, want %s there: %t", n.Name, has, a, want)
				}
				if !want {
					continue
				}
				if err := s.RouteOutside(ctx, netip.PrefixFrom(a, a.BitLen()).String(), n); err != nil {
					return err
				}
				if said, err := s.hears(a, s.ports[0]); err != nil || said != n.Name {
					return fmt.Errorf("from %s by %s the host hears %q, %w", a, n.Name, said, err)
				}
			}
		}
		return nil
	})
}

// ready says that the nodes are ready, as their kubelets do. Without that they have addresses of Services only as long as no other test's node is ready.
func (s *served) ready() {
	s.t.Helper()
	for _, n := range s.nodes {
		const ready = `{"status":{"conditions":[{"type":"Ready","status":"True","reason":"KubeletReady","message":"","lastHeartbeatTime":null,"lastTransitionTime":null}]}}`
		testkit.Must(s.Core.CoreV1().Nodes().Patch(s.t.Context(), n.Name, types.StrategicMergePatchType, []byte(ready), metav1.PatchOptions{}, "status"))(s.t)
	}
}

// patch changes the Service.
func (s *served) patch(patch string) {
	s.t.Helper()
	testkit.Must(s.services().Patch(s.t.Context(), "web", types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(s.t)
}

// All nodes that may have it answer for an address of a Service that is announced by routes, so that routers may spread packets over them: those with endpoints, or
// all that are ready and not excluded. They go on while coild is away, and what others destroy of it comes back. An address that is announced to neighbours is at one node.
func TestServiceByRoutes(t *testing.T) {
	s, ctx := newServed(t, "routed", v2.AnnounceRoute), t.Context()
	s.ready()
	s.serve("web", s.ports[0])
	s.reached("nodes with endpoints answer", s.nodes...)
	endpoints := s.Core.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	slice := testkit.Must(endpoints.Get(ctx, "web", metav1.GetOptions{}))(t)
	slice.Endpoints = slice.Endpoints[1:]
	testkit.Must(endpoints.Update(ctx, slice, metav1.UpdateOptions{}))(t)
	s.reached("one has no endpoint any more", s.nodes[1:]...)
	s.patch(`{"spec":{"externalTrafficPolicy":"Cluster"}}`)
	s.reached("all nodes answer", s.nodes...)
	exclude := func(value string) {
		t.Helper()
		patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, corev1.LabelNodeExcludeBalancers, value)
		testkit.Must(s.Core.CoreV1().Nodes().Patch(ctx, s.nodes[0].Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
	}
	exclude(`""`)
	s.reached("one is excluded", s.nodes[1:]...)
	exclude("null")
	s.reached("it isn't any more", s.nodes...)
	// Packets pass before routing daemons are told.
	testkit.Eventually(t, 5*time.Second, "all nodes export a route of one metric, so that routers don't send all to one node", func() error {
		metrics := map[string]bool{}
		for _, n := range s.nodes {
			for _, family := range []string{"-4", "-6"} {
				_, metric, _ := strings.Cut(testkit.Must(n.Run(ctx, "ip", family, "route", "show", "table", "119", "proto", "32"))(t), " metric ")
				metrics[strings.Fields(metric + " none")[0]] = true
			}
		}
		if len(metrics) != 1 || metrics["none"] {
			return fmt.Errorf("the metrics are %v", slices.Collect(maps.Keys(metrics)))
		}
		return nil
	})
	o := testkit.Must(s.services().Get(ctx, "web", metav1.GetOptions{}))(t)
	var pings []*netlab.Pinger
	for _, in := range o.Status.LoadBalancer.Ingress {
		pings = append(pings, rigtest.Pings(t, func() (*netlab.Pinger, error) { return s.PingOutside(netip.MustParseAddr(in.IP)) }))
	}
	for _, n := range s.nodes {
		n.Coild.Kill()
	}
	lasts(t, 3*holding.Lease)
	s.reached("no coild runs", s.nodes...)
	for _, n := range s.nodes {
		testkit.Check(t, n.Start(ctx))
	}
	s.reached("they run again", s.nodes...)
	lasts(t, 2*holding.Lease) // what an earlier life has left would go
	if silent := outage(t, pings); silent > 0 {
		t.Errorf("while coild was away, and when it came back, the address was silent for %s", silent)
	}
	s.heals()
	testkit.Check(t, s.Announce(ctx, "routed", v2.AnnounceNeighbor))
	testkit.Eventually(t, 30*time.Second, "one node has the address", func() error {
		count := 0
		for _, n := range s.nodes {
			has, err := n.Run(ctx, "ip", "-4", "route", "show", "table", "local", "proto", "32")
			if err != nil {
				return err
			}
			count += strings.Count(has, "local ")
		}
		if count != 1 {
			return fmt.Errorf("%d have it", count)
		}
		return nil
	})
	testkit.Check(t, s.Announce(ctx, "routed", v2.AnnounceRoute))
	s.reached("announced by routes again", s.nodes...)
	testkit.Check(t, s.services().Delete(ctx, "web", metav1.DeleteOptions{}))
	testkit.Eventually(t, 30*time.Second, "no node has it", func() error {
		for _, n := range s.nodes {
			if has := testkit.Must(n.Run(ctx, "sh", "-c", "ip -4 route show table all proto 32; ip -6 route show table all proto 32"))(t); has != "" {
				return fmt.Errorf("%s has %s", n.Name, has)
			}
		}
		return nil
	})
}

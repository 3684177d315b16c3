package cluster

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/coil-net/coil/integration/lab/cluster"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/app/lbcontroller"
	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/kube/leader"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netlab"
)

// services is a namespace with Services, a pool of their addresses in the nodes' subnet, and a client outside of the cluster.
type services struct {
	env
	t *testing.T
	// ns is the namespace, and pool the AddressPool of the Services.
	ns, pool string
	client   *netlab.NS
}

func newServices(t *testing.T) *services {
	s := &services{env: use(t), t: t}
	s.ns = s.env.pool(t, 3, "10.66.0.0/24", "fd00:66::/120")
	s.pool = s.ns + "-outside"
	p := &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: s.pool}, Spec: v2.AddressPoolSpec{
		Purpose: v2.PurposeFloating, Announce: v2.AnnounceNeighbor, Subnets: []v2.SubnetSet{{IPv4: new("172.30.0.128/29"), IPv6: new("fd00:172:30::128/125")}},
	}}
	testkit.Must(s.coil.CoilV2().AddressPools().Create(t.Context(), p, metav1.CreateOptions{}))(t)
	s.client = testkit.Must(netlab.Open(testkit.Must(s.NetNS(cluster.Fabric))(t)))(t)
	t.Cleanup(func() {
		testkit.Check(t, s.client.Close(), s.coil.CoilV2().AddressPools().Delete(context.WithoutCancel(t.Context()), s.pool, metav1.DeleteOptions{}))
	})
	s.control(t, s.pool)
	return s
}

// control runs coil-lb-controller until the test ends.
func (e env) control(t *testing.T, pool string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	o := &lbcontroller.Options{CloudResync: time.Minute, Namespace: "kube-system", DefaultPool: pool, Options: leading.Options{Election: leader.Election{
		Namespace: "kube-system", LeaseDuration: 11 * time.Minute, RenewDeadline: 10 * time.Minute, RetryPeriod: time.Second, // other tests end the API server
	}}}
	go func() { ended <- lbcontroller.Run(ctx, e.RESTConfig(), o) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("coil-lb-controller ended with %v", err)
		}
	})
}

// serve makes a pod of a Service on each of some nodes, which says its name by port 8080.
func (s *services) serve(app string, nodes ...string) {
	for i, node := range nodes {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(app, "-", i), Namespace: s.ns, Labels: map[string]string{"app": app}},
			Spec: corev1.PodSpec{NodeName: node, TerminationGracePeriodSeconds: new(int64), AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{
				Name: "main", Image: tools, ImagePullPolicy: corev1.PullNever, Command: []string{"nc", "-ll", "-p", "8080", "-e", "hostname"},
			}}},
		}
		testkit.Eventually(s.t, 10*time.Second, "pod "+p.Name+" is created", func() error {
			_, err := s.core.CoreV1().Pods(s.ns).Create(s.t.Context(), p, metav1.CreateOptions{})
			return err
		})
	}
}

// make makes a Service of both families.
func (s *services) make(name, app string, policy corev1.ServiceExternalTrafficPolicy) *corev1.Service {
	o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: new(string), Selector: map[string]string{"app": app}, ExternalTrafficPolicy: policy,
		Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}, IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack),
	}}
	*o.Spec.LoadBalancerClass = loadbalancer.Class
	return testkit.Must(s.core.CoreV1().Services(s.ns).Create(s.t.Context(), o, metav1.CreateOptions{}))(s.t)
}

// holder waits until a Service has addresses at one of some nodes, and returns both.
func (s *services) holder(name string, nodes ...string) (addrs []netip.Addr, holder string) {
	s.t.Helper()
	testkit.Eventually(s.t, time.Minute, fmt.Sprintf("%s is at one of %v", name, nodes), func() error {
		o, err := s.core.CoreV1().Services(s.ns).Get(s.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		addrs, holder = nil, ""
		for _, in := range o.Status.LoadBalancer.Ingress {
			addrs = append(addrs, netip.MustParseAddr(in.IP))
		}
		if c := meta.FindStatusCondition(o.Status.Conditions, loadbalancer.ConditionServed); c != nil {
			if i := slices.IndexFunc(nodes, func(n string) bool { return strings.Contains(c.Message, "Node "+n+" ") }); i >= 0 {
				holder = nodes[i]
			}
		}
		if len(addrs) != 2 || holder == "" {
			return fmt.Errorf("its status is %+v", o.Status)
		}
		return nil
	})
	return addrs, holder
}

// asks returns the answer to the client at a port of an address. In one kernel the refusal of a first SYN may come while the client still sends it, and is heard only
// when that is repeated, after a second.
func (s *services) asks(a netip.Addr, port uint16) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), testkit.Timeout(2500*time.Millisecond))
	defer cancel()
	c, err := s.client.Dial(ctx, "tcp", netip.AddrPortFrom(a, port).String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	said, err := io.ReadAll(c)
	return strings.TrimSpace(string(said)), err
}

// reaches waits until the client reaches each of some pods, and no other one, by addresses.
func (s *services) reaches(addrs []netip.Addr, pods ...string) {
	s.t.Helper()
	for _, a := range addrs {
		testkit.Eventually(s.t, 30*time.Second, fmt.Sprintf("%v are reached by %s", pods, a), func() error {
			got := map[string]bool{}
			for range 30 {
				said, err := s.asks(a, 80)
				if err != nil {
					return err
				}
				if !slices.Contains(pods, said) {
					return fmt.Errorf("%q is reached", said)
				}
				if got[said] = true; len(got) == len(pods) {
					return nil
				}
			}
			return fmt.Errorf("only %v are reached", got)
		})
	}
}

// only lets addresses of Services be on one node, as the owner of a cluster does it.
func (s *services) only(ctx context.Context, node string) {
	s.t.Helper()
	for _, n := range s.Nodes() {
		s.exclude(ctx, n, node != "" && n != node)
	}
}

// exclude takes a node out, or lets it in again.
func (s *services) exclude(ctx context.Context, node string, out bool) {
	s.t.Helper()
	value := "null"
	if out {
		value = `""`
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, corev1.LabelNodeExcludeBalancers, value)
	_, err := s.core.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	testkit.Check(s.t, err)
}

// refused waits until clients of addresses are refused, and not left waiting.
func (s *services) refused(node string, addrs []netip.Addr) {
	s.t.Helper()
	for _, a := range addrs {
		testkit.Eventually(s.t, 30*time.Second, fmt.Sprintf("%s refuses clients of %s", node, a), func() error {
			said, err := s.asks(a, 80)
			if err == nil || !strings.Contains(err.Error(), "refused") {
				return fmt.Errorf("they hear %q, %w", said, err)
			}
			return nil
		})
	}
}

// Services are reached from outside behind a real kube-proxy, in the mode nftables and in the mode iptables: by all their endpoints, or those of the node that has the
// address. Nothing else of a node is.
func TestScenario28Services(t *testing.T) {
	s := newServices(t)
	nodes := s.Nodes()
	nftables, iptables := nodes[0], nodes[2]
	s.serve("web", nodes...)
	s.serve("near", nodes[1])
	s.running(t, s.ns, 2*time.Minute)
	web := s.make("web", "web", corev1.ServiceExternalTrafficPolicyCluster)
	s.make("near", "near", corev1.ServiceExternalTrafficPolicyLocal)
	near, at := s.holder("near", nodes...)
	if at != nodes[1] {
		t.Errorf("the address of near is at %s, and its endpoint on %s", at, nodes[1])
	}
	s.reaches(near, "near-0")

	t.Cleanup(func() { s.only(context.WithoutCancel(t.Context()), "") })
	var had []netip.Addr
	for _, node := range []string{nftables, iptables} {
		s.only(t.Context(), node)
		addrs, _ := s.holder("web", node)
		if had != nil && !slices.Equal(addrs, had) {
			t.Errorf("it had %v, and has %v", had, addrs)
		}
		had = addrs
		s.reaches(addrs, "web-0", "web-1", "web-2")
		for _, a := range addrs {
			for what, port := range map[string]uint16{"kubelet": 10250, "the NodePort": uint16(web.Spec.Ports[0].NodePort), "another port": 81} {
				if said, err := s.asks(a, port); err == nil {
					t.Errorf("%s of %s is reached by %s: %q", what, node, a, said)
				}
			}
			testkit.Check(t, s.client.Ping(a, testkit.Timeout(2*time.Second)))
		}
	}
	testkit.Check(t, s.core.CoreV1().Pods(s.ns).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "app=web"}))
	s.refused(iptables, had)
	s.only(t.Context(), nftables)
	s.holder("web", nftables)
	s.refused(nftables, had)
	for _, name := range []string{"web", "near"} {
		testkit.Check(t, s.core.CoreV1().Services(s.ns).Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	testkit.Eventually(t, time.Minute, "the addresses are given back", func() error {
		blocks, err := s.blocksOf(t, s.pool)
		if err == nil && len(blocks) > 0 {
			err = fmt.Errorf("there is %s", blocks[0].Name)
		}
		return err
	})
}

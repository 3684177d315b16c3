package lbgateway_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/lbgateway"
)

// facts are those of a dual-stack Service with one port of each protocol, two nodes, and no endpoint.
func facts() lbgateway.Facts {
	f := lbgateway.Facts{Service: &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}}
	f.Service.Spec = corev1.ServiceSpec{
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
		ClusterIPs: []string{"10.96.0.1", "fd96::1"},
		Ports: []corev1.ServicePort{
			{Name: "http", Port: 80, NodePort: 30080}, {Name: "dns", Protocol: corev1.ProtocolUDP, Port: 80, NodePort: 30081},
			{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: 9, NodePort: 30082},
		},
	}
	for _, a := range []string{"198.51.100.1", "2001:db8::1"} {
		for _, p := range f.Service.Spec.Ports {
			protocol := p.Protocol
			if protocol == "" {
				protocol = corev1.ProtocolTCP
			}
			f.Places = append(f.Places, lbgateway.Place{Address: netip.MustParseAddr(a), Protocol: protocol, Port: p.Port})
		}
	}
	f.Nodes = nodes()
	return f
}

// nodes are two nodes that are ready, and others.
func nodes(others ...*corev1.Node) lbgateway.Nodes {
	return lbgateway.NodesOf(append([]*corev1.Node{node(0, corev1.ConditionTrue), node(1, corev1.ConditionTrue)}, others...))
}

func node(i int, ready corev1.ConditionStatus) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("n", i)}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
	n.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeInternalIP, Address: fmt.Sprint("10.0.0.", i)}, {Type: corev1.NodeInternalIP, Address: fmt.Sprintf("fd00::%d", i+1)},
	}
	return n
}

// slice is an EndpointSlice of ports by their names, with endpoints such as "10.1.0.1@n0 ready".
func slice(ports map[string]int32, endpoints ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{}
	for name, port := range ports {
		protocol := map[string]corev1.Protocol{"http": corev1.ProtocolTCP, "dns": corev1.ProtocolUDP, "sctp": corev1.ProtocolSCTP}[name]
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &name, Port: &port, Protocol: &protocol})
	}
	for _, text := range endpoints {
		at, state, _ := strings.Cut(text, " ")
		address, node, _ := strings.Cut(at, "@")
		e := discoveryv1.Endpoint{Addresses: []string{address}, NodeName: &node}
		e.Conditions.Ready, e.Conditions.Serving = new(state == "ready"), new(state == "ready" || state == "ending")
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// lines tells forwards, one a line.
func lines(t *testing.T, f lbgateway.Facts) (out []string) {
	t.Helper()
	all, err := lbgateway.Forwards(f)
	if err != nil {
		return []string{err.Error()}
	}
	for _, to := range all {
		line := fmt.Sprintf("%d %s:", to.Protocol, netip.AddrPortFrom(to.Address, to.Port.Port))
		for _, e := range to.Endpoints {
			line += " " + e.String()
		}
		for _, e := range to.Draining {
			line += " (" + e.String() + ")"
		}
		if to.Affinity > 0 {
			line += " affinity " + to.Affinity.String()
		}
		if to.Sources != nil {
			line += fmt.Sprint(" from ", to.Sources)
		}
		out = append(out, line)
	}
	return out
}

// Scenario 22, 26, 28, 29 of load balancers: endpoints of each kind, in each state.
func TestForwards(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*lbgateway.Facts)
		want   []string
	}{
		"NodePorts of all nodes": {func(*lbgateway.Facts) {}, []string{
			"6 198.51.100.1:80: 10.0.0.0:30080 10.0.0.1:30080", "17 198.51.100.1:80: 10.0.0.0:30081 10.0.0.1:30081", "132 198.51.100.1:9: 10.0.0.0:30082 10.0.0.1:30082",
			"6 [2001:db8::1]:80: [fd00::1]:30080 [fd00::2]:30080", "17 [2001:db8::1]:80: [fd00::1]:30081 [fd00::2]:30081", "132 [2001:db8::1]:9: [fd00::1]:30082 [fd00::2]:30082",
		}},
		"28 NodePorts of nodes that aren't ready, or are excluded": {func(f *lbgateway.Facts) {
			f.Places = f.Places[:1]
			excluded := node(3, corev1.ConditionTrue)
			excluded.Labels = map[string]string{corev1.LabelNodeExcludeBalancers: ""}
			f.Nodes = nodes(node(2, corev1.ConditionUnknown), excluded)
		}, []string{"6 198.51.100.1:80: 10.0.0.0:30080 10.0.0.1:30080 (10.0.0.2:30080) (10.0.0.3:30080)"}},
		"28 NodePorts of nodes with endpoints": {func(f *lbgateway.Facts) {
			f.Places = f.Places[:1]
			f.Service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			f.Slices = []*discoveryv1.EndpointSlice{slice(map[string]int32{"http": 8080}, "10.1.0.1@n1 ready", "10.1.0.2@n0 ending")}
		}, []string{"6 198.51.100.1:80: 10.0.0.1:30080 (10.0.0.0:30080)"}},
		"28 no node with an endpoint": {func(f *lbgateway.Facts) {
			f.Places = f.Places[:1]
			f.Service.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		}, []string{"6 198.51.100.1:80: (10.0.0.0:30080) (10.0.0.1:30080)"}},
		"no NodePort": {func(f *lbgateway.Facts) { f.Service.Spec.Ports[1].NodePort = 0 }, []string{
			"port 80 has no NodePort: set spec.allocateLoadBalancerNodePorts, or have gateways send to ClusterIPs or pods (spec.endpoints of the LoadBalancerGateway)",
		}},
		"a port that the Service hasn't any more": {func(f *lbgateway.Facts) { f.Places, f.Service.Spec.Ports = f.Places[:2], f.Service.Spec.Ports[1:] },
			[]string{"17 198.51.100.1:80: 10.0.0.0:30081 10.0.0.1:30081"}},
		"ClusterIPs": {func(f *lbgateway.Facts) {
			f.Spec.Endpoints = v2.EndpointsClusterIP
			f.Slices = []*discoveryv1.EndpointSlice{slice(map[string]int32{"http": 8080}, "10.1.0.1@n1 ready")}
			f.Places = f.Places[:2]
		}, []string{"6 198.51.100.1:80: 10.96.0.1:80", "17 198.51.100.1:80:"}},
		"no ClusterIP": {func(f *lbgateway.Facts) {
			f.Spec.Endpoints = v2.EndpointsClusterIP
			f.Slices = []*discoveryv1.EndpointSlice{slice(map[string]int32{"http": 8080}, "10.1.0.1@n1 ready")}
			f.Service.Spec.ClusterIPs = []string{"None"}
		}, []string{"the Service has no ClusterIP of IPv4: this gateway sends to ClusterIPs (spec.endpoints of the LoadBalancerGateway)"}},
		"22 pods of several slices, with ports of their own": {func(f *lbgateway.Facts) {
			f.Spec.Endpoints = v2.EndpointsPod
			f.Slices = []*discoveryv1.EndpointSlice{
				slice(map[string]int32{"http": 8080, "dns": 53}, "10.1.0.2@n1 ready", "10.1.0.1@n0 ready", "10.1.0.4@n0 ending", "10.1.0.5@n0 gone"),
				slice(map[string]int32{"http": 8081}, "10.1.0.3@n1 ready", "10.1.0.1@n0 ready"),
				slice(map[string]int32{"http": 8080}, "fd01::1@n0 ready"),
			}
		}, []string{
			"6 198.51.100.1:80: 10.1.0.1:8080 10.1.0.1:8081 10.1.0.2:8080 10.1.0.3:8081 (10.1.0.4:8080)", "17 198.51.100.1:80: 10.1.0.1:53 10.1.0.2:53 (10.1.0.4:53)", "132 198.51.100.1:9:",
			"6 [2001:db8::1]:80: [fd01::1]:8080", "17 [2001:db8::1]:80:", "132 [2001:db8::1]:9:",
		}},
		"26 all pods are ending": {func(f *lbgateway.Facts) {
			f.Spec.Endpoints, f.Places = v2.EndpointsPod, f.Places[:1]
			f.Slices = []*discoveryv1.EndpointSlice{slice(map[string]int32{"http": 8080}, "10.1.0.4@n0 ending", "10.1.0.5@n0 gone")}
		}, []string{"6 198.51.100.1:80: 10.1.0.4:8080"}},
		"33 of one family, at a pair": {func(f *lbgateway.Facts) {
			f.Service.Spec.IPFamilies = f.Service.Spec.IPFamilies[1:]
			f.Places = []lbgateway.Place{f.Places[0], {Address: netip.MustParseAddr("2001:db8::1"), Protocol: f.Places[0].Protocol, Port: f.Places[0].Port}}
			f.Spec.Endpoints, f.Service.Spec.ClusterIPs = v2.EndpointsClusterIP, []string{"fd96::1"}
			f.Slices = []*discoveryv1.EndpointSlice{slice(map[string]int32{"http": 8080}, "fd00::4@n0 ready", "10.1.0.4@n0 ready")}
		}, []string{"6 [2001:db8::1]:80: [fd96::1]:80"}},
		"24, 29 source ranges, affinity": {func(f *lbgateway.Facts) {
			f.Places = f.Places[:1]
			f.Service.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			f.Service.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/25", "192.0.2.128/25", "2001:db8::1/32"}
		}, []string{"6 198.51.100.1:80: 10.0.0.0:30080 10.0.0.1:30080 affinity 3h0m0s from [192.0.2.0-192.0.2.255 2001:db8::-2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]"}},
		"29 an affinity of its own": {func(f *lbgateway.Facts) {
			f.Places = f.Places[:1]
			f.Service.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
			f.Service.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: new(int32(60))}}
		}, []string{"6 198.51.100.1:80: 10.0.0.0:30080 10.0.0.1:30080 affinity " + time.Minute.String()}},
		"36 a source range that can't be read": {func(f *lbgateway.Facts) { f.Service.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0"} },
			[]string{`spec.loadBalancerSourceRanges has "192.0.2.0": write a range such as 192.0.2.0/24`}},
	} {
		t.Run(name, func(t *testing.T) {
			f := facts()
			c.change(&f)
			if d := cmp.Diff(c.want, lines(t, f)); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

package networkpolicy_test

import (
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/coil-net/coil/pkg/plan/networkpolicy"
)

type rule = networkingv1.NetworkPolicyIngressRule

// networkPolicy is one of the pods with app=web.
func networkPolicy(name string, ingress ...rule) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}, Ingress: ingress,
		},
	}
}

func port(number int32, end *int32) networkingv1.NetworkPolicyPort {
	return networkingv1.NetworkPolicyPort{Port: new(intstr.FromInt32(number)), EndPort: end}
}

func ports(all ...networkingv1.NetworkPolicyPort) rule { return rule{Ports: all} }

func from(peers ...networkingv1.NetworkPolicyPeer) rule { return rule{From: peers} }

func block(cidr string, except ...string) networkingv1.NetworkPolicyPeer {
	return networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr, Except: except}}
}

// Scenario 25 of load balancers: which NetworkPolicies let clients in by their source. The pods have app=web and tier=front; the Service's port 80 leads to their port 8080 of TCP.
func TestScenario25Policies(t *testing.T) {
	pods := networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{}}
	name := networkingv1.NetworkPolicyPort{Port: new(intstr.FromString("http"))}
	udp := networkingv1.NetworkPolicyPort{Protocol: new(corev1.ProtocolUDP)}
	egress := networkPolicy("egress", from(block("192.0.2.0/24")))
	egress.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
	untyped := networkPolicy("untyped")
	untyped.Spec.PolicyTypes = nil
	of := func(p *networkingv1.NetworkPolicy, labels map[string]string) *networkingv1.NetworkPolicy {
		p.Spec.PodSelector = metav1.LabelSelector{MatchLabels: labels}
		return p
	}
	v6 := func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol} }
	for what, c := range map[string]struct {
		policies []*networkingv1.NetworkPolicy
		change   func(*corev1.Service)
		want     []string
	}{
		"no policy":                       {},
		"allow port":                      {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(8080, nil)))}},
		"allow another port":              {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(80, nil)))}, want: []string{"a"}},
		"allow another protocol":          {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(udp))}, want: []string{"a"}},
		"range":                           {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(8000, new(int32(8080)))))}},
		"endPort == port":                 {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(8080, new(int32(8080)))))}},
		"another range":                   {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(8081, new(int32(9000)))))}, want: []string{"a"}},
		"ipBlock":                         {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(block("192.0.2.0/24")))}, want: []string{"a"}},
		"ipBlock with except":             {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(block("0.0.0.0/0", "192.0.2.0/24")))}, want: []string{"a"}},
		"ipBlock of all":                  {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(block("0.0.0.0/0")))}},
		"v6 block":                        {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(block("2001:db8::/32")))}, change: v6, want: []string{"a"}},
		"v6 block of all, for IPv4":       {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(block("::/0")))}, want: []string{"a"}},
		"v6 block of all, for IPv6":       {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(block("::/0")))}, change: v6},
		"selector-only":                   {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(pods))}, want: []string{"a"}},
		"empty ingress":                   {policies: []*networkingv1.NetworkPolicy{networkPolicy("a")}, want: []string{"a"}},
		"empty ingress, by default":       {policies: []*networkingv1.NetworkPolicy{untyped}, want: []string{"untyped"}},
		"allow all":                       {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", rule{})}},
		"egress alone":                    {policies: []*networkingv1.NetworkPolicy{egress}},
		"two policies, one lets all in":   {policies: []*networkingv1.NetworkPolicy{networkPolicy("b"), networkPolicy("a", rule{})}},
		"two policies, by source":         {policies: []*networkingv1.NetworkPolicy{networkPolicy("b"), networkPolicy("a", from(block("192.0.2.0/24")))}, want: []string{"a", "b"}},
		"two policies, of other pods":     {policies: []*networkingv1.NetworkPolicy{of(networkPolicy("b"), map[string]string{"app": "db"}), networkPolicy("a", rule{})}},
		"one lets in to other pods":       {policies: []*networkingv1.NetworkPolicy{networkPolicy("b"), of(networkPolicy("a", rule{}), map[string]string{"tier": "back"})}, want: []string{"b"}},
		"one lets in to these pods":       {policies: []*networkingv1.NetworkPolicy{networkPolicy("b"), of(networkPolicy("a", rule{}), map[string]string{"tier": "front"})}},
		"named port":                      {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(name))}},
		"named port, of clients":          {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", rule{Ports: ports(name).Ports, From: from(pods).From})}, want: []string{"a"}},
		"another named port":              {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(name))}, change: func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.FromString("admin") }, want: []string{"a"}},
		"the port without a target port":  {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(80, nil)))}, change: func(s *corev1.Service) { s.Spec.Ports[0].TargetPort = intstr.IntOrString{} }},
		"one of two ports":                {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(8080, nil)))}, change: func(s *corev1.Service) { s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Port: 443}) }, want: []string{"a"}},
		"two ports, each by one of them":  {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", ports(port(8080, nil))), networkPolicy("b", ports(port(443, nil)))}, change: func(s *corev1.Service) { s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Port: 443}) }},
		"a selector that isn't one":       {policies: []*networkingv1.NetworkPolicy{{Spec: networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Operator: "?"}}}}}}},
		"two families, one of which open": {policies: []*networkingv1.NetworkPolicy{networkPolicy("a", from(block("0.0.0.0/0")))}, change: func(s *corev1.Service) { s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPv6Protocol) }, want: []string{"a"}},
	} {
		t.Run(what, func(t *testing.T) {
			s := &corev1.Service{Spec: corev1.ServiceSpec{
				IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}},
			}}
			if c.change != nil {
				c.change(s)
			}
			p := networkpolicy.Of(s, c.policies)
			if got := p.Close(map[string]string{"app": "web", "tier": "front"}); !slices.Equal(got, c.want) {
				t.Errorf("pods are closed by %q, want %q", got, c.want)
			}
			for _, name := range c.want {
				if p.Closing()[name] == nil {
					t.Errorf("%v don't let every source in, want %s, too", slices.Collect(maps.Keys(p.Closing())), name)
				}
			}
			if got := p.Close(map[string]string{"app": "other"}); got != nil {
				t.Errorf("other pods are closed by %q", got)
			}
		})
	}
}

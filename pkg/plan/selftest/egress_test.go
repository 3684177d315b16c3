package selftest

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// egress is one that has routers.
func egress(name string, destinations ...string) *v2.Egress {
	e := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: name}, Spec: v2.EgressSpec{Destinations: destinations, Replicas: 1}}
	e.Status.InClusterCIDRs = []string{"172.16.0.0/16", "fd00:172::/64"}
	e.Status.Conditions = []metav1.Condition{{Type: v2.EgressAvailable, Status: metav1.ConditionTrue}}
	return e
}

func TestWays(t *testing.T) {
	at := func(name string, addrs ...string) *corev1.Node {
		n := node(name, corev1.ConditionTrue)
		for _, a := range addrs {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
		}
		return n
	}
	nodes := []*corev1.Node{at("n1", "172.16.0.1", "fd00:172::1"), at("n2", "172.16.0.2", "fd00:172::2"), at("n3")}
	wide, narrow, closed, idle, broken := egress("wide", "0.0.0.0/0", "::/0"), egress("narrow", "172.16.0.2/32", "fd00:172::/124"), egress("closed", "0.0.0.0/0"), egress("idle", "0.0.0.0/0"), egress("broken", "0.0.0.0/0")
	closed.Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "shop"}}
	idle.Spec.Replicas, broken.Status.Conditions = 0, nil
	all := []*v2.Egress{wide, narrow, closed, idle, broken}
	outside := []netip.AddrPort{netip.MustParseAddrPort("203.0.113.5:443"), netip.MustParseAddrPort("172.16.0.9:80")}
	const label = "spec.allowedNamespaces doesn't let namespaces of selftests in, which have the labels app.kubernetes.io/component=selftest,app.kubernetes.io/name=coil"
	const direct = "its clients reach nodes without its routers: name a destination outside of the cluster with --destination"
	for _, tt := range []struct {
		name         string
		names        []string
		destinations []netip.AddrPort
		ways, left   []string
	}{
		{"all", nil, nil, []string{"internet/narrow: n2 [172.16.0.2:9380 [fd00:172::2]:9380]"}, []string{
			"wrong internet/broken: no router serves clients", "skipped internet/closed: " + label, "skipped internet/idle: its spec.replicas is 0", "skipped internet/wide: " + direct,
		}},
		{"named", []string{"internet/wide", "internet/none"}, nil, nil, []string{"wrong internet/none: there is no such Egress", "wrong internet/wide: " + direct}},
		{"destinations", []string{"internet/wide", "internet/narrow"}, outside, []string{"internet/wide:  [203.0.113.5:443]"},
			[]string{"wrong internet/narrow: its clients reach 203.0.113.5, 172.16.0.9 without its routers"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ways, left := Outward{Egresses: all, Names: tt.names, Destinations: tt.destinations, Nodes: nodes, Port: Port}.Ways()
			var got, gotLeft []string
			for _, w := range ways {
				got = append(got, fmt.Sprintf("%s: %s %s", w.Name(), w.Host, w.To))
			}
			for _, c := range left {
				gotLeft = append(gotLeft, fmt.Sprintf("%s %s: %s", c.State, c.Subject, c.Seen))
			}
			if diff := cmp.Diff(tt.ways, got) + cmp.Diff(tt.left, gotLeft); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	var many []*v2.Egress
	for i := range 11 {
		many = append(many, egress(fmt.Sprint("e", i), "172.16.0.2/32"))
	}
	if ways, left := (Outward{Egresses: many, Nodes: nodes, Port: Port}).Ways(); len(ways) != mostWays || len(left) != 1 || left[0].Seen != "3 Egresses aren't tried: name them with --egress" {
		t.Errorf("of 11 %d are tried: %+v", len(ways), left)
	}
}

func TestSources(t *testing.T) {
	routers := []*corev1.Pod{{Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.0.0.9"}, {IP: "fd00::9"}}}}, {}}
	addr := func(text string) v2.EgressAddress { return v2.EgressAddress{IPv4: text} }
	with := func(use v2.EgressAddressUse) *v2.Egress {
		e := egress("nat")
		e.Spec.Addresses = &v2.EgressAddresses{Use: use}
		e.Status.Addresses = []v2.EgressAddressStatus{{EgressAddress: addr("192.0.2.1")}, {EgressAddress: addr("192.0.2.2")}}
		e.Status.NodeAddresses = []v2.EgressNodeAddress{{EgressAddress: addr("172.16.0.1")}}
		return e
	}
	resolved := &v2.EgressPolicy{Status: v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{Address: &v2.ResolvedAddress{EgressAddress: addr("192.0.2.2")}}}}
	for _, tt := range []struct {
		name   string
		egress *v2.Egress
		policy *v2.EgressPolicy
		want   string
	}{
		{"routers", egress("nat"), nil, "10.0.0.9 fd00::9"},
		{"nodes", with(v2.EgressAddressOfNode), nil, "172.16.0.1"},
		{"addresses of routers", with(v2.EgressAddressOfRouter), resolved, "192.0.2.1 192.0.2.2"},
		{"the first one for annotations", with(v2.EgressAddressOfClient), nil, "192.0.2.1"},
		{"that of the policy", with(v2.EgressAddressOfClient), resolved, "192.0.2.2"},
		{"none of the policy yet", with(v2.EgressAddressOfClient), &v2.EgressPolicy{}, ""},
	} {
		var texts []string
		for _, a := range Sources(tt.egress, routers, tt.policy) {
			texts = append(texts, a.String())
		}
		if got := strings.Join(texts, " "); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestEgress(t *testing.T) {
	l := Left{
		Way: Way{Egress: egress("nat"), To: []netip.AddrPort{netip.MustParseAddrPort("172.16.0.2:9380"), netip.MustParseAddrPort("[fd00:172::2]:9380")}, Host: "n2"}, Check: CheckEgress,
		Client: pod("egress-0", "n1", "10.0.0.1"), Host: Pod{Name: "host-0"}, Sources: []netip.Addr{netip.MustParseAddr("10.0.3.9")},
	}
	questions := l.Questions()
	if len(questions) != 1 || questions[0].String() != "tcp:172.16.0.2:9380" {
		t.Fatalf("a client of one family asks %v", questions)
	}
	from := func(source string) Answer {
		return Answer{Question: questions[0].String(), Reached: true, Name: "host-0", Source: netip.MustParseAddrPort(source + ":7")}
	}
	other, foreign := from("10.0.3.9"), from("10.0.3.9")
	other.Name, foreign.Name, foreign.Source = "x", "", netip.AddrPort{}
	for _, tt := range []struct {
		answer Answer
		want   string
	}{
		{from("10.0.3.9"), "right: 172.16.0.2:9380 is reached with the source 10.0.3.9 of the routers"},
		{from("10.0.0.1"), "wrong: 172.16.0.2:9380 is reached with the pod's own source 10.0.0.1, so not through a router"},
		{from("192.0.2.1"), "wrong: 172.16.0.2:9380 is reached with the source 192.0.2.1, and routers have 10.0.3.9: something translates it"},
		{Answer{Question: questions[0].String(), Error: "no answer"}, "wrong: 172.16.0.2:9380: no answer"},
		{other, "wrong: 172.16.0.2:9380 is answered by something other than the pod there"},
		{Answer{}, "wrong: 172.16.0.2:9380 wasn't tried"},
	} {
		l.Answers = []Answer{tt.answer}
		c := judge.Egress(l)
		if got := fmt.Sprintf("%s: %s", c.State, c.Seen); got != tt.want || c.Subject != "internet/nat, from n1" || (c.Do != "") != (c.State == Wrong) {
			t.Errorf("%+v, want %s", c, tt.want)
		}
	}
	l.Answers = []Answer{from("10.0.0.1")}
	if c := judge.Egress(l); c.Do != "coilctl why pod s/egress-0; coilctl trace s/egress-0 172.16.0.2:9380" {
		t.Errorf("the commands are %s", c.Do)
	}
	l.Answers, l.Host = []Answer{foreign}, Pod{}
	if c := judge.Egress(l); c.State != Right || !strings.Contains(c.Seen, "which source arrives there isn't known") {
		t.Errorf("a destination of the admin's: %+v", c)
	}
	l.Answers, l.Sources = []Answer{from("10.0.3.9")}, nil
	if c := judge.Egress(l); c.State != Wrong || !strings.Contains(c.Seen, "no router has an address") {
		t.Errorf("without a router: %+v", c)
	}
	for _, l.Unallowed = range []bool{true, false} {
		l.Unread = errors.New("list pods: no")
		if c := judge.Egress(l); (c.State == Right) != l.Unallowed || c.Seen != "172.16.0.2:9380 is reached with the source 10.0.3.9; whether that is a router's isn't known: list pods: no" {
			t.Errorf("of routers that can't be read: %+v", c)
		}
		l.Answers = []Answer{from("10.0.0.1")}
		if c := judge.Egress(l); c.State != Wrong {
			t.Errorf("past routers that can't be read: %+v", c)
		}
		l.Answers = []Answer{from("10.0.3.9")}
	}
	l.Err = errors.New("forbidden")
	if c := judge.Egress(l); c.State != Wrong || !strings.Contains(c.Seen, "forbidden") {
		t.Errorf("without an answer: %+v", c)
	}
}

func TestService(t *testing.T) {
	s := Template{}.ServiceObject("", "b")
	if c := judge.Unassigned(s, ""); c.State != Wrong || c.Seen != "it has got no address" || c.Do != "coilctl why service s/selftest" || !slices.Equal(c.Pods, []string{"b"}) {
		t.Errorf("it is %+v", c)
	}
	s.Status.Conditions = []metav1.Condition{{Type: loadbalancer.ConditionAssigned, Status: metav1.ConditionFalse, Reason: string(loadbalancer.PoolNotFound), Message: "There is no AddressPool x"}}
	if c := judge.Unassigned(s, ""); c.State != Skipped || c.Do != "" || len(c.Pods) > 0 {
		t.Errorf("without a pool for Services: %+v", c)
	}
	if c := judge.Unassigned(s, "x"); c.State != Wrong || c.Seen != "it has got no address: There is no AddressPool x" {
		t.Errorf("without the pool that was named: %+v", c)
	}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.7"}, {Hostname: "h"}, {IP: "2001:db8::7"}}
	served := Served{From: pod("a", "n1", "10.0.0.1", "fd00::1"), Endpoint: pod("b", "n2", "10.0.1.1"), Addrs: ServiceAddrs(s), Port: Port}
	questions := served.Questions()
	if len(questions) != 2 || slices.ContainsFunc(questions, func(q Question) bool { return q.Kind != TCP }) {
		t.Fatalf("it asks %v", questions)
	}
	for _, q := range questions {
		served.Answers = append(served.Answers, Answer{Question: q.String(), Reached: true, Name: "b"})
	}
	if c := judge.Service(served); c.State != Right || c.Seen != "it has 192.0.2.7 and 2001:db8::7, and is reached from inside of the cluster" || c.Subject != "n1 -> Service -> n2" {
		t.Errorf("it is %+v", c)
	}
	served.Answers[0].Name, served.Answers[1] = "c", Answer{Question: questions[1].String(), Error: "no answer"}
	if c := judge.Service(served); c.State != Wrong || c.Seen != "192.0.2.7 is answered by something other than the Service's pod; 2001:db8::7: no answer" || c.Do == "" {
		t.Errorf("it is %+v", c)
	}
	served.Answers = nil
	if c := judge.Service(served); c.State != Wrong || !strings.Contains(c.Seen, "192.0.2.7 wasn't tried") {
		t.Errorf("it is %+v", c)
	}
}

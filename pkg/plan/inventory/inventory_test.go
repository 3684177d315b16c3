package inventory_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// Nodes have what their blocks say, also those whose Node is gone, and one that has nothing.
func TestNodes(t *testing.T) {
	ready := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}}
	ready.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	ready.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "172.16.0.2"}, {Type: corev1.NodeHostName, Address: "n2"}}
	coild := func(node string, ready corev1.ConditionStatus) *corev1.Pod {
		p := &corev1.Pod{Spec: corev1.PodSpec{NodeName: node}}
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}
		return p
	}
	block := func(node, prefix string, allocated int32) *v2.AddressBlock {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{v2.LabelNode: node}}, IPv4: &prefix}
		b.Status.Allocated, b.Status.Cooling = allocated, 1
		return b
	}
	moved := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{v2.LabelFloating: "true"}}, Floating: &v2.Floating{Holding: v2.FloatingHolding{Holder: "n2"}}}
	got := inventory.Nodes(inventory.Objects{
		Nodes:  []*corev1.Node{ready, {ObjectMeta: metav1.ObjectMeta{Name: "n1"}}},
		Coilds: []*corev1.Pod{coild("n2", corev1.ConditionTrue), coild("n1", corev1.ConditionFalse), coild("gone", corev1.ConditionTrue)},
		Blocks: []*v2.AddressBlock{block("n2", "10.0.0.0/30", 3), block("n2", "10.0.0.4/30", 1), block("gone", "10.0.0.8/30", 0), moved},
	})
	want := []inventory.Node{
		{Name: "gone", Blocks: 1, Addresses: 4, Cooling: 1}, {Name: "n1"},
		{Name: "n2", Ready: true, Coild: true, Blocks: 2, Allocated: 4, Addresses: 8, Cooling: 2, Floating: 1, InternalIPs: []string{"172.16.0.2"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Floating addresses say who owns them, and where they are.
func TestAddresses(t *testing.T) {
	since := metav1.NewTime(time.Unix(1000, 0))
	block := func(index int32, name, four string, f v2.Floating, conditions ...metav1.Condition) *v2.AddressBlock {
		f.Owner = v2.FloatingOwner{Kind: "Egress", Namespace: "internet", Name: "nat"}
		labels := map[string]string{v2.LabelPool: "out", v2.LabelFloating: "true"}
		return &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Index: index, IPv4: &four, Floating: &f, Status: v2.AddressBlockStatus{Conditions: conditions}}
	}
	blocked := metav1.Condition{Type: v2.BlockForwardingBlocked, Status: metav1.ConditionTrue, Message: "node n1: a\nnode n2: b"}
	fine := metav1.Condition{Type: v2.BlockConflicting, Status: metav1.ConditionFalse, Message: "over"}
	behind := metav1.Condition{Type: v2.BlockStandbyInStep, Status: metav1.ConditionFalse, Message: "node n2 lacks connections"}
	got := inventory.Addresses(inventory.Objects{Blocks: []*v2.AddressBlock{
		block(10, "out-10", "192.0.2.10/32", v2.Floating{ReleasedAt: &since, Holding: v2.FloatingHolding{Holder: "n1"}}),
		block(2, "out-2", "192.0.2.2/32", v2.Floating{Holding: v2.FloatingHolding{Holder: "n1", Since: &since}}, blocked, fine, behind),
		block(3, "out-3", "192.0.2.3/32", v2.Floating{Successors: []v2.FloatingNode{{Node: "n1"}}}),
		block(4, "out-4", "192.0.2.4/32", v2.Floating{Ports: []v2.FloatingPort{{Protocol: corev1.ProtocolTCP, Port: 80, Service: "shop/web"}, {Protocol: corev1.ProtocolUDP, Port: 53}}}),
		{ObjectMeta: metav1.ObjectMeta{Name: "pods-0"}},
	}})
	want := []inventory.Address{
		{Address: "192.0.2.2", Block: "out-2", Pool: "out", Owner: "Egress internet/nat", State: inventory.StateHeld, Holder: "n1", Since: &since, Attention: []string{"node n1: a; node n2: b", "node n2 lacks connections"}},
		{Address: "192.0.2.3", Block: "out-3", Pool: "out", Owner: "Egress internet/nat", State: inventory.StateNoHolder},
		{Address: "192.0.2.4", Block: "out-4", Pool: "out", Owner: "Egress internet/nat", State: inventory.StateNowhere, Ports: []string{"TCP 80 shop/web", "UDP 53"}},
		{Address: "192.0.2.10", Block: "out-10", Pool: "out", Owner: "Egress internet/nat", State: inventory.StateCooling, Holder: "n1", Since: &since},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Egresses count their policies, whatever kind these are of.
func TestEgresses(t *testing.T) {
	to := func(name string) v2.EgressPolicyStatus {
		return v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{Egress: &v2.EgressReference{Namespace: "internet", Name: name}}}
	}
	nat := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"}, Spec: v2.EgressSpec{Replicas: 2, Destinations: []string{"::/0"}}}
	nat.CreationTimestamp = metav1.Unix(1000, 0)
	nat.Status = v2.EgressStatus{Replicas: 1, Clients: 3, Addresses: make([]v2.EgressAddressStatus, 4), Conditions: []metav1.Condition{{Type: v2.EgressAvailable, Status: metav1.ConditionTrue}}}
	direct := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: "z"}, Spec: v2.EgressSpec{Peering: v2.EgressPeeringDirect}}
	got := inventory.Egresses(inventory.Objects{
		Egresses: []*v2.Egress{nat, direct}, Policies: []*v2.EgressPolicy{{Status: to("nat")}, {Status: to("other")}, {}, {Status: v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{}}}}, ClusterPolicies: []*v2.EgressClusterPolicy{{Status: to("nat")}},
	})
	want := []inventory.Egress{
		{Namespace: "apps", Name: "z", Peering: "Direct"},
		{Namespace: "internet", Name: "nat", Peering: "Service", Routers: 1, Wanted: 2, Clients: 3, Addresses: 4, Policies: 2, Available: true, Destinations: []string{"::/0"}, Created: metav1.Unix(1000, 0)},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Services that Coil serves, or of its class, say how far they are: by the first condition that isn't true, else by the last one.
func TestServices(t *testing.T) {
	service := func(name string, ours bool, conditions ...metav1.Condition) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
		if ours {
			s.Annotations = map[string]string{loadbalancer.AnnotationAssigned: ""}
		}
		s.CreationTimestamp, s.Spec.Ports = metav1.Unix(1000, 0), []corev1.ServicePort{{Port: 80}, {Port: 53, Protocol: corev1.ProtocolUDP}}
		s.Status.Conditions = conditions
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		return s
	}
	assigned := func(s metav1.ConditionStatus, reason string) metav1.Condition {
		return metav1.Condition{Type: loadbalancer.ConditionAssigned, Status: s, Reason: reason, Message: "a"}
	}
	served := metav1.Condition{Type: loadbalancer.ConditionServed, Status: metav1.ConditionTrue, Reason: "Served", Message: "s"}
	class := loadbalancer.Class
	bare := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "bare"}, Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: &class}}
	unclear := metav1.Condition{Type: loadbalancer.ConditionPolicies, Status: metav1.ConditionFalse, Reason: "ClientsHidden", Message: "p"}
	got := inventory.Services(inventory.Objects{Services: []*corev1.Service{
		bare, service("policed", true, assigned(metav1.ConditionTrue, "AddressAssigned"), served, unclear), service("web", true, assigned(metav1.ConditionTrue, "AddressAssigned"), served), service("theirs", false), service("new", true),
		service("late", true, assigned(metav1.ConditionFalse, "WaitsForAddress"), served),
	}})
	addresses, ports := []string{"192.0.2.1"}, []string{"80/TCP", "53/UDP"}
	want := []inventory.Service{
		{Namespace: "shop", Name: "bare", Addresses: []string{}, Ports: []string{}, Reason: "Pending"},
		{Namespace: "shop", Name: "late", Addresses: addresses, Ports: ports, Created: metav1.Unix(1000, 0), Reason: "WaitsForAddress", Message: "a"},
		{Namespace: "shop", Name: "new", Addresses: addresses, Ports: ports, Created: metav1.Unix(1000, 0), Reason: "Pending"},
		{Namespace: "shop", Name: "policed", Addresses: addresses, Ports: ports, Created: metav1.Unix(1000, 0), Reason: "ClientsHidden", Message: "p"},
		{Namespace: "shop", Name: "web", Addresses: addresses, Ports: ports, Created: metav1.Unix(1000, 0), Reason: "Served", Message: "s"},
	}
	if none := inventory.Services(inventory.Objects{}); none == nil {
		t.Error("no Service is null as JSON")
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

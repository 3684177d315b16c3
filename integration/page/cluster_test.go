package page

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/testkit"
)

// builder makes the objects of a cluster. The same calls make the same cluster, but for its times.
type builder struct {
	t *testing.T
	inventory.Objects
	random *rand.Rand
}

func newBuilder(t *testing.T) *builder {
	return &builder{t: t, Objects: inventory.Objects{Now: time.Now()}, random: rand.New(rand.NewPCG(1, 2))}
}

func (b *builder) ago(d time.Duration) metav1.Time { return metav1.NewTime(b.Now.Add(-d)) }

func (b *builder) meta(namespace, name string, age time.Duration) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, CreationTimestamp: b.ago(age)}
}

func text(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// pool makes an AddressPool with a subnet.
func (b *builder) pool(name string, bits int32, v4, v6 string, change func(*v2.AddressPoolSpec)) *v2.AddressPool {
	p := &v2.AddressPool{ObjectMeta: b.meta("", name, 90*24*time.Hour)}
	p.Spec = v2.AddressPoolSpec{BlockSizeBits: bits, Announce: v2.AnnounceRoute, Subnets: []v2.SubnetSet{{IPv4: text(v4), IPv6: text(v6)}}}
	if change != nil {
		change(&p.Spec)
	}
	b.Pools = append(b.Pools, p)
	return p
}

// carve returns a block of a pool.
func (b *builder) carve(p *v2.AddressPool, index int32) ipam.Block {
	spec, err := pools.Parse(p.Spec)
	testkit.Check(b.t, err)
	return testkit.Must(spec.Block(index))(b.t)
}

func (b *builder) add(o *v2.AddressBlock) *v2.AddressBlock {
	o.CreationTimestamp = b.ago(20 * 24 * time.Hour)
	b.Blocks = append(b.Blocks, o)
	return o
}

// hold gives blocks of a pool to nodes.
func (b *builder) hold(p *v2.AddressPool, index int32, node string, used, cooling int32) *v2.AddressBlock {
	o := b.add(pools.NewBlock(p, index, b.carve(p, index), pools.Holder{NodeName: node}))
	o.Status.Allocated, o.Status.Cooling = used, cooling
	return o
}

// float makes a floating address.
func (b *builder) float(p *v2.AddressPool, index int32, owner v2.FloatingOwner, holder string, held time.Duration) *v2.AddressBlock {
	o := b.add(pools.NewFloating(p, index, b.carve(p, index), v2.Floating{Owner: owner, Successors: []v2.FloatingNode{{Node: "worker-1"}}}))
	if holder != "" {
		since := b.ago(held)
		o.Floating.Holding = v2.FloatingHolding{Holder: holder, Since: &since}
	}
	return o
}

// count fills in the status of pools.
func (b *builder) count() {
	for _, p := range b.Pools {
		spec := testkit.Must(pools.Parse(p.Spec))(b.t)
		s := &p.Status
		s.Blocks.Total, s.Addresses.Total = spec.Total(), spec.Total()*int64(spec.BlockSize())
		for _, o := range b.Blocks {
			switch {
			case o.Labels[v2.LabelPool] != p.Name:
			case o.Floating == nil:
				s.Blocks.Used++
				s.Addresses.Used += int64(o.Status.Allocated)
			case o.Floating.ReleasedAt != nil:
				s.Blocks.Used++
				s.Floating.Cooling++
			default:
				s.Blocks.Used++
				s.Floating.Used++
			}
		}
		for _, u := range []*v2.Usage{&s.Blocks, &s.Addresses} {
			u.Summary = fmt.Sprintf("%d/%d", u.Used, u.Total)
		}
	}
}

// node makes a Node with its coild.
func (b *builder) node(i int, name string, ready, coild bool) {
	n := &corev1.Node{ObjectMeta: b.meta("", name, 90*24*time.Hour)}
	v4 := netip.AddrFrom4([4]byte{172, 16, byte(i >> 8), byte(i)})
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: v4.String()}, {Type: corev1.NodeInternalIP, Address: fmt.Sprintf("fd00:172::%x", i)}}
	status := func(is bool) corev1.ConditionStatus {
		if is {
			return corev1.ConditionTrue
		}
		return corev1.ConditionFalse
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status(ready), LastTransitionTime: b.ago(7 * time.Minute)}}
	p := &corev1.Pod{ObjectMeta: b.meta(metav1.NamespaceSystem, "coild-"+name, 12*24*time.Hour), Spec: corev1.PodSpec{NodeName: name}}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status(coild)}}
	if !coild {
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "coild", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
	}
	b.Nodes, b.Coilds = append(b.Nodes, n), append(b.Coilds, p)
}

func (b *builder) policy(namespace, name, egress, address, node string, clients int32) {
	since := b.ago(26 * time.Hour)
	status := v2.EgressPolicyStatus{Resolved: &v2.ResolvedPolicy{Egress: &v2.EgressReference{Namespace: "internet", Name: egress}}, Node: node, Since: &since, Clients: clients}
	status.Summary.Address = address
	status.Conditions = []metav1.Condition{{Type: v2.PolicyAccepted, Status: metav1.ConditionTrue}}
	if namespace == "" {
		b.ClusterPolicies = append(b.ClusterPolicies, &v2.EgressClusterPolicy{ObjectMeta: b.meta("", name, time.Hour), Status: status})
		return
	}
	b.Policies = append(b.Policies, &v2.EgressPolicy{ObjectMeta: b.meta(namespace, name, time.Hour), Status: status})
}

func (b *builder) service(namespace, name, address string, age time.Duration, status metav1.ConditionStatus, reason, message string, ports ...int32) {
	s := &corev1.Service{ObjectMeta: b.meta(namespace, name, age)}
	s.Annotations = map[string]string{loadbalancer.AnnotationAssigned: address}
	for _, p := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Port: p})
	}
	if address != "" {
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
	}
	s.Status.Conditions = []metav1.Condition{{Type: loadbalancer.ConditionAssigned, Status: status, Reason: reason, Message: message, LastTransitionTime: b.ago(age)}}
	b.Services = append(b.Services, s)
}

// lead adds Leases that are renewed.
func (b *builder) lead() {
	for _, name := range []string{plan.IPAMLease, plan.EgressLease, plan.LBLease} {
		renewed := metav1.NewMicroTime(b.Now.Add(time.Hour))
		b.Leases = append(b.Leases, &coordinationv1.Lease{ObjectMeta: b.meta(metav1.NamespaceSystem, name, time.Hour), Spec: coordinationv1.LeaseSpec{RenewTime: &renewed}})
	}
}

// small is a cluster of twelve nodes in which two things are wrong.
func small(t *testing.T) *builder {
	b := newBuilder(t)
	for i := 1; i <= 12; i++ {
		b.node(i, fmt.Sprintf("worker-%d", i), i != 9, i != 4 && i != 9)
	}
	standard := b.pool("default", 5, "10.100.0.0/18", "fd00:100::/114", nil)
	for i := range int32(171) {
		used := int32(min(32, b.random.IntN(44)))
		o := b.hold(standard, i+i/9+i/50*13, fmt.Sprintf("worker-%d", 1+int(i)%12), used, int32(b.random.IntN(2)))
		if i >= 165 {
			o.CreationTimestamp = b.ago(time.Duration(i-160) * time.Hour)
		}
	}
	b.pool("batch", 4, "10.101.0.0/22", "", func(s *v2.AddressPoolSpec) { s.Exclude = []string{"10.101.0.0-10.101.0.31"} })
	for i := range int32(24) {
		b.hold(b.Pools[1], i+2, fmt.Sprintf("worker-%d", 5+int(i)%8), int32(b.random.IntN(17)), 0)
	}
	public := b.pool("public", 0, "203.0.113.0/26", "2001:db8:113::/122", func(s *v2.AddressPoolSpec) {
		s.Purpose, s.Announce = v2.PurposeFloating, v2.AnnounceNeighbor
	})
	nat := v2.FloatingOwner{Kind: "Egress", Namespace: "internet", Name: "nat"}
	for i := range int32(4) {
		b.float(public, i, nat, fmt.Sprintf("worker-%d", 1+i), time.Duration(3+9*i)*time.Hour)
	}
	released := b.ago(4 * time.Minute)
	b.float(public, 9, v2.FloatingOwner{Kind: "Service", Namespace: "shop", Name: "old"}, "", 0).Floating.ReleasedAt = &released
	web := b.float(public, 6, v2.FloatingOwner{Kind: "Service", Namespace: "shop", Name: "web"}, "worker-3", 70*time.Hour)
	web.Floating.Ports = []v2.FloatingPort{{Protocol: corev1.ProtocolTCP, Port: 80, Service: "shop/web"}, {Protocol: corev1.ProtocolTCP, Port: 443, Service: "shop/web"}}
	mail := b.float(public, 7, v2.FloatingOwner{Kind: "Service", Namespace: "office", Name: "mail"}, "worker-6", 31*time.Minute)
	mail.Floating.Ports = []v2.FloatingPort{{Protocol: corev1.ProtocolTCP, Port: 25, Service: "office/mail"}}

	egress := &v2.Egress{ObjectMeta: b.meta("internet", "nat", 60*24*time.Hour), Spec: v2.EgressSpec{
		Replicas: 4, Peering: v2.EgressPeeringDirect, Destinations: []string{"0.0.0.0/0", "::/0"}, Default: true, Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfClient, Pool: "public"},
	}}
	egress.Status = v2.EgressStatus{Replicas: 4, Clients: 117, Conditions: []metav1.Condition{{Type: v2.EgressAvailable, Status: metav1.ConditionTrue}}}
	partner := &v2.Egress{ObjectMeta: b.meta("internet", "partner", 9*24*time.Hour), Spec: v2.EgressSpec{
		Replicas: 2, Peering: v2.EgressPeeringDirect, Destinations: []string{"192.0.2.0/24"}, Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfNode},
	}}
	partner.Status = v2.EgressStatus{Replicas: 2, Clients: 9, Conditions: []metav1.Condition{{Type: v2.EgressAvailable, Status: metav1.ConditionTrue}}}
	for i, n := range []int{2, 7} {
		partner.Status.NodeAddresses = append(partner.Status.NodeAddresses, v2.EgressNodeAddress{
			Router: fmt.Sprintf("partner-6c9f7d5b8-%s", []string{"kx2vq", "w8rzt"}[i]), Node: fmt.Sprintf("worker-%d", n), EgressAddress: v2.EgressAddress{IPv4: fmt.Sprintf("172.16.0.%d", n)},
		})
	}
	b.Egresses = []*v2.Egress{egress, partner}
	for i, p := range []string{"shop/checkout", "shop/search", "office/backup"} {
		namespace, name, _ := strings.Cut(p, "/")
		b.policy(namespace, name, "nat", fmt.Sprintf("203.0.113.%d,2001:db8:113::%d", i, i), fmt.Sprintf("worker-%d", i+1), int32(40-13*i))
	}
	b.policy("", "everything-else", "nat", "203.0.113.3,2001:db8:113::3", "worker-4", 24)
	b.policy("shop", "invoices", "partner", "172.16.0.2,172.16.0.7", "", 9)

	b.service("shop", "web", "203.0.113.6", 70*time.Hour, metav1.ConditionTrue, "AddressAssigned", "The Service has its addresses", 80, 443)
	b.service("office", "mail", "203.0.113.7", 12*24*time.Hour, metav1.ConditionTrue, "AddressAssigned", "The Service has its addresses", 25)
	b.service("office", "chat", "198.51.100.3", 3*24*time.Hour, metav1.ConditionTrue, "AddressAssigned", "The Service has its addresses", 5222)
	lb := b.pool("gateways", 0, "198.51.100.0/27", "", func(s *v2.AddressPoolSpec) { s.Purpose, s.Announce = v2.PurposeFloating, v2.AnnounceGateway })
	b.float(lb, 3, v2.FloatingOwner{Kind: "Service", Namespace: "office", Name: "chat"}, "", 0).Floating.Successors = nil
	heard := b.ago(20 * time.Second)
	g := &v2.LoadBalancerGateway{ObjectMeta: b.meta("", "edge-1", 30*24*time.Hour), Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"gateways"}}}
	g.Status = v2.LoadBalancerGatewayStatus{Applied: v2.GatewayState{Services: 1, Ports: 1, Endpoints: 3}, LastContact: &heard}
	b.Gateways = []*v2.LoadBalancerGateway{g}
	b.lead()
	b.count()
	return b
}

// large is a cluster of so many nodes and blocks, in four pools, in which all is well.
func large(t *testing.T, nodes, blocks int) *builder {
	b := newBuilder(t)
	for i := range nodes {
		b.node(i+1, fmt.Sprintf("worker-%05d.example.internal", i), true, true)
	}
	for i := range 4 {
		b.pool(fmt.Sprintf("pool-%d", i), 5, fmt.Sprintf("10.%d.0.0/14", 4*i), fmt.Sprintf("fd00:10:%d::/110", i), nil)
	}
	for i := range blocks {
		b.hold(b.Pools[i%4], int32(i/4), b.Nodes[i%nodes].Name, int32(b.random.IntN(33)), 0)
	}
	b.lead()
	b.count()
	return b
}

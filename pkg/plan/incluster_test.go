package plan

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
)

func parsePrefixes(text string) (out []netip.Prefix) {
	for _, f := range strings.Fields(text) {
		out = append(out, netip.MustParsePrefix(f))
	}
	return out
}

func TestAggregate(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"nothing", "", ""},
		{"twice", "10.0.0.0/8 10.0.0.0/8", "10.0.0.0/8"},
		{"inside", "10.1.0.0/16 10.0.0.0/8 10.0.0.0/32", "10.0.0.0/8"},
		{"two halves", "10.0.1.0/24 10.0.0.0/24", "10.0.0.0/23"},
		{"neighbours that aren't halves", "10.0.1.0/24 10.0.2.0/24", "10.0.1.0/24 10.0.2.0/24"},
		{"quarters", "10.0.0.0/26 10.0.0.128/26 10.0.0.64/26 10.0.0.192/26", "10.0.0.0/24"},
		{"a half and what is inside the other", "10.0.0.0/25 10.0.0.128/26", "10.0.0.0/25 10.0.0.128/26"},
		{"both families", "fd00::1/128 fd00::/128 0.0.0.0/1 128.0.0.0/1", "0.0.0.0/0 fd00::/127"},
		{"all", "::/0 fd00::/8 0.0.0.0/0 10.0.0.0/8", "0.0.0.0/0 ::/0"},
	} {
		if got := Aggregate(parsePrefixes(tt.in)); !slices.Equal(got, parsePrefixes(tt.want)) {
			t.Errorf("%s: %v, want %s", tt.name, got, tt.want)
		}
	}
}

// inCluster returns the ranges of a cluster as an Egress of destinations has them.
func inCluster(f ClusterFacts, destinations ...string) []netip.Prefix {
	return NewClusterRanges(f).For(&v2.Egress{Spec: v2.EgressSpec{Destinations: destinations}})
}

func nodeWith(podCIDRs []string, addrs ...corev1.NodeAddress) *corev1.Node {
	return &corev1.Node{Spec: corev1.NodeSpec{PodCIDRs: podCIDRs}, Status: corev1.NodeStatus{Addresses: addrs}}
}

func TestInClusterRanges(t *testing.T) {
	f := ClusterFacts{
		Pools: []*v2.AddressPool{{Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new("100.64.0.1/20"), IPv6: new("fd64::/116")}, {IPv4: new("bad")}}}}},
		Nodes: []*corev1.Node{
			nodeWith([]string{"10.244.0.0/24"}, corev1.NodeAddress{Type: "InternalIP", Address: "203.0.113.4"}, corev1.NodeAddress{Type: "Hostname", Address: "203.0.113.77"}),
			nodeWith(nil, corev1.NodeAddress{Type: "InternalIP", Address: "::ffff:203.0.113.5"}, corev1.NodeAddress{Type: "InternalIP", Address: "nonsense"}),
		},
		Services: []*networkingv1.ServiceCIDR{{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16", "bad"}}}},
	}
	if got, want := inCluster(f), parsePrefixes("10.96.0.0/16 100.64.0.0/20 203.0.113.4/31 fd64::/116"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	f.Pools, f.ForeignPods = nil, true
	if got, want := inCluster(f), parsePrefixes("10.96.0.0/16 10.244.0.0/24 203.0.113.4/31"); !slices.Equal(got, want) {
		t.Errorf("without pools: %v, want %v", got, want)
	}
}

// kubelet writes the addresses of its Node.
func TestInClusterAddressesOfNodes(t *testing.T) {
	external := func(a string) corev1.NodeAddress { return corev1.NodeAddress{Type: "ExternalIP", Address: a} }
	f := ClusterFacts{Nodes: []*corev1.Node{
		nodeWith(nil, corev1.NodeAddress{Type: "InternalIP", Address: "192.0.2.1"}, external("198.51.100.7"), external("203.0.113.7"), external("2001:db8::7")),
	}}
	if got, want := inCluster(f), parsePrefixes("192.0.2.1/32"); !slices.Equal(got, want) {
		t.Errorf("ExternalIPs of no range: %v, want %v", got, want)
	}
	f.External = parsePrefixes("203.0.113.0/24 2001:db8::/64")
	if got, want := inCluster(f), parsePrefixes("192.0.2.1/32 203.0.113.7/32 2001:db8::7/128"); !slices.Equal(got, want) {
		t.Errorf("ExternalIPs of two ranges: %v, want %v", got, want)
	}
	var many []corev1.NodeAddress
	for i := range 8000 {
		many = append(many, corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("198.%d.%d.1", i/256, i%256)})
	}
	f.Nodes = append(f.Nodes, nodeWith(nil, many...))
	if got := inCluster(f); len(got) != 3+maxInternalIPs {
		t.Errorf("one Node fills %d ranges", len(got)-3)
	}
}

// largeCluster has racks of dual-stack nodes, with a subnet each.
func largeCluster(nodes, perRack int) ClusterFacts {
	var f ClusterFacts
	for i := range nodes {
		rack, slot := i/perRack, i%perRack
		f.Nodes = append(f.Nodes, nodeWith(nil,
			corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("10.%d.%d.%d", rack>>8, rack&255, 11+slot)},
			corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("fd00:10:%x::%x", rack, 0x11+slot)}))
	}
	f.Services = []*networkingv1.ServiceCIDR{{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12"}}}}
	f.Pools = []*v2.AddressPool{{Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new("100.64.0.0/10")}, {IPv4: new("198.51.100.0/24")}}}}}
	return f
}

// Each coild of the cluster gets the status of each Egress whenever it changes.
func TestInClusterRangesAreFew(t *testing.T) {
	f := largeCluster(5000, 20)
	got := inCluster(f, "0.0.0.0/0", "::/0", "192.0.2.0/24")
	if len(got) > maxCoarse+2 {
		t.Errorf("%d ranges of a cluster whose private ranges no destination has", len(got))
	}
	f.Nodes = f.Nodes[:len(f.Nodes)-1]
	if again := inCluster(f, "0.0.0.0/0", "::/0", "192.0.2.0/24"); !slices.Equal(got, again) {
		t.Errorf("one node less: %v, before %v", again, got)
	}
	for _, p := range NewClusterRanges(f).all {
		if !within(p, got) {
			t.Errorf("%s is nowhere", p)
		}
	}
	for _, p := range got {
		if !within(p, dataplane.PrivateRanges) && !within(p, parsePrefixes("100.64.0.0/10 198.51.100.0/24")) {
			t.Errorf("%s isn't in the cluster", p)
		}
	}
}

// Clients do the same by the ranges that concern their Egresses as by all of the cluster.
func TestInClusterRangesOfClients(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	possible := []string{
		"0.0.0.0/0", "::/0", "10.0.0.0/8", "10.0.0.0/9", "10.0.3.0/24", "10.0.3.11/32", "10.96.0.0/12", "10.96.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
		"fc00::/7", "fd00:10::/32", "fd00:10:7::/64", "198.51.100.0/24", "198.51.100.128/25", "198.51.0.0/16", "100.64.0.0/12", "8.0.0.0/6", "203.0.113.0/24", "2001:db8::/32",
	}
	for range 200 {
		f := largeCluster(1+rng.IntN(600), 1+rng.IntN(40))
		for range rng.IntN(10) {
			f.Nodes = append(f.Nodes, nodeWith(nil,
				corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("203.0.113.%d", rng.IntN(256))},
				corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("172.%d.0.9", 16+rng.IntN(20))},
				corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("2001:db8::%x", rng.IntN(256))}))
		}
		ranges := NewClusterRanges(f)
		var published, all []ClientEgress
		for i := range 1 + rng.IntN(3) {
			e := &v2.Egress{Spec: v2.EgressSpec{OriginatingOnly: rng.IntN(2) == 0}}
			e.Namespace, e.Name = "internet", fmt.Sprint("nat", i)
			for range 1 + rng.IntN(3) {
				e.Spec.Destinations = append(e.Spec.Destinations, possible[rng.IntN(len(possible))])
			}
			c := ClientEgressOf(e, nil)
			c.Peers = clientAddrs("46", fmt.Sprintf("10.96.0.%d", i), fmt.Sprintf("fd96::%d", i))
			c.InCluster = ranges.For(e)
			published = append(published, c)
			c.InCluster = ranges.all
			all = append(all, c)
		}
		got, want := ClientStateOf(clientOfFamilies("46", published...)), ClientStateOf(clientOfFamilies("46", all...))
		if diff := cmp.Diff(lines(want), lines(got)); diff != "" {
			t.Fatalf("Egresses %v (-all +published):\n%s", published, diff)
		}
		if diff := cmp.Diff(want.Filter, got.Filter, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Fatalf("Egresses %v, filter (-all +published):\n%s", published, diff)
		}
	}
}

// A private destination that is added takes nothing of the cluster, also before the status follows it.
func TestInClusterRangesBeforeADestinationIsAdded(t *testing.T) {
	f := largeCluster(5000, 40)
	e := ClientEgress{Name: "internet/nat", Destinations: parsePrefixes("0.0.0.0/0 ::/0 10.0.0.0/8 fc00::/7"), InCluster: inCluster(f, "0.0.0.0/0", "::/0")}
	var spared []netip.Prefix
	for _, r := range ClientStateOf(clientOfFamilies("46", e)).Routes {
		if r.Type == dataplane.Throw && r.Table == dataplane.TableNarrow {
			spared = append(spared, r.Dst)
		}
	}
	for _, p := range NewClusterRanges(f).all {
		if !within(p, spared) {
			t.Errorf("%s is captured", p)
		}
	}
	if within(netip.MustParsePrefix("10.200.0.0/16"), spared) {
		t.Error("10.200.0.0/16, which isn't in the cluster, is spared")
	}
}

// TestNarrow holds that too many ranges become fewer, none is lost, and near ones are joined first.
func TestNarrow(t *testing.T) {
	if got, want := narrow(parsePrefixes("10.0.0.1/32 10.0.0.2/32 192.0.2.0/24 fd00::/64"), 3), parsePrefixes("10.0.0.0/30 192.0.2.0/24 fd00::/64"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	// Nodes whose IPv6 addresses have far ways between them cost IPv4 nothing.
	rng := rand.New(rand.NewPCG(1, 2))
	var sparse ClusterFacts
	for i := range 6000 {
		sparse.Nodes = append(sparse.Nodes, &corev1.Node{Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: "InternalIP", Address: fmt.Sprintf("10.%d.%d.1", i/8%32, i%8*2)}, {Type: "InternalIP", Address: fmt.Sprintf("2001:db8:%x:%x::1", rng.IntN(1<<16), rng.IntN(1<<16))},
		}}})
	}
	sparse.Pools = []*v2.AddressPool{{Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new("100.64.0.0/10")}}}}}
	four := func(all []netip.Prefix) []netip.Prefix {
		return slices.DeleteFunc(slices.Clone(all), func(p netip.Prefix) bool { return !p.Addr().Is4() })
	}
	got := inCluster(sparse, "10.0.0.0/8")
	if n := len(got); n > maxInCluster || n < maxInCluster/4 {
		t.Errorf("%d ranges, at most %d may be", n, maxInCluster)
	}
	few := ClusterFacts{Pools: sparse.Pools}
	for _, n := range sparse.Nodes {
		few.Nodes = append(few.Nodes, &corev1.Node{Status: corev1.NodeStatus{Addresses: n.Status.Addresses[:1]}})
	}
	if want := inCluster(few, "10.0.0.0/8"); !slices.Equal(four(got), want) {
		t.Errorf("beside sparse IPv6 there are %d ranges of IPv4, want %d", len(four(got)), len(want))
	}
	var f ClusterFacts
	for range 10000 {
		f.Nodes = append(f.Nodes, &corev1.Node{Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: "InternalIP", Address: fmt.Sprintf("10.%d.%d.%d", rng.IntN(200), rng.IntN(256), rng.IntN(256))},
		}}})
	}
	all := inCluster(f, "10.0.0.0/8")
	if len(all) > maxInCluster || len(all) < maxInCluster/8 {
		t.Errorf("%d ranges, at most %d may be", len(all), maxInCluster)
	}
	for _, n := range f.Nodes {
		a := netip.MustParseAddr(n.Status.Addresses[0].Address)
		if !slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) }) {
			t.Fatalf("%s is lost", a)
		}
	}
	if !slices.Equal(all, Aggregate(all)) {
		t.Error("they are not aggregated")
	}
}

package cluster

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// inCluster returns the ranges of a cluster as an Egress of destinations has them.
func inCluster(f Facts, destinations ...string) []netip.Prefix {
	return RangesOf(f).For(&v2.Egress{Spec: v2.EgressSpec{Destinations: destinations}})
}

func TestInClusterRanges(t *testing.T) {
	f := Facts{
		Pools: []*v2.AddressPool{{Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new("100.64.0.1/20"), IPv6: new("fd64::/116")}, {IPv4: new("bad")}}}}},
		Nodes: []*corev1.Node{
			plantest.Node([]string{"10.244.0.0/24"}, corev1.NodeAddress{Type: "InternalIP", Address: "203.0.113.4"}, corev1.NodeAddress{Type: "Hostname", Address: "203.0.113.77"}),
			plantest.Node(nil, corev1.NodeAddress{Type: "InternalIP", Address: "::ffff:203.0.113.5"}, corev1.NodeAddress{Type: "InternalIP", Address: "nonsense"}),
		},
		Services: []*networkingv1.ServiceCIDR{{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16", "bad"}}}},
	}
	if got, want := inCluster(f), plantest.Prefixes("10.96.0.0/16 100.64.0.0/20 203.0.113.4/31 fd64::/116"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	f.Pools, f.ForeignPods = nil, true
	if got, want := inCluster(f), plantest.Prefixes("10.96.0.0/16 10.244.0.0/24 203.0.113.4/31"); !slices.Equal(got, want) {
		t.Errorf("without pools: %v, want %v", got, want)
	}
}

// kubelet writes the addresses of its Node.
func TestInClusterAddressesOfNodes(t *testing.T) {
	external := func(a string) corev1.NodeAddress { return corev1.NodeAddress{Type: "ExternalIP", Address: a} }
	f := Facts{Nodes: []*corev1.Node{
		plantest.Node(nil, corev1.NodeAddress{Type: "InternalIP", Address: "192.0.2.1"}, external("198.51.100.7"), external("203.0.113.7"), external("2001:db8::7")),
	}}
	if got, want := inCluster(f), plantest.Prefixes("192.0.2.1/32"); !slices.Equal(got, want) {
		t.Errorf("ExternalIPs of no range: %v, want %v", got, want)
	}
	f.External = plantest.Prefixes("203.0.113.0/24 2001:db8::/64")
	if got, want := inCluster(f), plantest.Prefixes("192.0.2.1/32 203.0.113.7/32 2001:db8::7/128"); !slices.Equal(got, want) {
		t.Errorf("ExternalIPs of two ranges: %v, want %v", got, want)
	}
	var many []corev1.NodeAddress
	for i := range 8000 {
		many = append(many, corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("198.%d.%d.1", i/256, i%256)})
	}
	f.Nodes = append(f.Nodes, plantest.Node(nil, many...))
	if got := inCluster(f); len(got) != 3+16 {
		t.Errorf("one Node fills %d ranges", len(got)-3)
	}
}

func largeCluster(nodes, perRack int) (f Facts) {
	f.Pools, f.Nodes, f.Services = plantest.Cluster(nodes, perRack)
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
	for _, p := range RangesOf(f).all {
		if !prefixes.Within(p, got) {
			t.Errorf("%s is nowhere", p)
		}
	}
	for _, p := range got {
		if !prefixes.Within(p, dataplane.PrivateRanges) && !prefixes.Within(p, plantest.Prefixes("100.64.0.0/10 198.51.100.0/24")) {
			t.Errorf("%s isn't in the cluster", p)
		}
	}
}

// TestNarrowRanges holds that too many ranges become fewer, none is lost, and one family costs the other nothing.
func TestNarrowRanges(t *testing.T) {
	// Nodes whose IPv6 addresses have far ways between them cost IPv4 nothing.
	rng := rand.New(rand.NewPCG(1, 2))
	var sparse Facts
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
	few := Facts{Pools: sparse.Pools}
	for _, n := range sparse.Nodes {
		few.Nodes = append(few.Nodes, &corev1.Node{Status: corev1.NodeStatus{Addresses: n.Status.Addresses[:1]}})
	}
	if want := inCluster(few, "10.0.0.0/8"); !slices.Equal(four(got), want) {
		t.Errorf("beside sparse IPv6 there are %d ranges of IPv4, want %d", len(four(got)), len(want))
	}
	var f Facts
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
	if !slices.Equal(all, prefixes.Aggregate(all)) {
		t.Error("they are not aggregated")
	}
}

package plan

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
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

func TestInClusterRanges(t *testing.T) {
	node := func(podCIDRs []string, addrs ...corev1.NodeAddress) *corev1.Node {
		return &corev1.Node{Spec: corev1.NodeSpec{PodCIDRs: podCIDRs}, Status: corev1.NodeStatus{Addresses: addrs}}
	}
	f := ClusterFacts{
		Pools: []*v2.AddressPool{{Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new("100.64.0.1/20"), IPv6: new("fd64::/116")}, {IPv4: new("bad")}}}}},
		Nodes: []*corev1.Node{
			node([]string{"10.244.0.0/24"}, corev1.NodeAddress{Type: "InternalIP", Address: "203.0.113.4"}, corev1.NodeAddress{Type: "Hostname", Address: "203.0.113.77"}),
			node(nil, corev1.NodeAddress{Type: "ExternalIP", Address: "::ffff:203.0.113.5"}, corev1.NodeAddress{Type: "InternalIP", Address: "nonsense"}),
		},
		Services: []*networkingv1.ServiceCIDR{{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16", "bad"}}}},
	}
	if got, want := InClusterRanges(f), parsePrefixes("10.96.0.0/16 100.64.0.0/20 203.0.113.4/31 fd64::/116"); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	f.Pools, f.ForeignPods = nil, true
	if got, want := InClusterRanges(f), parsePrefixes("10.96.0.0/16 10.244.0.0/24 203.0.113.4/31"); !slices.Equal(got, want) {
		t.Errorf("without pools: %v, want %v", got, want)
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
	got := InClusterRanges(sparse)
	if n := len(got); n > maxInCluster || n < maxInCluster/4 {
		t.Errorf("%d ranges, at most %d may be", n, maxInCluster)
	}
	few := ClusterFacts{Pools: sparse.Pools}
	for _, n := range sparse.Nodes {
		few.Nodes = append(few.Nodes, &corev1.Node{Status: corev1.NodeStatus{Addresses: n.Status.Addresses[:1]}})
	}
	if want := InClusterRanges(few); !slices.Equal(four(got), want) {
		t.Errorf("beside sparse IPv6 there are %d ranges of IPv4, want %d", len(four(got)), len(want))
	}
	var f ClusterFacts
	for range 10000 {
		f.Nodes = append(f.Nodes, &corev1.Node{Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: "InternalIP", Address: fmt.Sprintf("10.%d.%d.%d", rng.IntN(200), rng.IntN(256), rng.IntN(256))},
		}}})
	}
	all := InClusterRanges(f)
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

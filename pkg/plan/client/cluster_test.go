package client

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/cluster"
	"github.com/coil-net/coil/pkg/plan/plantest"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// inCluster returns the ranges of a cluster as an Egress of destinations has them.
func inCluster(f cluster.Facts, destinations ...string) []netip.Prefix {
	return cluster.RangesOf(f).For(&v2.Egress{Spec: v2.EgressSpec{Destinations: destinations}})
}

// clusterOf returns the facts of a cluster of racks.
func clusterOf(nodes, perRack int) (f cluster.Facts) {
	f.Pools, f.Nodes, f.Services = plantest.Cluster(nodes, perRack)
	return f
}

// allOf returns all ranges of a cluster: an Egress to whom private ranges are destinations spares each.
func allOf(r cluster.Ranges) []netip.Prefix {
	e := &v2.Egress{}
	for _, p := range dataplane.PrivateRanges {
		e.Spec.Destinations = append(e.Spec.Destinations, p.String())
	}
	return r.For(e)
}

// Clients do the same by the ranges that concern their Egresses as by all of the cluster.
func TestInClusterRangesOfClients(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	possible := []string{
		"0.0.0.0/0", "::/0", "10.0.0.0/8", "10.0.0.0/9", "10.0.3.0/24", "10.0.3.11/32", "10.96.0.0/12", "10.96.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
		"fc00::/7", "fd00:10::/32", "fd00:10:7::/64", "198.51.100.0/24", "198.51.100.128/25", "198.51.0.0/16", "100.64.0.0/12", "8.0.0.0/6", "203.0.113.0/24", "2001:db8::/32",
	}
	for range 200 {
		f := clusterOf(1+rng.IntN(600), 1+rng.IntN(40))
		for range rng.IntN(10) {
			f.Nodes = append(f.Nodes, plantest.Node(nil,
				corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("203.0.113.%d", rng.IntN(256))},
				corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("172.%d.0.9", 16+rng.IntN(20))},
				corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("2001:db8::%x", rng.IntN(256))}))
		}
		ranges := cluster.RangesOf(f)
		var published, all []Egress
		for i := range 1 + rng.IntN(3) {
			e := &v2.Egress{Spec: v2.EgressSpec{OriginatingOnly: rng.IntN(2) == 0}}
			e.Namespace, e.Name = "internet", fmt.Sprint("nat", i)
			for range 1 + rng.IntN(3) {
				e.Spec.Destinations = append(e.Spec.Destinations, possible[rng.IntN(len(possible))])
			}
			c := EgressOf(e, nil)
			c.Peers = clientAddrs("46", fmt.Sprintf("10.96.0.%d", i), fmt.Sprintf("fd96::%d", i))
			c.InCluster = ranges.For(e)
			published = append(published, c)
			c.InCluster = allOf(ranges)
			all = append(all, c)
		}
		got, want := StateOf(clientOfFamilies("46", published...)), StateOf(clientOfFamilies("46", all...))
		if diff := cmp.Diff(lines(want), lines(got)); diff != "" {
			t.Fatalf("Egresses %v (-all +published):\n%s", published, diff)
		}
		if diff := cmp.Diff(want.Filter, got.Filter, cmp.Comparer(func(a, b netipx.IPRange) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Fatalf("Egresses %v, filter (-all +published):\n%s", published, diff)
		}
	}
}

// A private destination that is added takes nothing of the cluster, also before the status follows it.
func TestInClusterRangesBeforeADestinationIsAdded(t *testing.T) {
	f := clusterOf(5000, 40)
	e := Egress{Name: "internet/nat", Destinations: plantest.Prefixes("0.0.0.0/0 ::/0 10.0.0.0/8 fc00::/7"), InCluster: inCluster(f, "0.0.0.0/0", "::/0")}
	var spared []netip.Prefix
	for _, r := range StateOf(clientOfFamilies("46", e)).Routes {
		if r.Type == dataplane.Throw && r.Table == dataplane.TableNarrow {
			spared = append(spared, r.Dst)
		}
	}
	for _, p := range allOf(cluster.RangesOf(f)) {
		if !prefixes.Within(p, spared) {
			t.Errorf("%s is captured", p)
		}
	}
	if prefixes.Within(netip.MustParsePrefix("10.200.0.0/16"), spared) {
		t.Error("10.200.0.0/16, which isn't in the cluster, is spared")
	}
}

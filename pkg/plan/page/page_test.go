package page_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inventory"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/page"
)

var all = []string{page.Pools, page.Blocks, page.Claims, page.Egresses, page.Policies, page.ClusterPolicies, page.Gateways, page.Services, page.Nodes, page.Pods, page.Leases}

// sources are all resources, of which some are unknown.
func sources(unknown ...string) (s []page.Source) {
	for _, r := range all {
		s = append(s, page.Source{Resource: r, Known: !slices.Contains(unknown, r)})
	}
	return s
}

func pool(name, subnet string, bits int32) *v2.AddressPool {
	return &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{BlockSizeBits: bits, Subnets: []v2.SubnetSet{{IPv4: &subnet}}}}
}

func block(pool string, index int32, node, prefix string) *v2.AddressBlock {
	b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", pool, index), Labels: map[string]string{v2.LabelPool: pool}}, Index: index, IPv4: &prefix}
	if node != "" {
		b.Labels[v2.LabelNode] = node
	}
	return b
}

func floating(pool string, index int32, prefix, kind, owner, holder string) *v2.AddressBlock {
	b := block(pool, index, "", prefix)
	b.Labels[v2.LabelFloating] = v2.FloatingValue
	namespace, name, _ := strings.Cut(owner, "/")
	b.Floating = &v2.Floating{Owner: v2.FloatingOwner{Kind: kind, Namespace: namespace, Name: name}, Holding: v2.FloatingHolding{Holder: holder}}
	return b
}

func service(name, address string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Annotations: map[string]string{loadbalancer.AnnotationAssigned: address}}}
	if address != "" {
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: address}}
	}
	return s
}

// cluster has a large pool, a pool of nodes' floating addresses, and one of gateways.
func cluster() inventory.Objects {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "172.16.0.1"}}
	ref := &v2.ResolvedPolicy{Egress: &v2.EgressReference{Namespace: "internet", Name: "nat"}}
	egress := &v2.Egress{ObjectMeta: metav1.ObjectMeta{Namespace: "internet", Name: "nat"}, Spec: v2.EgressSpec{Replicas: 2, Addresses: &v2.EgressAddresses{Use: v2.EgressAddressOfNode}}}
	egress.Status.NodeAddresses = []v2.EgressNodeAddress{{Router: "nat-1", Node: "n1", EgressAddress: v2.EgressAddress{IPv4: "172.16.0.1", IPv6: "fd00::1"}}}
	egress.Status.Conditions = []metav1.Condition{{Type: v2.EgressPortPressure, Status: metav1.ConditionTrue, Message: "few ports"}}
	return inventory.Objects{
		Now:   time.Unix(1e6, 0),
		Pools: []*v2.AddressPool{pool("big", "10.0.0.0/8", 5), pool("out", "192.0.2.0/28", 0), pool("edge", "198.51.100.0/28", 0), pool("broken", "10.0.0.0", 0)},
		Blocks: []*v2.AddressBlock{
			block("big", 300, "n1", "10.0.37.128/27"), floating("out", 7, "192.0.2.7/32", "Service", "shop/web", "n1"), floating("edge", 3, "198.51.100.3/32", "Service", "shop/chat", ""),
		},
		Egresses: []*v2.Egress{egress},
		Policies: []*v2.EgressPolicy{{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "bills"}, Status: v2.EgressPolicyStatus{Resolved: ref, Clients: 3}}},
		ClusterPolicies: []*v2.EgressClusterPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "rest"}, Status: v2.EgressPolicyStatus{
			Conditions: []metav1.Condition{{Type: v2.PolicyAccepted, Status: metav1.ConditionFalse, Message: "no Egress"}},
		}}},
		Gateways: []*v2.LoadBalancerGateway{{ObjectMeta: metav1.ObjectMeta{Name: "g2"}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"edge"}}},
			{ObjectMeta: metav1.ObjectMeta{Name: "g1"}, Spec: v2.LoadBalancerGatewaySpec{Pools: []string{"edge"}}}},
		Services: []*corev1.Service{service("web", "192.0.2.7"), service("chat", "198.51.100.3"), service("new", "")},
		Nodes:    []*corev1.Node{node},
	}
}

// rows are the rows of a section by their keys.
func rows(c page.Cluster, section string) map[string]any {
	of := map[string]any{}
	for _, r := range page.Rows(c) {
		if r.Section == section {
			of[r.Key] = r.Value
		}
	}
	return of
}

// A section has its rows when all that it needs is known. What is judged by something unknown isn't wrong.
func TestUnknown(t *testing.T) {
	for unknown, missing := range map[string]string{
		"":                   "",
		page.Pools:           "forecasts maps pools",
		page.Blocks:          "addresses forecasts maps nodes services",
		page.Pods:            "nodes",
		page.Nodes:           "nodes",
		page.Services:        "services",
		page.Gateways:        "gateways services",
		page.Egresses:        "egresses",
		page.ClusterPolicies: "egresses policies",
		page.Leases:          "",
	} {
		c := page.Cluster{Objects: cluster(), Sources: sources(unknown)}
		var lacking []string
		for name, s := range rows(c, "sections") {
			if lacks := s.(page.Section).Lacks; len(lacks) > 0 {
				lacking = append(lacking, name)
				if !slices.Equal(lacks, []string{unknown}) || len(rows(c, name)) > 0 {
					t.Errorf("without %s the section %s lacks %q, and has %v", unknown, name, lacks, rows(c, name))
				}
			} else if len(rows(c, name)) == 0 {
				t.Errorf("without %s the section %s has nothing", unknown, name)
			}
		}
		if slices.Sort(lacking); strings.Join(lacking, " ") != missing {
			t.Errorf("without %s the sections %q have no rows, want %q", unknown, lacking, missing)
		}
		for kind, by := range map[string][]string{"Node ": {page.Pods, page.Nodes}, "Lease ": {page.Leases}, "EgressClusterPolicy ": {page.ClusterPolicies}} {
			found := false
			for key := range rows(c, "findings") {
				found = found || strings.HasPrefix(key, kind)
			}
			if found == slices.Contains(by, unknown) {
				t.Errorf("without %s there are findings about %s: %t", unknown, kind, found)
			}
		}
	}
}

// The map of a large pool has a bounded number of cells, in strips. One that can't be drawn says why.
func TestMaps(t *testing.T) {
	maps := rows(page.Cluster{Objects: cluster(), Sources: sources()}, "maps")
	big := maps["big"].(page.Map)
	if big.BlocksPerCell != 256 || len(big.Subnets) != 1 || big.Subnets[0].Cells != 2048 || big.Subnets[0].Name != "10.0.0.0/8" || !strings.HasPrefix(big.Subnets[0].Says, "1 of 524288 blocks held") {
		t.Errorf("the map of the large pool is %+v", big.Subnets)
	}
	cells := 0
	for key, m := range maps {
		if s, ok := m.(page.Strip); ok && s.Pool == "big" {
			cells += len(s.Cells)
			if s.From == 0 && !cmp.Equal(s.Cells[1].Holders, []string{"n1"}) {
				t.Errorf("the strip %s has %+v", key, s.Cells[1])
			}
		}
	}
	if cells != 2048 {
		t.Errorf("strips have %d cells", cells)
	}
	if broken := maps["broken"].(page.Map); !strings.HasPrefix(broken.Problem, "AddressPool broken: ") {
		t.Errorf("the pool that can't be drawn: %+v", broken)
	}
}

// Services tell where their packets arrive: at the node that holds the address, or at the gateways of its pool.
func TestWays(t *testing.T) {
	c := page.Cluster{Objects: cluster(), Sources: sources()}
	var got []string
	for key, s := range rows(c, "services") {
		s := s.(page.Service)
		got = append(got, fmt.Sprintf("%s %q %t", key, s.At, s.Waits))
	}
	slices.Sort(got)
	if diff := cmp.Diff([]string{`shop/chat ["g1" "g2"] false`, `shop/new [] true`, `shop/web ["n1"] false`}, got); diff != "" {
		t.Error(diff)
	}
	egress := rows(c, "egresses")["internet/nat"].(page.Egress)
	if diff := cmp.Diff([]page.At{{Router: "nat-1", Node: "n1", Address: "172.16.0.1,fd00::1"}}, egress.At); diff != "" || egress.Policies != 1 || !cmp.Equal(egress.Attention, []string{"few ports"}) {
		t.Errorf("the Egress is %+v: %s", egress, diff)
	}
	if p := rows(c, "policies")["/rest"].(inventory.Policy); !cmp.Equal(p.Attention, []string{"no Egress"}) {
		t.Errorf("the policy is %+v", p)
	}
}

// Searches find by addresses, ranges and names, and no more than people read.
func TestFind(t *testing.T) {
	c := page.Cluster{Objects: cluster()}
	for query, want := range map[string]string{
		"":                      "",
		"  ":                    "",
		"10.0.37.130":           "AddressPool big, AddressBlock big-300",
		"10.1.0.1":              "AddressPool big",
		"10.0.37.0/24":          "AddressPool big, AddressBlock big-300",
		"10.0.37.160-10.0.38.0": "AddressPool big",
		"10.0.37.1-10.0.37.128": "AddressPool big, AddressBlock big-300",
		"192.0.2.7":             "AddressPool out, Service shop/web, Floating address 192.0.2.7",
		"172.16.0.1":            "Node n1",
		"2001:db8::1":           "",
		"n1":                    "Node n1, AddressBlock big-300, Floating address 192.0.2.7",
		"N1 ":                   "Node n1, AddressBlock big-300, Floating address 192.0.2.7",
		"internet/":             "Egress internet/nat",
		"bills":                 "EgressPolicy shop/bills",
		"rest":                  "EgressClusterPolicy rest",
		"shop/w":                "Service shop/web",
		"g2":                    "LoadBalancerGateway g2",
		"big":                   "AddressPool big, AddressBlock big-300",
		"1.2.3.4-x":             "",
		"fe80::1%eth0":          "",
	} {
		var names []string
		for _, f := range page.Find(c, query).Found {
			names = append(names, f.Kind+" "+f.Name)
		}
		got := strings.Split(want, ", ")
		if slices.Sort(names); want == "" {
			got = nil
		}
		if slices.Sort(got); !slices.Equal(names, got) {
			t.Errorf("%q finds %q, want %q", query, names, got)
		}
	}
	for i := range int32(150) {
		c.Objects.Blocks = append(c.Objects.Blocks, block("many", i, "n1", fmt.Sprintf("10.9.%d.0/27", i)))
	}
	if r := page.Find(c, "many-"); len(r.Found) != 100 || r.More != 50 {
		t.Errorf("of 150 it finds %d, and %d more", len(r.Found), r.More)
	}
}

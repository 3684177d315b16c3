package routes

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
)

func node(name string, addrs ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: name})
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

func block(name, holder, ipv4, ipv6 string) *v2.AddressBlock {
	b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v2.LabelNode: holder}}}
	if ipv4 != "" {
		b.IPv4 = &ipv4
	}
	if ipv6 != "" {
		b.IPv6 = &ipv6
	}
	return b
}

// text prints routes one a line.
func text(routes []dataplane.Route) string {
	var b strings.Builder
	for _, r := range routes {
		b.WriteString(r.String() + "\n")
	}
	return b.String()
}

func TestPeerRoutes(t *testing.T) {
	nodes := []*corev1.Node{
		node("self", "172.30.0.2", "fd00::2"),
		node("dual", "172.30.0.3", "fd00::3", "172.30.9.9"),
		node("four", "172.30.0.4"),
		node("none"),
		node("zone", "fe80::5%eth0"),
	}
	floating := block("partners-1", "", "10.2.0.1/32", "")
	floating.Labels = map[string]string{v2.LabelFloating: v2.FloatingValue}
	tests := []struct {
		name    string
		blocks  []*v2.AddressBlock
		want    string
		skipped []string
	}{
		{name: "no block"},
		{
			name:   "own block has no route",
			blocks: []*v2.AddressBlock{block("default-0", "self", "10.1.0.0/27", "")},
		},
		{
			name: "each family by the address of its own, the first of several",
			blocks: []*v2.AddressBlock{
				block("default-2", "dual", "10.1.0.64/27", "fd01::40/123"),
				block("default-1", "four", "10.1.0.32/27", ""),
			},
			want: "10.1.0.32/27 via 172.30.0.4 proto 31 table 254\n" +
				"10.1.0.64/27 via 172.30.0.3 proto 31 table 254\n" +
				"fd01::40/123 via fd00::3 proto 31 table 254\n",
		},
		{
			name:    "a node without the family has the route of the other",
			blocks:  []*v2.AddressBlock{block("default-1", "four", "10.1.0.32/27", "fd01::20/123")},
			want:    "10.1.0.32/27 via 172.30.0.4 proto 31 table 254\n",
			skipped: []string{"default-1"},
		},
		{
			name:   "a gateway has no zone",
			blocks: []*v2.AddressBlock{block("default-3", "zone", "", "fd01::60/123")},
			want:   "fd01::60/123 via fe80::5 proto 31 table 254\n",
		},
		{
			name:   "a floating address is at no node for good",
			blocks: []*v2.AddressBlock{floating},
		},
		{
			name: "bad objects cost only their own routes",
			blocks: []*v2.AddressBlock{
				block("a-unknown-node", "gone", "10.1.1.0/27", ""),
				block("b-no-address", "none", "10.1.2.0/27", ""),
				block("c-malformed", "dual", "10.1.3.0/99", ""),
				block("d-empty", "dual", "", ""),
				block("e-good", "dual", "10.1.4.0/27", ""),
			},
			want:    "10.1.4.0/27 via 172.30.0.3 proto 31 table 254\n",
			skipped: []string{"a-unknown-node", "b-no-address", "c-malformed", "d-empty"},
		},
		{
			name: "one prefix has one route whatever the order",
			blocks: []*v2.AddressBlock{
				block("x", "four", "10.1.0.32/27", ""), block("y", "dual", "10.1.0.32/27", ""),
			},
			want: "10.1.0.32/27 via 172.30.0.3 proto 31 table 254\n",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, skipped := Peers("self", nodes, tt.blocks, 254, 31)
			if d := cmp.Diff(tt.want, text(got)); d != "" {
				t.Errorf("routes (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.skipped, skipped); d != "" {
				t.Errorf("skipped (-want +got):\n%s", d)
			}
		})
	}
}

func TestExports(t *testing.T) {
	blocks := []HeldBlock{
		{Name: "default-1", Block: ipam.Block{IPv4: netip.MustParsePrefix("10.1.0.32/27"), IPv6: netip.MustParsePrefix("fd01::20/123")}},
		{Name: "v1-0", Block: ipam.Block{IPv4: netip.MustParsePrefix("10.1.0.0/27")}, Reserved: true},
	}
	export, unassigned := Exports(blocks, ExportTables{Export: 119, Unassigned: 120, Protocol: 30, Loopback: 1})
	wantExport := "10.1.0.0/27 dev 1 proto 30 table 119\n10.1.0.32/27 dev 1 proto 30 table 119\nfd01::20/123 dev 1 proto 30 table 119\n"
	if d := cmp.Diff(wantExport, text(export)); d != "" {
		t.Errorf("export (-want +got):\n%s", d)
	}
	// Addresses of a reserved block may be in use by pods that have their routes elsewhere.
	wantUnassigned := "unreachable 10.1.0.32/27 proto 30 table 120\nunreachable fd01::20/123 proto 30 table 120\n"
	if d := cmp.Diff(wantUnassigned, text(unassigned)); d != "" {
		t.Errorf("unassigned (-want +got):\n%s", d)
	}
}

func TestRestored(t *testing.T) {
	of := func(dsts ...string) (all []dataplane.Route) {
		for _, d := range dsts {
			all = append(all, dataplane.Route{Dst: netip.MustParsePrefix(d)})
		}
		return all
	}
	const a, b, c = "10.0.0.0/27", "10.0.0.32/27", "fd00::/123"
	for _, tt := range []struct {
		name         string
		made         int
		before, want []dataplane.Route
		restored     int
	}{
		{"at first", 2, nil, of(a, b), 0},
		{"nothing made", 0, of(a, b), of(a, b), 0},
		{"all lost", 2, of(a, b), of(a, b), 2},
		{"one lost, one new", 2, of(a, b), of(a, b, c), 1},
		{"one new", 1, of(a, b), of(a, b, c), 0},
		{"new ones that couldn't be made", 0, of(a), of(a, b, c), 0},
	} {
		if got := Restored(tt.made, tt.before, tt.want); got != tt.restored {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.restored)
		}
	}
}

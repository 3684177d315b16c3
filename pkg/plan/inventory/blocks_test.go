package inventory_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/inventory"
)

// Blocks are sorted by pool and index, not by name. Those of a node that is gone, those that can't be understood and those that nobody uses are there, floating addresses aren't.
func TestBlocks(t *testing.T) {
	created, written, later := metav1.Unix(1000, 0), metav1.Unix(2000, 0), metav1.Unix(3000, 0)
	block := func(pool string, index int32, name, node, four, six string) *v2.AddressBlock {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: created, Labels: map[string]string{v2.LabelPool: pool}}, Index: index}
		if node != "" {
			b.Labels[v2.LabelNode] = node
		}
		if four != "" {
			b.IPv4 = &four
		}
		if six != "" {
			b.IPv6 = &six
		}
		return b
	}
	used := block("a", 10, "a-10", "n1", "10.0.0.0/30", "fd00::/126")
	used.Status = v2.AddressBlockStatus{Allocated: 2, Cooling: 1}
	used.ManagedFields = []metav1.ManagedFieldsEntry{{Time: &later}, {Time: &written}, {}}
	reserved := block("a", 9, "a-9", "", "", "fd00::4/126")
	reserved.Labels[v2.LabelReserved] = v2.ReservedValue
	floating := block("a", 1, "a-1", "", "10.0.0.9/32", "")
	floating.Labels[v2.LabelFloating] = v2.FloatingValue
	got := inventory.Blocks(inventory.Objects{Blocks: []*v2.AddressBlock{block("b", 0, "b-0", "n1", "broken", ""), used, floating, reserved}})
	want := []inventory.Block{
		{Name: "a-9", Pool: "a", Index: 9, IPv6: "fd00::4/126", Addresses: 4, Reserved: true, Changed: created},
		{Name: "a-10", Pool: "a", Index: 10, Node: "n1", IPv4: "10.0.0.0/30", IPv6: "fd00::/126", Allocated: 2, Cooling: 1, Addresses: 4, Changed: later},
		{Name: "b-0", Pool: "b", Node: "n1", IPv4: "broken", Changed: created},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if none := inventory.Blocks(inventory.Objects{}); none == nil {
		t.Error("no block is null as JSON")
	}
	if at := inventory.Changed(&metav1.ObjectMeta{}); at != (metav1.Time{}) {
		t.Errorf("an object without times has changed %s", at.Format(time.RFC3339))
	}
}

package blocks

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/store"
)

// A block that no pod here has addresses of is ours by the Node that it names and by the record. One that came
// back with a backup isn't: the record of its Node doesn't have it any more.
func TestKnown(t *testing.T) {
	made := time.Date(2026, time.March, 1, 0, 0, 0, 0, time.UTC)
	m := &Manager{cfg: Config{NodeUID: "this", NodeCreated: metav1.NewTime(made)}}
	const neither, inRecord, anew = 1, 2, 4 // what the record may be to a block: in which of these cases it is ours
	for _, c := range []struct {
		name, of, earlier, request string
		age                        time.Duration // before the Node
		reserved                   bool
		ours                       int
	}{
		{name: "of this Node, of an earlier request", of: "this", request: "unknown", ours: inRecord | anew},
		{name: "of this Node, of no request", of: "this", ours: neither | inRecord | anew},
		{name: "of the record's Node", of: "earlier", earlier: "earlier", request: "unknown", ours: inRecord | anew},
		{name: "of another Node", of: "other", earlier: "earlier"},
		{name: "of another Node, without an earlier one", of: "other"},
		{name: "of another Node, reserved", of: "other", reserved: true, ours: neither | inRecord | anew},
		{name: "of Coil 2.x, older than the Node", age: time.Hour, earlier: "earlier", ours: inRecord},
		{name: "of Coil 2.x, older than the Node, without an earlier one", age: time.Hour, ours: inRecord},
		{name: "of Coil 2.x, younger than the Node", ours: neither | inRecord | anew},
	} {
		b := &v2.AddressBlock{ObjectMeta: metav1.ObjectMeta{
			Name: "default-0", UID: "block", CreationTimestamp: metav1.NewTime(made.Add(-c.age)),
			Labels: map[string]string{v2.LabelPool: "default"}, Annotations: map[string]string{},
		}}
		if c.of != "" {
			b.Annotations[v2.AnnotationNodeUID] = c.of
		}
		if c.request != "" {
			b.Labels[v2.LabelRequest] = c.request
		}
		if c.reserved {
			b.Labels[v2.LabelReserved] = v2.ReservedValue
		}
		got := 0
		for record, bit := range map[[2]bool]int{{false, false}: neither, {true, false}: inRecord, {false, true}: anew} {
			p := Past{Fresh: record[1], Earlier: c.earlier}
			if record[0] {
				p.Usage = []store.Usage{{Block: store.Block{Name: b.Name}}}
			}
			if m.known(b, p) {
				got |= bit
			}
		}
		if got != c.ours {
			t.Errorf("%s: ours is %03b, want %03b (made anew, in the record, neither)", c.name, got, c.ours)
		}
	}
}

func TestHas(t *testing.T) {
	both, damaged := newBlock("default", 0), newBlock("default", 0)
	both.IPv6 = new("fd00::/123")
	damaged.IPv4 = new("10.0.0.0/99")
	for _, c := range []struct {
		name  string
		block *v2.AddressBlock
		addrs []string
		want  bool
	}{
		{"IPv4", both, []string{"192.0.2.1", "10.0.0.31"}, true},
		{"IPv6", both, []string{"fd00::1f"}, true},
		{"others", both, []string{"10.0.0.32", "fd00::20"}, false},
		{"none", both, nil, false},
		{"a damaged block", damaged, []string{"10.0.0.1"}, false},
	} {
		var addrs []netip.Addr
		for _, a := range c.addrs {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		if got := Has(c.block, addrs...); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
}

// A block that isn't there any more was exported like any other.
func TestExported(t *testing.T) {
	cached := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	held, kept := newBlock("default", 0), newBlock("default", 1)
	kept.Labels[v2.LabelReserved] = v2.ReservedValue
	for _, b := range []*v2.AddressBlock{held, kept} {
		if err := cached.Add(b); err != nil {
			t.Fatal(err)
		}
	}
	var usage []store.Usage
	var want []routes.HeldBlock
	for i, reserved := range []bool{false, true, false} {
		rec, err := Recorded(newBlock("default", int32(i)))
		if err != nil {
			t.Fatal(err)
		}
		usage = append(usage, store.Usage{Block: rec})
		want = append(want, routes.HeldBlock{Name: rec.Name, Block: rec.Block, Reserved: reserved})
	}
	m := &Manager{blocks: kube.Cache[v2.AddressBlock]{Indexer: cached}}
	if got := m.Exported(usage); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

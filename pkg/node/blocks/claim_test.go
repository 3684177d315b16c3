package blocks

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/store"
)

// A block that no pod here has addresses of is ours by the Node that it names and by the record. One that came
// back with a backup isn't: the record of its Node doesn't have it any more.
func TestKnown(t *testing.T) {
	made := time.Date(2026, time.March, 1, 0, 0, 0, 0, time.UTC)
	m := &Manager{cfg: Config{NodeUID: "this", NodeCreated: metav1.NewTime(made)}, asked: newAsked()}
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

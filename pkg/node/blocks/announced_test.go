package blocks

import (
	"testing"

	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/testkit"
)

// Only the label says that a block is announced on links, with one value. What isn't there isn't known.
func TestAnnouncedBlocks(t *testing.T) {
	blocks := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	m := idle(fake.NewSimpleClientset(), blocks)
	for i, label := range []string{"", "Neighbor", "neighbor", "Route"} {
		b := newBlock("default", int32(i))
		if label != "" {
			b.Labels[v2.LabelAnnounce] = label
		}
		testkit.Check(t, blocks.Add(b))
	}
	for name, want := range map[string][2]bool{
		"default-0": {false, true}, "default-1": {true, true}, "default-2": {false, true}, "default-3": {false, true}, "default-4": {false, false},
	} {
		if is, known := m.Announced(name); is != want[0] || known != want[1] {
			t.Errorf("%s: %t, known %t", name, is, known)
		}
	}
}

// The label's coming and going is told, and nothing else.
func TestAnnouncedChanged(t *testing.T) {
	plain, other := newBlock("default", 0), newBlock("default", 0)
	labelled := newBlock("default", 0)
	labelled.Labels[v2.LabelAnnounce] = "Neighbor"
	other.Status.Allocated = 3
	told := 0
	m := &Manager{cfg: Config{AnnouncedChanged: func() { told++ }}}
	for _, c := range []struct {
		before, after *v2.AddressBlock
		want          int
	}{
		{nil, plain, 0}, {plain, other, 0}, {plain, nil, 0}, {labelled, labelled, 0},
		{nil, labelled, 1}, {plain, labelled, 1}, {labelled, plain, 1}, {labelled, nil, 1},
	} {
		told = 0
		if m.announcedChanged(c.before, c.after); told != c.want {
			t.Errorf("from %v to %v: told %d times", c.before, c.after, told)
		}
	}
	(&Manager{}).announcedChanged(nil, labelled) // nobody wants to know
}

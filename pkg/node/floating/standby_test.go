package floating

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// The holder copies connections to the first other successor, which takes them from nobody else. What others have is stale.
func TestFollower(t *testing.T) {
	const a, b, c = "a", "b", "c"
	for _, tt := range []struct {
		name   string
		change func(*v2.AddressBlock)
		// follower is the node to which a copies, takes the ones that take from a, and stale those whose connections are of no use.
		follower, takes, stale string
	}{
		{"as it should be", func(*v2.AddressBlock) {}, b, "[b]", "[c]"},
		{"the holder isn't the first", func(k *v2.AddressBlock) {
			k.Floating.Successors[0], k.Floating.Successors[2] = k.Floating.Successors[2], k.Floating.Successors[0]
		}, c, "[c]", "[b]"},
		{"no standby", func(k *v2.AddressBlock) { k.Floating.Standby = false }, "", "[]", "[b c]"},
		{"it moves", func(k *v2.AddressBlock) { k.Floating.MovingTo = c }, "", "[]", "[b]"},
		{"it has moved", func(k *v2.AddressBlock) { k.Floating.MovingTo = a }, b, "[b]", "[c]"},
		{"another holder", func(k *v2.AddressBlock) { k.Floating.Holding.Holder = b }, "", "[]", "[c]"},
		{"no holder", func(k *v2.AddressBlock) { k.Floating.Holding.Holder = "" }, "", "[]", "[]"},
		{"no other node", func(k *v2.AddressBlock) { k.Floating.Successors = k.Floating.Successors[:1] }, "", "[]", "[b c]"},
		{"no pod there", func(k *v2.AddressBlock) { k.Floating.Successors[1].PodUID = "" }, b, "[]", "[c]"},
		{"no pod here", func(k *v2.AddressBlock) { k.Floating.Successors[0].PodUID = "" }, "", "[b]", "[c]"},
		{"released", func(k *v2.AddressBlock) { k.Floating.ReleasedAt = &metav1.Time{} }, "", "[]", "[b c]"},
		{"deleted", func(k *v2.AddressBlock) { k.DeletionTimestamp = &metav1.Time{} }, "", "[]", "[b c]"},
	} {
		k := &v2.AddressBlock{
			ObjectMeta: metav1.ObjectMeta{Name: "p-0", UID: "uid", ResourceVersion: "1", Labels: map[string]string{v2.LabelFloating: v2.FloatingValue}},
			IPv4:       new("198.51.100.7/32"),
			Floating: &v2.Floating{
				Standby: true, Holding: v2.FloatingHolding{Holder: a},
				Successors: []v2.FloatingNode{{Node: a, PodUID: "pod of a"}, {Node: b, PodUID: "pod of b"}, {Node: c, PodUID: "pod of c"}},
			},
		}
		tt.change(k)
		if at, to, ok := Follower(a, k); to.Node != tt.follower && ok || ok != (tt.follower != "") || ok && at.Pod != "pod of a" {
			t.Errorf("%s: a copies to %q, %t, from %q, want %q", tt.name, to.Node, ok, at.Pod, tt.follower)
		}
		takes, stale := []string{}, []string{}
		for _, node := range []string{a, b, c} {
			if at, err := Following(node, a, k); err == nil {
				takes = append(takes, node)
				if at.Pod == "" {
					t.Errorf("%s: %s takes it for no pod", tt.name, node)
				}
			}
			if _, is := Stale(node, k); is {
				stale = append(stale, node)
			}
		}
		if fmt.Sprint(takes) != tt.takes || fmt.Sprint(stale) != tt.stale {
			t.Errorf("%s: %v take from a, and %v have stale connections, want %s and %s", tt.name, takes, stale, tt.takes, tt.stale)
		}
	}
}

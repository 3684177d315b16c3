package coild

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	coilfake "github.com/coil-net/coil/generated/clientset/versioned/fake"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node/blocks"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// A sandbox lives while the namespace that was recorded is at its path, in this boot.
func TestLives(t *testing.T) {
	own := testkit.Must(inspectNetns("/proc/self/ns/net"))(t)
	file := filepath.Join(t.TempDir(), "unmounted")
	if err := os.WriteFile(file, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	d := &daemon{boot: "boot"}
	for name, c := range map[string]struct {
		boot  string
		netns store.Netns
		want  bool
	}{
		"there":                       {"boot", own, true},
		"of another boot":             {"before", own, false},
		"another one at the path":     {"boot", store.Netns{Path: own.Path, Inode: own.Inode + 1}, false},
		"nothing at the path":         {"boot", store.Netns{Path: file + "-none", Inode: own.Inode}, false},
		"an ordinary file":            {"boot", store.Netns{Path: file, Inode: own.Inode}, false},
		"found without its namespace": {"boot", store.Netns{}, false},
	} {
		if got := d.lives(store.Allocation{Netns: c.netns, BootID: c.boot}); got != c.want {
			t.Errorf("%s: lives is %t", name, got)
		}
	}
}

// A Node may get its addresses after coild has started.
func TestSeen(t *testing.T) {
	first, second := ipam.Address{IPv4: netip.MustParseAddr("192.0.2.1")}, ipam.Address{}
	for _, c := range []struct {
		name string
		seen []ipam.Address
		want []bool
	}{
		{"an address from the start", []ipam.Address{first, first}, []bool{false, false}},
		{"none at the start", []ipam.Address{second, first}, []bool{false, true}},
		{"none any more", []ipam.Address{first, second, first}, []bool{false, true, true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s seen[ipam.Address]
			for i, a := range c.seen {
				if got := s.changed(a); got != c.want[i] {
					t.Errorf("step %d: changed is %t", i, got)
				}
			}
		})
	}
}

// A block that no pod here has addresses of is ours by the Node that it names and by the record. One that came
// back with a backup isn't: the record of its Node doesn't have it any more.
func TestKnown(t *testing.T) {
	made := time.Date(2026, time.March, 1, 0, 0, 0, 0, time.UTC)
	coil := coilfake.NewSimpleClientset().CoilV2()
	held, requests := testkit.Must(kube.AddressBlockInformer(coil, ""))(t), testkit.Must(kube.BlockRequestInformer(coil, ""))(t)
	d := &daemon{blocks: testkit.Must(blocks.New(blocks.Config{NodeUID: "this", NodeCreated: metav1.NewTime(made)},
		coil, held, requests, usage{}, &announced{}, reconcile.NewMetrics(nil)))(t)}
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
		d.earlier = c.earlier
		for record, bit := range map[[2]bool]int{{false, false}: neither, {true, false}: inRecord, {false, true}: anew} {
			d.fresh = record[1]
			if d.known(b, record[0]) {
				got |= bit
			}
		}
		if got != c.ours {
			t.Errorf("%s: ours is %03b, want %03b (made anew, in the record, neither)", c.name, got, c.ours)
		}
	}
}

package floating

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/ipam"
)

var (
	nodeA = v2.FloatingNode{Node: "a", Addresses: []string{"10.0.0.1", "fd00::1"}, PodUID: "pod-a"}
	nodeB = v2.FloatingNode{Node: "b", Addresses: []string{"10.0.0.2"}, PodUID: "pod-b"}
	nodeC = v2.FloatingNode{Node: "c", Addresses: []string{"10.0.0.3"}, PodUID: "pod-c"}
)

// without is a node as a voter: no pod of it matters.
func without(n v2.FloatingNode) v2.FloatingNode {
	n.PodUID = ""
	return n
}

// heldBlock is a dual-stack address that node a holds.
func heldBlock(with ...func(*v2.AddressBlock)) *v2.AddressBlock {
	b := &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{
			Name: "p-7", UID: "u", ResourceVersion: "40",
			Labels: map[string]string{v2.LabelPool: "p", v2.LabelFloating: v2.FloatingValue, v2.LabelFloatingHolder: "a"},
		},
		Index: 7, IPv4: new("192.0.2.7/32"), IPv6: new("2001:db8::7/128"),
		Floating: &v2.Floating{
			Claim: "c", Successors: []v2.FloatingNode{nodeB, nodeA}, MovingTo: "b",
			Holding: v2.FloatingHolding{
				Holder: "a", PodUID: "pod-a", Epoch: 3, Claims: 2, HandedOver: true, Contender: "b",
				Voters: []v2.FloatingNode{without(nodeA), without(nodeC)}, Since: &metav1.Time{Time: time.Unix(100, 0)},
			},
		},
	}
	for _, w := range with {
		w(b)
	}
	return b
}

func TestParse(t *testing.T) {
	held := holding.Record{
		ID: "u", Version: 40, Holder: "a", Epoch: 3, Claims: 2, HandedOver: true, Voters: []string{"a", "c"},
		Successors: []string{"b", "a"}, Contender: "b", MovingTo: "b",
	}
	notOffered := held
	notOffered.Successors, notOffered.MovingTo = nil, ""
	arrived := held
	arrived.MovingTo = ""
	withoutSelf := held
	withoutSelf.Successors = []string{"b"}
	address := Address{
		ID: "u", Block: "p-7", Pool: "p", Address: ipam.Address{IPv4: netip.MustParseAddr("192.0.2.7"), IPv6: netip.MustParseAddr("2001:db8::7")},
	}
	for name, tt := range map[string]struct {
		with func(*v2.AddressBlock)
		want holding.Record
		pod  types.UID
	}{
		"held":                           {func(*v2.AddressBlock) {}, held, "pod-a"},
		"released":                       {func(b *v2.AddressBlock) { b.Floating.ReleasedAt = &metav1.Time{} }, notOffered, ""},
		"deleted":                        {func(b *v2.AddressBlock) { b.DeletionTimestamp = &metav1.Time{} }, notOffered, ""},
		"no longer so":                   {func(b *v2.AddressBlock) { delete(b.Labels, v2.LabelFloating) }, notOffered, ""},
		"has moved":                      {func(b *v2.AddressBlock) { b.Floating.MovingTo = "a" }, arrived, "pod-a"},
		"with a router that isn't ready": {func(b *v2.AddressBlock) { b.Floating.Successors = b.Floating.Successors[:1] }, withoutSelf, "pod-a"},
		"with another router":            {func(b *v2.AddressBlock) { b.Floating.Successors[1].PodUID = "next" }, held, "pod-a"},
		"without a state":                {func(b *v2.AddressBlock) { b.Floating = nil }, holding.Record{ID: "u", Version: 40}, ""},
	} {
		k, err := parse("a", heldBlock(tt.with))
		address.Pod = tt.pod
		if diff := cmp.Diff(tt.want, k.record); err != nil || diff != "" {
			t.Errorf("%s: %v, (-want +got):\n%s", name, err, diff)
		}
		if diff := cmp.Diff(address, k.address, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Only addresses of Egresses aren't tracked.
func TestOfEgress(t *testing.T) {
	for kind, want := range map[string]bool{"Egress": true, "Service": false} {
		k, err := parse("a", heldBlock(func(b *v2.AddressBlock) { b.Floating.Owner.Kind = kind }))
		if err != nil || k.address.OfEgress != want {
			t.Errorf("%s: %t, %v", kind, k.address.OfEgress, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for want, with := range map[string]func(*v2.AddressBlock){
		"isn't a number":   func(b *v2.AddressBlock) { b.ResourceVersion = "0x9" },
		"has 32 addresses": func(b *v2.AddressBlock) { b.IPv4, b.IPv6 = new("192.0.2.0/27"), nil },
		"AddressBlock p-7": func(b *v2.AddressBlock) { b.IPv4 = new("192.0.2.7") },
	} {
		if _, err := parse("a", heldBlock(with)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error isn't about %q: %v", want, err)
		}
	}
}

func TestHoldingOf(t *testing.T) {
	now := metav1.Unix(200, 0)
	claim := heldBlock().Floating.Holding
	claim.Claims, claim.Contender = 3, ""
	claim.Voters = []v2.FloatingNode{without(nodeB), without(nodeA)}
	taken := v2.FloatingHolding{Holder: "b", PodUID: "pod-b", Epoch: 4, Claims: 2, Since: &now, Voters: []v2.FloatingNode{without(nodeA), without(nodeC)}}
	none := v2.FloatingHolding{Epoch: 4, Claims: 2, HandedOver: true}
	for name, tt := range map[string]struct {
		with   func(*v2.AddressBlock)
		change func(*holding.Record)
		want   v2.FloatingHolding
	}{
		"as it is": {change: func(*holding.Record) {}, want: heldBlock().Floating.Holding},
		"a claim with other voters": {change: func(r *holding.Record) {
			r.Claims, r.Contender, r.Voters = 3, "", r.Successors
		}, want: claim},
		"another holder": {change: func(r *holding.Record) { r.Holder, r.Epoch, r.HandedOver, r.Contender = "b", 4, false, "" }, want: taken},
		"no holder":      {change: func(r *holding.Record) { r.Holder, r.Epoch, r.Contender, r.Voters = "", 4, "", nil }, want: none},
		"another contender": {
			with: func(b *v2.AddressBlock) {
				b.Floating.Successors[1].PodUID, b.Floating.Successors[1].Addresses = "next", []string{"10.0.0.9"}
			},
			change: func(r *holding.Record) { r.Contender = "c" },
			want:   func() v2.FloatingHolding { h := heldBlock().Floating.Holding; h.Contender = "c"; return h }(),
		},
		"a claim with another pod of the holder": {
			with:   func(b *v2.AddressBlock) { b.Floating.Successors[1].PodUID = "next" },
			change: func(r *holding.Record) { r.Claims++ },
			want:   func() v2.FloatingHolding { h := heldBlock().Floating.Holding; h.PodUID = "next"; h.Claims++; return h }(),
		},
		"a holder that isn't offered any more": {
			with:   func(b *v2.AddressBlock) { b.Floating.Successors = b.Floating.Successors[:1] },
			change: func(r *holding.Record) { r.Claims++ },
			want:   func() v2.FloatingHolding { h := heldBlock().Floating.Holding; h.Claims++; return h }(),
		},
	} {
		b := heldBlock()
		if tt.with != nil {
			tt.with(b)
		}
		k, err := parse("a", b)
		if err != nil {
			t.Fatal(err)
		}
		tt.change(&k.record)
		if diff := cmp.Diff(tt.want, holdingOf(b, k.record, now)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// What a patch doesn't name stays as it was: it has to name all.
func TestChangeNamesAllFields(t *testing.T) {
	patch := change(&v2.AddressBlock{Floating: &v2.Floating{}}, v2.FloatingHolding{})["floating"].(map[string]any)["holding"].(map[string]any)
	var fields []string
	for f := range reflect.TypeFor[v2.FloatingHolding]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		fields = append(fields, name)
		if v, ok := patch[name]; !ok || v != nil {
			t.Errorf("%s is %v in the patch that removes all", name, v)
		}
	}
	for name := range patch {
		if !slices.Contains(fields, name) {
			t.Errorf("there is no field %s", name)
		}
	}
}

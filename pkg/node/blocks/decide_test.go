package blocks

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/store"
)

// old is an age at which an empty block may go.
const old = time.Hour

// h returns a usable block of 2^bits addresses.
func h(name string, bits, allocated, cooling int, age time.Duration) held {
	return held{
		Usage: store.Usage{
			Block:     store.Block{Name: name, Block: ipam.Block{IPv4: netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), 32-bits)}},
			Allocated: allocated, Cooling: cooling,
		},
		usable: true,
		age:    age,
	}
}

// tooMany is an empty block that isn't the answer to its request.
func tooMany(name string, age time.Duration) held {
	s := h(name, 0, 0, 0, age)
	s.usable, s.surplus = false, true
	return s
}

func TestDecide(t *testing.T) {
	deleting, reserved := h("d", 5, 0, 0, 0), h("r", 5, 0, 0, old)
	deleting.usable, deleting.deleting = false, true
	reserved.usable, reserved.reserved = false, true
	closed, closedInUse, closedReserved := h("c", 5, 0, 0, 0), h("c", 5, 1, 0, old), h("c", 5, 0, 0, old)
	for _, b := range []*held{&closed, &closedInUse, &closedReserved} {
		b.usable, b.closed = false, true
	}
	closedReserved.reserved = true
	deletingInUse := h("d", 5, 1, 0, old)
	deletingInUse.usable, deletingInUse.deleting = false, true

	tests := []struct {
		name    string
		blocks  []held
		waiting int
		want    decision
	}{
		{"a surplus block goes back", []held{h("a", 0, 1, 0, old), tooMany("s", old)}, 1, decision{ask: true, release: []string{"s"}}},
		{"a surplus block may be about to go", []held{tooMany("s", 0)}, 0, decision{}},
		{"nothing is needed without pods", nil, 0, decision{}},
		{"the first pod waits", nil, 1, decision{ask: true}},
		{"a free address is enough for who waits", []held{h("a", 2, 3, 0, 0)}, 1, decision{}},
		{"as many wait as are free", []held{h("a", 2, 0, 0, 0)}, 4, decision{}},
		{"more wait than are free", []held{h("a", 2, 0, 0, 0)}, 5, decision{ask: true}},
		{"cooling addresses aren't free", []held{h("a", 1, 0, 2, 0)}, 1, decision{ask: true}},
		{"a quarter left is not asked ahead", []held{h("a", 5, 24, 0, 0)}, 0, decision{}},
		{"less than a quarter left is asked ahead", []held{h("a", 5, 25, 0, 0)}, 0, decision{ask: true}},
		{"never ahead for small blocks", []held{h("a", 3, 8, 0, 0)}, 0, decision{}},
		{"free addresses of all blocks count", []held{h("a", 5, 32, 0, 0), h("b", 5, 20, 0, 0)}, 0, decision{}},
		{"a deleting block gives none", []held{deletingInUse}, 1, decision{ask: true}},
		{"a reserved block gives none", []held{reserved}, 1, decision{ask: true}},
		{"an empty block goes back", []held{h("a", 5, 0, 0, old)}, 0, decision{release: []string{"a"}}},
		{"all empty blocks go back when no pod is left", []held{h("a", 5, 0, 0, old), h("b", 0, 0, 0, old)}, 0, decision{release: []string{"a", "b"}}},
		{"a cooling block stays", []held{h("a", 5, 0, 1, old)}, 0, decision{}},
		{"a new block stays for the pod that it came for", []held{h("a", 5, 0, 0, time.Second)}, 0, decision{}},
		{"an empty block stays while somebody waits", []held{h("a", 5, 0, 0, old)}, 1, decision{}},
		{"an empty block stays while the others are nearly full", []held{h("a", 5, 20, 0, old), h("b", 5, 0, 0, old)}, 0, decision{}},
		{"an empty block goes when the others have room", []held{h("a", 5, 16, 0, old), h("b", 5, 0, 0, old)}, 0, decision{release: []string{"b"}}},
		{"of two empty blocks one stays as the room", []held{h("a", 5, 30, 0, old), h("b", 5, 0, 0, old), h("c", 5, 0, 0, old)}, 0, decision{release: []string{"b"}}},
		{"a deleting block goes as soon as it is empty", []held{deleting, h("a", 5, 20, 0, old)}, 0, decision{release: []string{"d"}}},
		{"a closed block gives none", []held{closedInUse}, 1, decision{ask: true}},
		{"a closed block isn't asked ahead for", []held{closedInUse}, 0, decision{}},
		{"a closed block goes as soon as it is empty", []held{closed, h("a", 5, 20, 0, old)}, 1, decision{release: []string{"c"}}},
		{"a closed block that is reserved never goes", []held{closedReserved}, 0, decision{}},
		{"a reserved block never goes", []held{reserved}, 0, decision{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := decide(tt.blocks, tt.waiting, time.Minute)
			if d := cmp.Diff(tt.want, got, cmp.AllowUnexported(decision{})); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

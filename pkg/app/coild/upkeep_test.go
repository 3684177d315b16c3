package coild

import (
	"net/netip"
	"testing"

	"github.com/coil-net/coil/pkg/ipam"
)

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

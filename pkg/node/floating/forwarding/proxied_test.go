package forwarding

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/node/floating/place"
)

// Addresses are at a node whose Service proxy translates their packets, or doesn't.
func TestProxied(t *testing.T) {
	var p Proxied
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for i, step := range []struct {
		why   string
		count map[netip.Addr]place.Count
		want  map[netip.Addr]bool
	}{
		{"the first look", map[netip.Addr]place.Count{a: {Received: 10, NoProxy: 10}}, nil},
		{"packets that are translated", map[netip.Addr]place.Count{a: {Received: 12, NoProxy: 10}, b: {Received: 1}}, map[netip.Addr]bool{a: true}},
		{"no packets", map[netip.Addr]place.Count{a: {Received: 12, NoProxy: 10}, b: {Received: 1}}, nil},
		{"packets that aren't, for a while", map[netip.Addr]place.Count{a: {Received: 14, NoProxy: 12}, b: {Received: 4, NoProxy: 1}}, map[netip.Addr]bool{b: true}},
		{"no packets after that", map[netip.Addr]place.Count{a: {Received: 14, NoProxy: 12}, b: {Received: 4, NoProxy: 1}}, nil},
		{"packets that still aren't", map[netip.Addr]place.Count{a: {Received: 17, NoProxy: 14}, b: {Received: 8, NoProxy: 3}}, map[netip.Addr]bool{a: false, b: true}},
		{"and still", map[netip.Addr]place.Count{a: {Received: 18, NoProxy: 15}}, map[netip.Addr]bool{a: false}},
		{"most are translated", map[netip.Addr]place.Count{a: {Received: 28, NoProxy: 16}, b: {Received: 9, NoProxy: 4}}, map[netip.Addr]bool{a: true}},
		{"the rules were made anew", map[netip.Addr]place.Count{a: {Received: 3, NoProxy: 3}, b: {Received: 9, NoProxy: 4}}, nil},
		{"not translated, once", map[netip.Addr]place.Count{a: {Received: 4, NoProxy: 4}}, nil},
		{"the address was away", nil, nil},
		{"and comes back", map[netip.Addr]place.Count{a: {Received: 1, NoProxy: 1}}, nil},
		{"not translated, once", map[netip.Addr]place.Count{a: {Received: 2, NoProxy: 2}}, nil},
	} {
		got := p.Look(step.count)
		if len(got) == 0 {
			got = nil
		}
		if diff := cmp.Diff(step.want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("look %d, %s (-want +got):\n%s", i, step.why, diff)
		}
	}
}

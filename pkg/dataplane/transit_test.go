package dataplane

import (
	"net/netip"
	"testing"
)

func TestTransitAddr(t *testing.T) {
	seen := map[netip.Addr]bool{}
	for _, f := range []Family{IPv4, IPv6} {
		for n := 1; n <= Transits; n++ {
			a := TransitAddr(f, n)
			if got, ok := TransitNumber(a); !ok || got != n || FamilyOf(a) != f || seen[a] {
				t.Fatalf("%s, number %d: %s is number %d, %t", f, n, a, got, ok)
			}
			seen[a] = true
		}
	}
	for _, text := range []string{"169.254.136.0", "169.254.143.255", "169.254.169.254", "10.0.0.1", "fd9c:41e7:6a5b::", "fd9c:41e7:6a5b::1:1", "fd9c:41e7:6a5b::7ff", "fd00::1", "::ffff:169.254.136.1"} {
		if n, ok := TransitNumber(netip.MustParseAddr(text)); ok {
			t.Errorf("%s is transit address %d", text, n)
		}
	}
}

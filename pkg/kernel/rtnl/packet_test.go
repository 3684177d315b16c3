package rtnl

import (
	"net/netip"
	"testing"
)

// Errors name what was asked for, and nothing else.
func TestPacketText(t *testing.T) {
	a, b := netip.MustParseAddr("203.0.113.5"), netip.MustParseAddr("10.0.0.1")
	for want, p := range map[string]Packet{
		"203.0.113.5":       {To: a},
		"203.0.113.5 oif 3": {To: a, Out: 3},
		"203.0.113.5 from 10.0.0.1 iif 2 mark 0x5": {To: a, From: b, In: 2, Mark: 5},
	} {
		if got := p.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

package dataplane

import (
	"net/netip"
	"testing"
)

func TestTakes(t *testing.T) {
	prefix := netip.MustParsePrefix
	p := Packet{From: netip.MustParseAddr("10.1.0.1"), To: netip.MustParseAddr("203.0.113.5"), Input: "eth0", Mark: 0x5}
	for _, c := range []struct {
		name string
		rule Rule
		want bool
	}{
		{"all", Rule{}, true},
		{"the other family", Rule{Family: IPv6}, false},
		{"the destination", Rule{To: prefix("203.0.113.0/24")}, true},
		{"another destination", Rule{To: prefix("198.51.100.0/24")}, false},
		{"the source", Rule{From: prefix("10.1.0.0/16")}, true},
		{"another source", Rule{From: prefix("10.2.0.0/16")}, false},
		{"the link", Rule{Input: "eth0"}, true},
		{"packets of the host", Rule{Input: Loopback}, false},
		{"the mark", Rule{Mark: 1, Mask: 3}, true},
		{"another mark", Rule{Mark: 2, Mask: 3}, false},
		{"a bit that isn't looked at", Rule{Mark: 0xff, Mask: 0x5}, true},
		{"TCP", Rule{Transport: 6}, false},
		{"a bound socket", Rule{Output: "eth0"}, false},
	} {
		if c.rule.Family != IPv6 {
			c.rule.Family = IPv4
		}
		if got := c.rule.Takes(p); got != c.want {
			t.Errorf("%s: %t", c.name, got)
		}
	}
	if (Rule{Family: IPv4, From: prefix("0.0.0.0/0")}).Takes(Packet{To: p.To}) {
		t.Error("a rule for sources takes a packet that has none yet")
	}
}

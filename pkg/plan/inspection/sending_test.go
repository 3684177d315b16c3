package inspection

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var comparable = cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})

func TestOrder(t *testing.T) {
	for text, want := range map[string]*Order{
		"tcp 203.0.113.5 443 3":        {TCP, netip.MustParseAddrPort("203.0.113.5:443"), 3},
		"udp 2001:db8::5 53 10":        {UDP, netip.MustParseAddrPort("[2001:db8::5]:53"), 10},
		"icmp 203.0.113.5 0 1":         {ICMP, netip.MustParseAddrPort("203.0.113.5:0"), 1},
		"icmp ::ffff:203.0.113.5 0 1":  {ICMP, netip.MustParseAddrPort("203.0.113.5:0"), 1},
		"icmp 203.0.113.5 7 1":         nil,
		"tcp 203.0.113.5 0 1":          nil,
		"sctp 203.0.113.5 1 1":         nil,
		"tcp 203.0.113.5 443 0":        nil,
		"tcp 203.0.113.5 443 11":       nil,
		"tcp 203.0.113.5 443 x":        nil,
		"tcp 203.0.113.5 65536 1":      nil,
		"tcp example.org 443 1":        nil,
		"tcp 0.0.0.0 443 1":            nil,
		"icmp 224.0.0.1 0 1":           nil,
		"udp ff02::1 9 1":              nil,
		"tcp 203.0.113.5 443":          nil,
		"tcp 203.0.113.5 443 1 2 or 3": nil,
	} {
		got, err := ParseOrder(strings.Fields(text))
		if (err == nil) != (want != nil) {
			t.Errorf("%q: %+v, %v", text, got, err)
			continue
		}
		if want == nil {
			continue
		}
		if d := cmp.Diff(*want, got, comparable); d != "" {
			t.Errorf("%q (-want +got):\n%s", text, d)
		}
		if again, err := ParseOrder(got.Words()); err != nil || again != got {
			t.Errorf("%q is %q, read as %+v, %v", text, got.Words(), again, err)
		}
	}
}

func TestFlows(t *testing.T) {
	for text, want := range map[string]*Flows{
		"10.1.0.1 tcp 203.0.113.5 443 40001,40002":             {netip.MustParseAddr("10.1.0.1"), TCP, netip.MustParseAddrPort("203.0.113.5:443"), []uint16{40001, 40002}},
		"fd00::1 icmp 2001:db8::5 0 7":                         {netip.MustParseAddr("fd00::1"), ICMP, netip.MustParseAddrPort("[2001:db8::5]:0"), []uint16{7}},
		"fd00::1 icmp 203.0.113.5 0 7":                         nil,
		"10.1.0.1 tcp 203.0.113.5 443 ":                        nil,
		"10.1.0.1 tcp 203.0.113.5 443 1,":                      nil,
		"10.1.0.1 tcp 203.0.113.5 443 1,-2":                    nil,
		"10.1.0.1 tcp 203.0.113.5 443 1,2,3,4,5,6,7,8,9,10,11": nil,
		"10.1.0.1 icmp 203.0.113.5 443 1":                      nil,
		"x tcp 203.0.113.5 443 1":                              nil,
		"10.1.0.1 tcp x 443 1":                                 nil,
	} {
		got, err := ParseFlows(strings.Fields(text))
		if (err == nil) != (want != nil) {
			t.Errorf("%q: %+v, %v", text, got, err)
			continue
		}
		if want == nil {
			continue
		}
		if d := cmp.Diff(*want, got, comparable); d != "" {
			t.Errorf("%q (-want +got):\n%s", text, d)
		}
		if text != strings.Join(got.Words(), " ") {
			t.Errorf("%q is %q", text, got.Words())
		}
	}
}

func TestMore(t *testing.T) {
	got := More(map[string]uint64{"a": 3, "b": 2, "c": 1, "new": 4}, map[string]uint64{"a": 1, "b": 2, "c": 5, "gone": 6})
	if d := cmp.Diff(map[string]uint64{"a": 2, "new": 4}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// That there are no flows differs from flows that aren't known.
func TestNoFlows(t *testing.T) {
	for _, flows := range [][]Flow{nil, {}, {{ID: 7}}} {
		text, err := RouterAnswer{Flows: flows}.Write(Limit)
		if err != nil {
			t.Fatal(err)
		}
		if a, err := ParseRouter(text); err != nil || (a.Flows == nil) != (flows == nil) || len(a.Flows) != len(flows) {
			t.Errorf("%+v of a router is read as %+v, %v", flows, a, err)
		}
		if text, err = (Answer{Sending: &Sending{Flows: flows}}).Write(Limit); err != nil {
			t.Fatal(err)
		}
		if a, err := Parse(text); err != nil || (a.Sending.Flows == nil) != (flows == nil) || len(a.Sending.Flows) != len(flows) {
			t.Errorf("%+v of a node is read as %+v, %v", flows, a, err)
		}
	}
}

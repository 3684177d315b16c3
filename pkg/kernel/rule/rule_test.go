package rule_test

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/rule"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

var want = []dataplane.Rule{
	{Family: dataplane.IPv4, Priority: 2000, Table: 116, Protocol: 30},
	{Family: dataplane.IPv6, Priority: 2000, Table: 116, Protocol: 30},
	{Family: dataplane.IPv4, Priority: 2001, Table: 1000, Protocol: 30},
	{Family: dataplane.IPv4, Priority: 2001, To: netip.MustParsePrefix("10.0.0.0/8"), Table: 254, Protocol: 30},
	{Family: dataplane.IPv6, Priority: 2001, To: netip.MustParsePrefix("fc00::/7"), Table: 254, Protocol: 30},
}

// wantShown is how iproute2 shows them.
var wantShown = []string{
	"2000: from all lookup 116 proto 30",
	"2001: from all lookup 1000 proto 30",
	"2001: from all to 10.0.0.0/8 lookup main proto 30",
	"2000: from all lookup 116 proto 30",
	"2001: from all to fc00::/7 lookup main proto 30",
}

type space struct {
	*netnstest.NS
	handle *rtnl.Handle
	*rule.Syncer
}

func newSpace(t *testing.T) space {
	t.Helper()
	ns := netnstest.New(t)
	h, err := rtnl.New(ns.NS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return space{ns, h, rule.New(h, 30, 2000, 2001)}
}

// show returns the rules of both families but those that the kernel makes.
func (s space) show(t *testing.T) []string {
	t.Helper()
	var rules []string
	for _, family := range []string{"-4", "-6"} {
		for l := range strings.Lines(s.IP(t, family, "rule")) {
			if !strings.HasPrefix(l, "0:") && !strings.HasPrefix(l, "3276") {
				rules = append(rules, strings.Join(strings.Fields(l), " "))
			}
		}
	}
	return rules
}

func (s space) sync(t *testing.T, want []dataplane.Rule, result dataplane.Result, shown []string) {
	t.Helper()
	got, err := s.Sync(t.Context(), want)
	if err != nil {
		t.Fatal(err)
	}
	if got != result {
		t.Errorf("Sync: %+v, not %+v", got, result)
	}
	if diff := cmp.Diff(shown, s.show(t)); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
}

// addWithoutProtocol adds a rule as Coil 2.x does. iproute2 can't: it sets a
// protocol always.
func (s space) addWithoutProtocol(t *testing.T, r dataplane.Rule) {
	t.Helper()
	r.Protocol = 0
	if err := s.handle.Do(t.Context(), rtnl.AddRule(r)); err != nil {
		t.Fatal(err)
	}
}

func TestSync(t *testing.T) {
	s := newSpace(t)
	s.sync(t, nil, dataplane.Result{}, nil)
	s.sync(t, want, dataplane.Result{Added: 5}, wantShown)
	s.sync(t, want, dataplane.Result{}, wantShown)

	// Drift: gone, another table, a mark that changes the meaning, and too many.
	s.IP(t, "rule", "del", "priority", "2000")
	s.IP(t, "rule", "add", "priority", "2000", "lookup", "99", "protocol", "30")
	s.IP(t, "rule", "add", "priority", "2000", "fwmark", "1", "lookup", "116", "protocol", "30")
	s.IP(t, "rule", "add", "priority", "2000", "not", "lookup", "116", "protocol", "30")
	s.IP(t, "rule", "add", "priority", "2000", "lookup", "116", "suppress_prefixlength", "0", "protocol", "30")
	s.IP(t, "rule", "add", "priority", "2001", "to", "10.0.0.0/9", "lookup", "main", "protocol", "30")
	s.sync(t, want, dataplane.Result{Added: 1, Deleted: 5}, wantShown)

	s.sync(t, nil, dataplane.Result{Deleted: 5}, nil)
}

// The restrictions of a rule are part of it.
func TestInputAndMark(t *testing.T) {
	s := newSpace(t)
	want := []dataplane.Rule{
		{Family: dataplane.IPv4, Priority: 2000, Input: "eth0", Table: 118, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2000, Input: "eth0", Table: 118, Protocol: 30},
		{Family: dataplane.IPv4, Priority: 2001, Mark: 0x100000, Mask: 0x100000, Table: 254, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2001, Mark: 0x100000, Mask: 0x100000, Input: "eth0", Table: 254, Protocol: 30},
	}
	shown := []string{
		"2000: from all iif eth0 [detached] lookup 118 proto 30",
		"2001: from all fwmark 0x100000/0x100000 lookup main proto 30",
		"2000: from all iif eth0 [detached] lookup 118 proto 30",
		"2001: from all fwmark 0x100000/0x100000 iif eth0 [detached] lookup main proto 30",
	}
	s.sync(t, want, dataplane.Result{Added: 4}, shown)
	s.sync(t, want, dataplane.Result{}, shown)

	// Drift: another link, another mark, and all bits of the mark.
	for _, priority := range []string{"2000", "2001"} {
		s.IP(t, "rule", "del", "priority", priority)
	}
	s.IP(t, "rule", "add", "priority", "2000", "iif", "eth1", "lookup", "118", "protocol", "30")
	s.IP(t, "rule", "add", "priority", "2001", "fwmark", "0x100000", "lookup", "main", "protocol", "30")
	s.IP(t, "rule", "add", "priority", "2001", "fwmark", "0x200000/0x200000", "lookup", "main", "protocol", "30")
	s.sync(t, want, dataplane.Result{Added: 2, Deleted: 3}, shown)
	s.sync(t, nil, dataplane.Result{Deleted: 4}, nil)
}

// A source, a link to leave by and some bits of a mark are part of it, too.
func TestSourceOutputAndMask(t *testing.T) {
	s := newSpace(t)
	want := []dataplane.Rule{
		{Family: dataplane.IPv4, Priority: 2000, From: netip.MustParsePrefix("10.1.0.0/16"), Output: "eth0", Mark: 1, Mask: 3, Table: 118, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2000, From: netip.MustParsePrefix("fd01::/64"), Mask: 3, Table: 118, Protocol: 30},
	}
	shown := []string{
		"2000: from 10.1.0.0/16 fwmark 0x1/0x3 oif eth0 [detached] lookup 118 proto 30",
		"2000: from fd01::/64 fwmark 0/0x3 lookup 118 proto 30",
	}
	s.sync(t, want, dataplane.Result{Added: 2}, shown)
	s.sync(t, want, dataplane.Result{}, shown)

	// Drift: another source.
	s.IP(t, "rule", "del", "priority", "2000")
	s.IP(t, "rule", "add", "priority", "2000", "from", "10.1.0.0/17", "oif", "eth0", "fwmark", "1/3", "lookup", "118", "protocol", "30")
	s.sync(t, want, dataplane.Result{Added: 1, Deleted: 1}, shown)
	s.sync(t, nil, dataplane.Result{Deleted: 2}, nil)
}

// The kernel would apply a rule with a mark and no mask to all packets.
func TestMarkOutsideOfMask(t *testing.T) {
	s := newSpace(t)
	for _, mask := range []uint32{0, 1} {
		r := dataplane.Rule{Family: dataplane.IPv4, Priority: 2000, Mark: 2, Mask: mask, Table: 118, Protocol: 30}
		if _, err := s.Sync(t.Context(), []dataplane.Rule{r}); err == nil || !strings.Contains(err.Error(), "mark 0x2") {
			t.Errorf("mask %#x: %v", mask, err)
		}
	}
	s.sync(t, nil, dataplane.Result{}, nil)
}

// A single flow can have a table of its own.
func TestFlows(t *testing.T) {
	s := newSpace(t)
	want := []dataplane.Rule{
		{Family: dataplane.IPv4, Priority: 2000, To: netip.MustParsePrefix("192.0.2.1/32"), Transport: 6, SourcePort: 1024, DestinationPort: 80, Table: 0x63000002, Protocol: 30},
		{Family: dataplane.IPv6, Priority: 2000, To: netip.MustParsePrefix("2001:db8::1/128"), Transport: 17, SourcePort: 60999, DestinationPort: 53, Table: 0x63000002, Protocol: 30},
	}
	shown := []string{
		"2000: from all to 192.0.2.1 ipproto tcp sport 1024 dport 80 lookup 1660944386 proto 30",
		"2000: from all to 2001:db8::1 ipproto udp sport 60999 dport 53 lookup 1660944386 proto 30",
	}
	s.sync(t, want, dataplane.Result{Added: 2}, shown)
	s.sync(t, want, dataplane.Result{}, shown)

	// Drift: a range of ports.
	s.IP(t, "rule", "del", "priority", "2000")
	s.IP(t, "rule", "add", "priority", "2000", "to", "192.0.2.1", "ipproto", "tcp", "sport", "1024-1030", "dport", "80", "lookup", "1660944386", "protocol", "30")
	s.sync(t, want, dataplane.Result{Added: 1, Deleted: 1}, shown)
	s.sync(t, nil, dataplane.Result{Deleted: 2}, nil)
}

func TestForeignRulesSurvive(t *testing.T) {
	s := newSpace(t)
	for _, args := range [][]string{
		{"priority", "2000", "lookup", "116", "protocol", "77"},
		{"priority", "2000", "to", "10.0.0.0/8", "lookup", "99", "protocol", "static"},
		{"priority", "1999", "lookup", "116", "protocol", "30"},
		{"priority", "2002", "lookup", "116", "protocol", "30"},
	} {
		s.IP(t, append([]string{"rule", "add"}, args...)...)
	}
	// Without a protocol, but not what is wanted.
	s.addWithoutProtocol(t, dataplane.Rule{Family: dataplane.IPv4, Priority: 2000, Table: 98})
	before := s.show(t)
	if result, err := s.Sync(t.Context(), want); err != nil || result != (dataplane.Result{Added: 5}) {
		t.Errorf("got %+v, %v", result, err)
	}
	s.sync(t, nil, dataplane.Result{Deleted: 5}, before)
}

// The rules that Coil 2.x left are replaced without a moment in which there is no rule, in
// whatever order the rules are.
func TestAdoptRulesWithoutProtocol(t *testing.T) {
	t.Run("only theirs", func(t *testing.T) {
		s := newSpace(t)
		for _, r := range want {
			s.addWithoutProtocol(t, r)
		}
		var order []string
		ctx := rtnl.WithTrace(t.Context(), func(r rtnl.Request) error {
			order = append(order, strings.Fields(r.String())[1])
			return nil
		})
		result, err := s.Sync(ctx, want)
		if err != nil || result != (dataplane.Result{Added: 5, Deleted: 5}) {
			t.Errorf("got %+v, %v", result, err)
		}
		if got := strings.Join(order, " "); got != "show show add add add add add del del del del del show show" {
			t.Errorf("in this order: %s", got)
		}
		s.sync(t, want, dataplane.Result{}, wantShown)
	})
	t.Run("behind ours", func(t *testing.T) {
		s := newSpace(t)
		if _, err := s.Sync(t.Context(), want); err != nil {
			t.Fatal(err)
		}
		for _, r := range want {
			s.addWithoutProtocol(t, r)
		}
		// The kernel removes the first match, ours, so that it takes a second pass.
		s.sync(t, want, dataplane.Result{Added: 5, Deleted: 10}, wantShown)
		s.sync(t, want, dataplane.Result{}, wantShown)
	})
	t.Run("can't be added", func(t *testing.T) {
		s := newSpace(t)
		for _, r := range want {
			s.addWithoutProtocol(t, r)
		}
		before := s.show(t)
		failed := errors.New("no memory")
		ctx := rtnl.WithTrace(t.Context(), func(r rtnl.Request) error {
			if strings.HasPrefix(r.String(), "rule add") {
				return failed
			}
			return nil
		})
		if result, err := s.Sync(ctx, want); !errors.Is(err, failed) || result.Changed() {
			t.Errorf("got %+v, %v", result, err)
		}
		if diff := cmp.Diff(before, s.show(t)); diff != "" {
			t.Errorf("rules (-before +after):\n%s", diff)
		}
	})
}

func TestInterruptedDump(t *testing.T) {
	s := newSpace(t)
	s.sync(t, want, dataplane.Result{Added: 5}, wantShown)
	for _, family := range []string{"IPv4", "IPv6"} {
		times := 5
		ctx := rtnl.WithTrace(t.Context(), func(r rtnl.Request) error {
			if times--; times >= 0 && strings.Contains(r.String(), "show ("+family) {
				return rtnl.ErrDumpInterrupted
			}
			return nil
		})
		if result, err := s.Sync(ctx, want); err != nil || result.Changed() {
			t.Errorf("five times: %+v, %v", result, err)
		}
		times = 1000
		if result, err := s.Sync(ctx, nil); !errors.Is(err, rtnl.ErrDumpInterrupted) || result.Changed() {
			t.Errorf("for ever: %+v, %v", result, err)
		}
	}
	s.sync(t, want, dataplane.Result{}, wantShown)
}

func TestSyncRefuses(t *testing.T) {
	s := newSpace(t)
	for name, r := range map[string]dataplane.Rule{
		"protocol": {Family: dataplane.IPv4, Priority: 2000, Table: 116, Protocol: 31},
		"priority": {Family: dataplane.IPv4, Priority: 1999, Table: 116, Protocol: 30},
	} {
		if _, err := s.Sync(t.Context(), []dataplane.Rule{r}); err == nil {
			t.Errorf("a rule of another %s is accepted", name)
		}
	}
	if rules := s.show(t); len(rules) != 0 {
		t.Errorf("made %q", rules)
	}
}

// A rule that is touched is gone, also one that was left, and the others are as they were.
func TestTouch(t *testing.T) {
	s := newSpace(t)
	s.sync(t, want, dataplane.Result{Added: 5}, wantShown)
	touched := dataplane.Rule{Family: dataplane.IPv6, Priority: 2000, Mark: 0x100000, Mask: 0x100000, Table: 116, Protocol: 30}
	for _, left := range []bool{false, true} {
		if left {
			s.IP(t, "-6", "rule", "add", "priority", "2000", "fwmark", "0x100000/0x100000", "table", "116", "protocol", "30")
		}
		if err := s.Touch(t.Context(), touched); err != nil {
			t.Errorf("left %t: %v", left, err)
		}
		s.sync(t, want, dataplane.Result{}, wantShown)
	}
	touched.Priority = 1999
	if err := s.Touch(t.Context(), touched); err == nil {
		t.Error("a rule of another priority is touched")
	}
}

package route

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

func unicast(dst string, link int) dataplane.Route {
	return dataplane.Route{Table: 116, Dst: netip.MustParsePrefix(dst), Link: link, Protocol: 30}
}

func metric(r dataplane.Route, m int) dataplane.Route { r.Metric = m; return r }

func found(r dataplane.Route) rtnl.Route { return rtnl.Route{Route: r, Exact: true} }

func inexact(r dataplane.Route) rtnl.Route { return rtnl.Route{Route: r} }

func via(dst, gateway string, link int) dataplane.Route {
	r := unicast(dst, link)
	r.Gateway = netip.MustParseAddr(gateway)
	return r
}

func TestCompare(t *testing.T) {
	type list = []dataplane.Route
	for _, c := range []struct {
		name                 string
		want                 list
		have                 []rtnl.Route
		add, replace, remove list
		again                bool
	}{
		{name: "nothing"},
		{name: "fresh", want: list{unicast("10.0.0.1/32", 2), unicast("fd00::1/128", 2)}, add: list{unicast("10.0.0.1/32", 2), unicast("fd00::1/128", 2)}},
		{name: "as wanted", want: list{unicast("10.0.0.1/32", 2)}, have: []rtnl.Route{found(unicast("10.0.0.1/32", 2))}},
		{name: "not wanted", have: []rtnl.Route{found(unicast("10.0.0.1/32", 2))}, remove: list{unicast("10.0.0.1/32", 2)}},
		{
			name: "by a gateway, the link is the kernel's choice", want: list{via("10.0.0.0/24", "192.0.2.1", 0)},
			have: []rtnl.Route{found(via("10.0.0.0/24", "192.0.2.1", 7))},
		},
		{
			name: "by a gateway on a link that was chosen", want: list{via("10.0.0.0/24", "192.0.2.1", 3)},
			have:    []rtnl.Route{found(via("10.0.0.0/24", "192.0.2.1", 7))},
			replace: list{via("10.0.0.0/24", "192.0.2.1", 3)},
		},
		{
			name: "by another gateway", want: list{via("10.0.0.0/24", "192.0.2.2", 0)},
			have:    []rtnl.Route{found(via("10.0.0.0/24", "192.0.2.1", 7))},
			replace: list{via("10.0.0.0/24", "192.0.2.2", 0)},
		},
		{
			name: "other link", want: list{unicast("10.0.0.1/32", 3)}, have: []rtnl.Route{found(unicast("10.0.0.1/32", 2))},
			replace: list{unicast("10.0.0.1/32", 3)},
		},
		{
			name: "same but for what can't be described", want: list{unicast("10.0.0.1/32", 2)}, have: []rtnl.Route{inexact(unicast("10.0.0.1/32", 2))},
			replace: list{unicast("10.0.0.1/32", 2)},
		},
		{
			name: "other metric", want: list{unicast("10.0.0.1/32", 2)}, have: []rtnl.Route{found(metric(unicast("10.0.0.1/32", 2), 5))},
			add: list{unicast("10.0.0.1/32", 2)}, remove: list{metric(unicast("10.0.0.1/32", 2), 5)},
		},
		{
			name: "other length", want: list{unicast("10.0.0.0/24", 2)}, have: []rtnl.Route{found(unicast("10.0.0.0/25", 2))},
			add: list{unicast("10.0.0.0/24", 2)}, remove: list{unicast("10.0.0.0/25", 2)},
		},
		{
			name: "an equal and another one", want: list{unicast("10.0.0.1/32", 2)},
			have:   []rtnl.Route{found(unicast("10.0.0.1/32", 3)), found(unicast("10.0.0.1/32", 2))},
			remove: list{unicast("10.0.0.1/32", 3)},
		},
		{
			name: "several others", want: list{unicast("10.0.0.1/32", 2)},
			have:    []rtnl.Route{found(unicast("10.0.0.1/32", 3)), found(unicast("10.0.0.1/32", 4))},
			replace: list{unicast("10.0.0.1/32", 2)}, again: true,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := compare(c.want, c.have)
			var remove list
			for _, r := range d.remove {
				remove = append(remove, r.Route)
			}
			equal := cmp.Comparer(func(a, b dataplane.Route) bool { return a == b })
			for _, x := range []struct {
				what      string
				got, want list
			}{{"add", d.add, c.add}, {"replace", d.replace, c.replace}, {"remove", remove, c.remove}} {
				if diff := cmp.Diff(x.want, x.got, equal); diff != "" {
					t.Errorf("%s (-want +got):\n%s", x.what, diff)
				}
			}
			if d.again != c.again {
				t.Errorf("again is %t", d.again)
			}
		})
	}
}

func TestCheckRefuses(t *testing.T) {
	s := New(nil, 30, 116)
	for name, want := range map[string][]dataplane.Route{
		"other protocol":     {{Table: 116, Dst: netip.MustParsePrefix("10.0.0.1/32"), Protocol: 31}},
		"other table":        {{Table: 119, Dst: netip.MustParsePrefix("10.0.0.1/32"), Protocol: 30}},
		"no destination":     {{Table: 116, Protocol: 30}},
		"host bits":          {{Table: 116, Dst: netip.MustParsePrefix("10.0.0.1/24"), Protocol: 30}},
		"wanted in two ways": {unicast("10.0.0.1/32", 2), unicast("10.0.0.1/32", 3)},
	} {
		if _, err := s.check(want); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	got, err := s.check([]dataplane.Route{unicast("10.0.0.2/32", 2), unicast("10.0.0.1/32", 2), unicast("10.0.0.2/32", 2)})
	if err != nil || len(got) != 2 {
		t.Errorf("got %v, %v", got, err)
	}
}

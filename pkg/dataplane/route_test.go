package dataplane_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
)

func TestRouteString(t *testing.T) {
	for _, c := range []struct {
		route dataplane.Route
		want  string
	}{
		{
			dataplane.Route{Table: 116, Dst: netip.MustParsePrefix("10.0.0.1/32"), Link: 7, Scope: dataplane.LinkScope, Protocol: 30, Source: netip.MustParseAddr("192.0.2.1")},
			"10.0.0.1/32 dev 7 proto 30 scope link src 192.0.2.1 table 116",
		},
		{
			dataplane.Route{Table: 120, Dst: netip.MustParsePrefix("fd00::/64"), Type: dataplane.Unreachable, Protocol: 30},
			"unreachable fd00::/64 proto 30 table 120",
		},
		{
			dataplane.Route{Table: 117, Dst: netip.MustParsePrefix("10.0.0.0/8"), Type: dataplane.Throw, Protocol: 30, Metric: 5},
			"throw 10.0.0.0/8 proto 30 metric 5 table 117",
		},
		{
			dataplane.Route{Table: 254, Dst: netip.MustParsePrefix("fd00::/64"), Gateway: netip.MustParseAddr("fe80::1"), Link: 2, OnLink: true, Protocol: 31},
			"fd00::/64 via fe80::1 dev 2 proto 31 onlink table 254",
		},
	} {
		if got := c.route.String(); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

func TestRouteCanonical(t *testing.T) {
	v4 := dataplane.Route{Table: 116, Dst: netip.MustParsePrefix("10.0.0.1/32"), Link: 7, Scope: dataplane.LinkScope, Metric: 1024}
	if got := v4.Canonical(); got != v4 {
		t.Errorf("IPv4 became %s", got)
	}
	v6 := dataplane.Route{Table: 116, Dst: netip.MustParsePrefix("fd00::1/128"), Link: 7, Scope: dataplane.LinkScope, Metric: 1024}
	if got, want := v6.Canonical(), (dataplane.Route{Table: 116, Dst: v6.Dst, Link: 7}); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	v6.Type = dataplane.Unreachable
	if got, want := v6.Canonical(), (dataplane.Route{Table: 116, Dst: v6.Dst, Type: dataplane.Unreachable}); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestCompareRoutes(t *testing.T) {
	route := func(table int, dst string, metric int) dataplane.Route {
		return dataplane.Route{Table: table, Dst: netip.MustParsePrefix(dst), Metric: metric}
	}
	want := []dataplane.Route{
		route(116, "10.0.0.0/8", 0), route(116, "10.0.0.0/16", 0), route(116, "10.0.0.0/16", 5),
		route(116, "10.0.0.2/32", 0), route(116, "fd00::/64", 0), route(119, "10.0.0.0/8", 0),
	}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, dataplane.CompareRoutes)
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func TestRuleString(t *testing.T) {
	for want, r := range map[string]dataplane.Rule{
		"2000: from all to fc00::/7 lookup 254 proto 30 (IPv6)": {
			Family: dataplane.IPv6, Priority: 2000, To: netip.MustParsePrefix("fc00::/7"), Table: 254, Protocol: 30,
		},
		"5: from 10.0.0.0/8 fwmark 0x1/0x3 iif lo oif eth0 ipproto 6 sport 1 dport 2 blackhole proto 30 (IPv4)": {
			Family: dataplane.IPv4, Priority: 5, From: netip.MustParsePrefix("10.0.0.0/8"), Mark: 1, Mask: 3, Input: "lo", Output: "eth0",
			Transport: 6, SourcePort: 1, DestinationPort: 2, Blackhole: true, Protocol: 30,
		},
	} {
		if got := r.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestResult(t *testing.T) {
	sum := dataplane.Result{Added: 1, Deleted: 2}.Plus(dataplane.Result{Added: 3, Replaced: 4})
	if sum != (dataplane.Result{Added: 4, Replaced: 4, Deleted: 2}) || !sum.Changed() || (dataplane.Result{}).Changed() {
		t.Errorf("got %+v", sum)
	}
}

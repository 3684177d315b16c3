package route_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

const main = 254

// space is a namespace with two links.
type space struct {
	*netnstest.NS
	handle *rtnl.Handle
	a, b   int
}

func newSpace(t *testing.T) space {
	t.Helper()
	testkit.Need(t, testkit.Netns)
	ns := netnstest.New(t)
	s := space{NS: ns}
	ns.IP(t, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
	for _, l := range []string{"a", "b"} {
		ns.IP(t, "link", "set", "dev", l, "up")
	}
	ns.IP(t, "address", "add", "192.0.2.1/24", "dev", "a")
	ns.IP(t, "address", "add", "2001:db8::1/64", "dev", "a", "nodad")
	var err error
	if s.handle, err = rtnl.New(ns.NS); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.handle.Close)
	for name, index := range map[string]*int{"a": &s.a, "b": &s.b} {
		if *index, err = s.handle.IndexByName(name); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// show is all routes but those of table local, which the kernel makes.
func (s space) show(t *testing.T) []string {
	t.Helper()
	var routes []string
	for _, family := range []string{"-4", "-6"} {
		for l := range strings.Lines(s.IP(t, family, "route", "show", "table", "all")) {
			if !strings.Contains(l, "table local") && !strings.Contains(l, "proto kernel") {
				routes = append(routes, strings.Join(strings.Fields(l), " "))
			}
		}
	}
	return routes
}

// wants are routes of every kind that Coil makes, and how iproute2 shows them.
func (s space) wants() (routes []dataplane.Route, shown []string) {
	p, a := netip.MustParsePrefix, netip.MustParseAddr
	routes = []dataplane.Route{
		{Table: 116, Dst: p("10.0.0.1/32"), Link: s.a, Scope: dataplane.LinkScope, Source: a("192.0.2.1"), Protocol: 30},
		{Table: 116, Dst: p("fd00::1/128"), Link: s.a, Scope: dataplane.LinkScope, Source: a("2001:db8::1"), Protocol: 30},
		{Table: 119, Dst: p("10.0.0.0/27"), Link: 1, Protocol: 30},
		{Table: 119, Dst: p("fd00::/123"), Link: 1, Protocol: 30},
		{Table: 120, Dst: p("10.0.0.0/27"), Type: dataplane.Unreachable, Protocol: 30},
		{Table: 120, Dst: p("fd00::/123"), Type: dataplane.Unreachable, Protocol: 30},
		{Table: 120, Dst: p("10.9.0.0/16"), Type: dataplane.Throw, Protocol: 30},
		{Table: 120, Dst: p("fd09::/64"), Type: dataplane.Throw, Protocol: 30, Metric: 7},
		{Table: 120, Dst: p("10.7.0.0/16"), Link: s.b, Protocol: 30},
		{Table: 120, Dst: p("10.7.0.0/16"), Type: dataplane.Unreachable, Protocol: 30, Metric: dataplane.MetricUnreachable},
		{Table: 120, Dst: p("fd07::/64"), Link: s.b, Protocol: 30},
		{Table: 120, Dst: p("fd07::/64"), Type: dataplane.Unreachable, Protocol: 30, Metric: dataplane.MetricUnreachable},
		{Table: 1000, Dst: p("0.0.0.0/0"), Gateway: a("192.0.2.9"), Link: s.a, Protocol: 30, Metric: 3},
		{Table: 1000, Dst: p("::/0"), Gateway: a("fe80::9"), Link: s.a, Protocol: 30},
		{Table: 1000, Dst: p("10.8.0.0/16"), Gateway: a("198.51.100.1"), Link: s.b, OnLink: true, Protocol: 30},
	}
	shown = []string{
		"10.0.0.1 dev a table 116 proto 30 scope link src 192.0.2.1",
		"10.0.0.0/27 dev lo table 119 proto 30",
		"unreachable 10.0.0.0/27 table 120 proto 30",
		"throw 10.9.0.0/16 table 120 proto 30",
		"10.7.0.0/16 dev b table 120 proto 30",
		"unreachable 10.7.0.0/16 table 120 proto 30 metric 4294967295",
		"fd07::/64 dev b table 120 proto 30 metric 1024 pref medium",
		"unreachable fd07::/64 dev lo table 120 proto 30 metric 4294967295 pref medium",
		"default via 192.0.2.9 dev a table 1000 proto 30 metric 3",
		"10.8.0.0/16 via 198.51.100.1 dev b table 1000 proto 30 onlink",
		"fd00::1 dev a table 116 proto 30 src 2001:db8::1 metric 1024 pref medium",
		"fd00::/123 dev lo table 119 proto 30 metric 1024 pref medium",
		"unreachable fd00::/123 dev lo table 120 proto 30 metric 1024 pref medium",
		"throw fd09::/64 dev lo table 120 proto 30 metric 7 pref medium",
		"default via fe80::9 dev a table 1000 proto 30 metric 1024 pref medium",
	}
	return routes, shown
}

func sync(t *testing.T, s *route.Syncer, want []dataplane.Route, result dataplane.Result) {
	t.Helper()
	got, err := s.Sync(t.Context(), want)
	if err != nil {
		t.Fatal(err)
	}
	if got != result {
		t.Errorf("Sync: %+v, not %+v", got, result)
	}
}

func sameLines(t *testing.T, want, got []string) {
	t.Helper()
	if diff := cmp.Diff(slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(got))); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
}

func TestSync(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 116, 119, 120, 1000)
	want, shown := s.wants()

	sync(t, syncer, nil, dataplane.Result{})
	sync(t, syncer, want, dataplane.Result{Added: len(want)})
	sameLines(t, shown, s.show(t))

	// Repeated, not one message is sent that changes something.
	var written []string
	ctx := rtnl.WithTrace(t.Context(), func(r rtnl.Request) error {
		if !strings.Contains(r.String(), "show") {
			written = append(written, r.String())
		}
		return nil
	})
	if result, err := syncer.Sync(ctx, want); err != nil || result.Changed() || len(written) > 0 {
		t.Errorf("second Sync: %+v, %v, %q", result, err, written)
	}

	// Drift: gone, changed in link, source, type and gateway, made by several next
	// hops, and too many.
	s.IP(t, "route", "del", "10.0.0.0/27", "table", "119")
	s.IP(t, "route", "replace", "10.0.0.1", "dev", "b", "table", "116", "proto", "30", "scope", "link")
	s.IP(t, "-6", "route", "replace", "fd00::1", "dev", "a", "table", "116", "proto", "30")
	s.IP(t, "route", "replace", "throw", "10.0.0.0/27", "table", "120", "proto", "30")
	s.IP(t, "route", "replace", "default", "metric", "3", "table", "1000", "proto", "30", "nexthop", "via", "192.0.2.9", "dev", "a", "nexthop", "via", "192.0.2.10", "dev", "a")
	s.IP(t, "-6", "route", "append", "default", "via", "fe80::a", "dev", "a", "table", "1000", "proto", "30")
	s.IP(t, "route", "add", "10.0.0.77", "dev", "a", "table", "116", "proto", "30")
	s.IP(t, "route", "add", "10.0.0.1", "dev", "a", "table", "116", "proto", "30", "metric", "9", "mtu", "1400")
	s.IP(t, "route", "add", "10.0.0.1", "tos", "0x10", "dev", "a", "table", "116", "proto", "30")
	s.IP(t, "-6", "route", "add", "blackhole", "fd77::/64", "table", "120", "proto", "30")
	sync(t, syncer, want, dataplane.Result{Added: 1, Replaced: 5, Deleted: 4})
	sameLines(t, shown, s.show(t))
	sync(t, syncer, want, dataplane.Result{})

	sync(t, syncer, nil, dataplane.Result{Deleted: len(want)})
	sameLines(t, nil, s.show(t))
}

// Routes of others stay, whatever they look like and wherever they are.
func TestForeignRoutesSurvive(t *testing.T) {
	s := newSpace(t)
	for _, args := range [][]string{
		{"10.0.0.2", "dev", "a", "table", "116", "proto", "77"},
		{"10.0.0.3", "dev", "a", "table", "116"},
		{"10.0.0.1", "dev", "b", "table", "116", "proto", "77", "metric", "5"},
		{"10.0.0.4", "dev", "a", "table", "117", "proto", "30"},
		{"10.0.0.5", "dev", "a", "proto", "30"},
		{"unreachable", "10.0.0.0/27", "table", "116", "proto", "static"},
		{"fd00::2", "dev", "a", "table", "116", "proto", "77"},
	} {
		s.IP(t, append([]string{"route", "add"}, args...)...)
	}
	before := s.show(t)
	syncer := route.New(s.handle, 30, 116)
	want := []dataplane.Route{{Table: 116, Dst: netip.MustParsePrefix("10.0.0.1/32"), Link: s.a, Protocol: 30}}
	sync(t, syncer, want, dataplane.Result{Added: 1})
	sync(t, syncer, nil, dataplane.Result{Deleted: 1})
	sameLines(t, before, s.show(t))
}

// A place that a foreign route has is not taken from it, and doesn't keep the
// others from being made.
func TestPlaceTakenByForeignRoute(t *testing.T) {
	p := netip.MustParsePrefix
	for _, family := range []string{"10.0.0.", "fd00::"} {
		t.Run(family, func(t *testing.T) {
			s := newSpace(t)
			bits := map[string]string{"10.0.0.": "/32", "fd00::": "/128"}[family]
			syncer := route.New(s.handle, 31, main)
			s.IP(t, "route", "add", family+"1", "dev", "b", "proto", "77")
			want := []dataplane.Route{
				{Table: main, Dst: p(family + "1" + bits), Link: s.a, Protocol: 31},
				{Table: main, Dst: p(family + "2" + bits), Link: s.a, Protocol: 31},
			}
			for i := range 2 {
				result, err := syncer.Sync(t.Context(), want)
				if !errors.Is(err, rtnl.ErrExist) || result.Added != 1-i {
					t.Errorf("Sync: %+v, %v", result, err)
				}
				for _, says := range []string{family + "1" + bits, "isn't ours", "proto 77"} {
					if err != nil && !strings.Contains(err.Error(), says) {
						t.Errorf("%q is missing: %v", says, err)
					}
				}
			}
			if out := s.IP(t, "route", "get", family+"1"); !strings.Contains(out, "dev b") {
				t.Errorf("the foreign route was changed: %s", out)
			}

			// Two routes in one place, ours the second: it isn't replaced, since the
			// kernel would replace the first.
			if !strings.Contains(family, ":") {
				s.IP(t, "route", "append", family+"1", "dev", "b", "proto", "31")
				if _, err := syncer.Sync(t.Context(), want); !errors.Is(err, rtnl.ErrExist) {
					t.Errorf("got %v", err)
				}
				if out := s.IP(t, "route", "show", family+"1"); !strings.Contains(out, "proto 77") {
					t.Errorf("the foreign route was replaced: %s", out)
				}
			}

			// When the other goes, ours comes.
			s.IP(t, "route", "del", family+"1", "proto", "77")
			if _, err := syncer.Sync(t.Context(), want); err != nil {
				t.Error(err)
			}
			if out := s.IP(t, "route", "get", family+"1"); !strings.Contains(out, "dev a") {
				t.Errorf("not ours: %s", out)
			}
		})
	}
}

func TestSyncGoesOnAfterAFailure(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 116)
	p := netip.MustParsePrefix
	s.IP(t, "route", "add", "10.0.0.9", "dev", "a", "table", "116", "proto", "30")
	result, err := syncer.Sync(t.Context(), []dataplane.Route{
		{Table: 116, Dst: p("10.0.0.1/32"), Link: 9999, Protocol: 30},
		{Table: 116, Dst: p("10.0.0.2/32"), Link: s.a, Protocol: 30},
		{Table: 116, Dst: p("fd00::1/128"), Link: 9999, Protocol: 30},
		{Table: 116, Dst: p("fd00::2/128"), Link: s.a, Protocol: 30},
	})
	if result != (dataplane.Result{Added: 2, Deleted: 1}) {
		t.Errorf("got %+v", result)
	}
	for _, want := range []string{"10.0.0.1/32", "fd00::1/128"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s is missing: %v", want, err)
		}
	}
	if !errors.Is(err, rtnl.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// An incomplete list is never taken for the whole.
func TestInterruptedDump(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 116, 119, 120, 1000)
	want, shown := s.wants()
	sync(t, syncer, want, dataplane.Result{Added: len(want)})
	interrupted := func(times int, table string) context.Context {
		return rtnl.WithTrace(t.Context(), func(r rtnl.Request) error {
			if times > 0 && strings.Contains(r.String(), "show table "+table) {
				times--
				return rtnl.ErrDumpInterrupted
			}
			return nil
		})
	}
	for _, table := range []string{"116", "119", "120", "1000"} {
		if result, err := syncer.Sync(interrupted(5, table), want); err != nil || result.Changed() {
			t.Errorf("five times: %+v, %v", result, err)
		}
		if result, err := syncer.Sync(interrupted(1000, table), nil); !errors.Is(err, rtnl.ErrDumpInterrupted) || result.Changed() {
			t.Errorf("for ever: %+v, %v", result, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if result, err := syncer.Sync(ctx, nil); !errors.Is(err, context.Canceled) || result.Changed() {
		t.Errorf("cancelled: %+v, %v", result, err)
	}
	sameLines(t, shown, s.show(t))
}

// Thousands of routes, more than one datagram takes.
func TestManyRoutes(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 116)
	var want []dataplane.Route
	for i := range 2000 {
		want = append(want,
			dataplane.Route{Table: 116, Dst: netip.MustParsePrefix(fmt.Sprintf("10.1.%d.%d/32", i>>8, i&255)), Link: s.a, Protocol: 30},
			dataplane.Route{Table: 116, Dst: netip.MustParsePrefix(fmt.Sprintf("fd01::%x/128", i)), Link: s.a, Protocol: 30})
	}
	sync(t, syncer, want, dataplane.Result{Added: 4000})
	sync(t, syncer, want, dataplane.Result{})
	sync(t, syncer, want[:1000], dataplane.Result{Deleted: 3000})
	sync(t, syncer, nil, dataplane.Result{Deleted: 1000})

	// All of them refused at once: each refusal is read.
	for i := range want {
		want[i].Link = 9999
	}
	result, err := syncer.Sync(t.Context(), want)
	if err == nil || result.Changed() || strings.Count(err.Error(), "\n") != 3999 {
		t.Errorf("got %+v with %d lines of errors", result, strings.Count(fmt.Sprint(err), "\n"))
	}
}

func TestAddAndDelete(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 116)
	want := []dataplane.Route{
		{Table: 116, Dst: netip.MustParsePrefix("10.0.0.1/32"), Link: s.a, Scope: dataplane.LinkScope, Protocol: 30},
		{Table: 116, Dst: netip.MustParsePrefix("fd00::1/128"), Link: s.a, Protocol: 30},
	}
	if err := syncer.Add(t.Context(), want...); err != nil {
		t.Fatal(err)
	}
	if err := syncer.Add(t.Context(), want...); !errors.Is(err, rtnl.ErrExist) {
		t.Errorf("second Add: %v", err)
	}
	sync(t, syncer, want, dataplane.Result{})
	for range 2 {
		// Only what identifies them matters.
		for i := range want {
			want[i].Link, want[i].Scope = s.b, dataplane.Universe
		}
		if err := syncer.Delete(t.Context(), want...); err != nil {
			t.Error(err)
		}
		sameLines(t, nil, s.show(t))
	}
	s.IP(t, "route", "add", "10.0.0.1", "dev", "a", "table", "116", "proto", "77")
	before := s.show(t)
	if err := syncer.Delete(t.Context(), want...); err != nil {
		t.Error(err)
	}
	sameLines(t, before, s.show(t))
}

// Wants that are read after the kernel spare what was added in the meantime.
func TestSyncFuncReadsWantsLast(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 116)
	one := dataplane.Route{Table: 116, Dst: netip.MustParsePrefix("10.0.0.1/32"), Link: s.a, Protocol: 30}
	two := one
	two.Dst = netip.MustParsePrefix("10.0.0.2/32")
	result, err := syncer.SyncFunc(t.Context(), func(ctx context.Context) ([]dataplane.Route, error) {
		return nil, syncer.Add(ctx, one)
	}, nil)
	if err != nil || result.Changed() {
		t.Errorf("got %+v, %v", result, err)
	}
	if err := syncer.Add(t.Context(), two); err != nil {
		t.Fatal(err)
	}
	spare := func(r dataplane.Route) bool { return r.Dst == two.Dst }
	result, err = syncer.SyncFunc(t.Context(), func(context.Context) ([]dataplane.Route, error) { return nil, nil }, spare)
	if err != nil || result != (dataplane.Result{Deleted: 1}) {
		t.Errorf("got %+v, %v", result, err)
	}
	if out := s.IP(t, "route", "show", "table", "116"); !strings.HasPrefix(out, "10.0.0.2 ") {
		t.Errorf("got %q", out)
	}
}

// A wanted route without a link takes the kernel's choice, which is not a difference.
func TestSyncByGatewayAlone(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 1000)
	by := func(four, six string) []dataplane.Route {
		return []dataplane.Route{
			{Table: 1000, Dst: netip.MustParsePrefix("10.8.0.0/16"), Gateway: netip.MustParseAddr(four), Protocol: 30},
			{Table: 1000, Dst: netip.MustParsePrefix("fd08::/64"), Gateway: netip.MustParseAddr(six), Protocol: 30},
		}
	}
	sync(t, syncer, by("192.0.2.9", "2001:db8::9"), dataplane.Result{Added: 2})
	sync(t, syncer, by("192.0.2.9", "2001:db8::9"), dataplane.Result{})
	sync(t, syncer, by("192.0.2.10", "2001:db8::a"), dataplane.Result{Replaced: 2})
	sync(t, syncer, by("192.0.2.10", "2001:db8::a"), dataplane.Result{})
	sync(t, syncer, nil, dataplane.Result{Deleted: 2})
}

// Ensure adds and replaces what is wanted, and leaves everything else.
func TestEnsure(t *testing.T) {
	s := newSpace(t)
	syncer := route.New(s.handle, 30, 116, 119, 120, 1000)
	want, shown := s.wants()
	sync(t, syncer, want, dataplane.Result{Added: len(want)})
	s.IP(t, "route", "del", "10.0.0.0/27", "table", "119")
	s.IP(t, "-6", "route", "replace", "fd00::1", "dev", "b", "table", "116", "proto", "30")
	ensure := func(want []dataplane.Route, result dataplane.Result) {
		t.Helper()
		got, err := syncer.Ensure(t.Context(), want)
		if err != nil || got != result {
			t.Errorf("Ensure: %+v, not %+v; %v", got, result, err)
		}
	}
	ensure(nil, dataplane.Result{})
	ensure(want[:1], dataplane.Result{})
	ensure(want[:3], dataplane.Result{Added: 1, Replaced: 1})
	sameLines(t, shown, s.show(t))
}

// A range of tables is owned as a whole, up to its ends.
func TestSyncOfARange(t *testing.T) {
	s := newSpace(t)
	at := func(table int) dataplane.Route {
		return dataplane.Route{Table: table, Dst: netip.MustParsePrefix("10.0.0.0/8"), Link: s.a, Protocol: 30}
	}
	outside := route.New(s.handle, 30, 999, 2001)
	sync(t, outside, []dataplane.Route{at(999), at(2001)}, dataplane.Result{Added: 2})
	s.IP(t, "route", "add", "10.0.0.0/8", "dev", "b", "table", "1500", "proto", "77")
	before := s.show(t)

	inside := route.NewRange(s.handle, 30, 1000, 2000)
	sync(t, inside, []dataplane.Route{at(1000), at(1001), at(2000)}, dataplane.Result{Added: 3})
	sync(t, inside, []dataplane.Route{at(1000), at(1700)}, dataplane.Result{Added: 1, Deleted: 2})
	if _, err := inside.Sync(t.Context(), []dataplane.Route{at(1500)}); !errors.Is(err, rtnl.ErrExist) {
		t.Errorf("in place of another's: %v", err)
	}
	if _, err := inside.Sync(t.Context(), []dataplane.Route{at(2001)}); err == nil || !strings.Contains(err.Error(), "tables 1000 to 2000") {
		t.Errorf("a route outside: %v", err)
	}
	if _, err := route.New(s.handle, 30).Sync(t.Context(), []dataplane.Route{at(1000)}); err == nil {
		t.Error("a route is made by a Syncer without tables")
	}
	sync(t, inside, nil, dataplane.Result{})
	if diff := cmp.Diff(before, s.show(t)); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
}

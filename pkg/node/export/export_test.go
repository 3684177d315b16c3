package export

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/routes"
)

// kernel is two tables in memory; it notes each change, and after each that no
// exported prefix lacks its unreachable route.
type kernel struct {
	t      *testing.T
	routes map[int]map[netip.Prefix]bool
	log    []string
	fail   int // the table whose Sync fails

	repaired map[string]int
	saw      []string // kinds
}

// Done implements Repairs.
func (k *kernel) Done(_ context.Context, kind string, n int) {
	if n > 0 {
		k.repaired[kind] += n
	}
}

// Saw implements Repairs.
func (k *kernel) Saw(kind, _ string) { k.saw = append(k.saw, kind) }

type table struct {
	*kernel
	id int
}

func (k table) Sync(ctx context.Context, want []dataplane.Route) (dataplane.Result, error) {
	res, err := k.Ensure(ctx, want)
	if err != nil {
		return res, err
	}
	wanted := map[netip.Prefix]bool{}
	for _, r := range want {
		wanted[r.Dst] = true
	}
	for p := range k.routes[k.id] {
		if !wanted[p] {
			delete(k.routes[k.id], p)
			k.log = append(k.log, fmt.Sprintf("-%d %s", k.id, p))
			res.Deleted++
			k.check()
		}
	}
	return res, nil
}

func (k table) Ensure(_ context.Context, want []dataplane.Route) (dataplane.Result, error) {
	if k.fail == k.id {
		return dataplane.Result{}, errors.New("netlink: no buffer space")
	}
	var res dataplane.Result
	for _, r := range want {
		if r.Table != k.id {
			k.t.Errorf("route %s was given to table %d", r, k.id)
		}
		if !k.routes[k.id][r.Dst] {
			k.routes[k.id][r.Dst] = true
			k.log = append(k.log, fmt.Sprintf("+%d %s", k.id, r.Dst))
			res.Added++
			k.check()
		}
	}
	return res, nil
}

func (k table) Missing(_ context.Context, want []dataplane.Route) (missing []dataplane.Route, err error) {
	if k.fail == k.id {
		return nil, errors.New("netlink: no buffer space")
	}
	for _, r := range want {
		if !k.routes[k.id][r.Dst] {
			missing = append(missing, r)
		}
	}
	return missing, nil
}

func (k *kernel) check() {
	for p := range k.routes[119] {
		if !k.routes[120][p] {
			k.t.Errorf("%s is exported without its unreachable route, after %v", p, k.log)
		}
	}
}

func held(prefix string) routes.HeldBlock {
	return routes.HeldBlock{Name: prefix, Block: ipam.Block{IPv4: netip.MustParsePrefix(prefix)}}
}

func newExporter(t *testing.T) (*Exporter, *kernel) {
	k := &kernel{t: t, routes: map[int]map[netip.Prefix]bool{119: {}, 120: {}}, repaired: map[string]int{}}
	return New(routes.ExportTables{Export: 119, Unassigned: 120, Protocol: 30, Loopback: 1}, table{k, 119}, table{k, 120}, k), k
}

func TestExportIsOrdered(t *testing.T) {
	e, k := newExporter(t)
	for _, step := range []struct {
		blocks []routes.HeldBlock
		want   string
	}{
		{[]routes.HeldBlock{held("10.0.0.0/27")}, "+120 10.0.0.0/27 +119 10.0.0.0/27"},
		{[]routes.HeldBlock{held("10.0.0.0/27")}, ""},
		{[]routes.HeldBlock{held("10.0.1.0/27")}, "+120 10.0.1.0/27 +119 10.0.1.0/27 -119 10.0.0.0/27 -120 10.0.0.0/27"},
		{nil, "-119 10.0.1.0/27 -120 10.0.1.0/27"},
	} {
		k.log = nil
		if err := e.Export(t.Context(), step.blocks); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(step.want, strings.Join(k.log, " ")); d != "" {
			t.Errorf("changes (-want +got):\n%s", d)
		}
	}
}

// A block is never announced when the guard of its addresses could not be made,
// and the guard stays when the withdrawal failed.
func TestExportStopsAtAFailure(t *testing.T) {
	e, k := newExporter(t)
	k.fail = 120
	if err := e.Export(t.Context(), []routes.HeldBlock{held("10.0.0.0/27")}); err == nil {
		t.Error("no error though the guard failed")
	}
	if len(k.routes[119]) > 0 {
		t.Error("exported without a guard")
	}
	k.fail = 0
	if err := e.Export(t.Context(), []routes.HeldBlock{held("10.0.0.0/27")}); err != nil {
		t.Fatal(err)
	}
	k.fail = 119
	if err := e.Export(t.Context(), nil); err == nil {
		t.Error("no error though the withdrawal failed")
	}
	if len(k.routes[120]) != 1 {
		t.Error("the guard went before the export")
	}
}

// A process that starts again doesn't know what the last one exported: what the tables have
// is withdrawn in the same order.
func TestExportIsOrderedAfterARestart(t *testing.T) {
	_, k := newExporter(t)
	for _, id := range []int{119, 120} {
		k.routes[id][netip.MustParsePrefix("10.0.0.0/27")] = true
	}
	again := New(routes.ExportTables{Export: 119, Unassigned: 120, Protocol: 30, Loopback: 1}, table{k, 119}, table{k, 120}, k)
	if err := again.Export(t.Context(), []routes.HeldBlock{held("10.0.1.0/27")}); err != nil {
		t.Fatal(err)
	}
	want := "+120 10.0.1.0/27 +119 10.0.1.0/27 -119 10.0.0.0/27 -120 10.0.0.0/27"
	if d := cmp.Diff(want, strings.Join(k.log, " ")); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
	if len(k.repaired) > 0 {
		t.Errorf("repaired %v", k.repaired)
	}
}

func TestExportCountsRepairs(t *testing.T) {
	e, k := newExporter(t)
	blocks := []routes.HeldBlock{held("10.0.0.0/27"), held("10.0.1.0/27")}
	e.Remember(blocks[:1])
	for _, step := range []struct {
		name  string
		lose  map[int]string
		count int // of blocks
		want  map[string]int
	}{
		{"one was exported by an earlier process, one is new", nil, 2, map[string]int{BlockRoute: 1, UnreachableRoute: 1}},
		{"nothing is missing", nil, 2, map[string]int{}},
		{"lost from the export table", map[int]string{119: "10.0.0.0/27"}, 2, map[string]int{BlockRoute: 1}},
		{"guard lost", map[int]string{120: "10.0.0.0/27"}, 2, map[string]int{UnreachableRoute: 1}},
		{"lost and not wanted any more", map[int]string{119: "10.0.1.0/27"}, 1, map[string]int{}},
		{"back", nil, 2, map[string]int{}},
	} {
		for id, prefix := range step.lose {
			delete(k.routes[id], netip.MustParsePrefix(prefix))
		}
		clear(k.repaired)
		if err := e.Export(t.Context(), blocks[:step.count]); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(step.want, k.repaired); d != "" {
			t.Errorf("%s: repaired (-want +got):\n%s", step.name, d)
		}
	}
}

func TestLost(t *testing.T) {
	route := func(table int) rtnl.Change {
		return rtnl.Change{Kind: rtnl.RouteLost, Route: dataplane.Route{Table: table, Dst: netip.MustParsePrefix("10.0.0.0/27"), Protocol: 30}}
	}
	unreachable := route(119)
	unreachable.Route.Type = dataplane.Unreachable
	for _, c := range []struct {
		name   string
		change rtnl.Change
		lost   bool
		saw    []string
	}{
		{"exported route", route(119), true, []string{BlockRoute}},
		{"exported unreachable route", unreachable, true, []string{UnreachableRoute}},
		{"unreachable route", route(120), true, []string{UnreachableRoute}},
		{"pod route", route(116), false, nil},
		{"rule", rtnl.Change{Kind: rtnl.RuleLost}, false, nil},
		{"unknown", rtnl.Change{}, true, nil},
		{"loopback", rtnl.Change{Kind: rtnl.LinkChanged, Link: 1}, true, nil},
		{"another link", rtnl.Change{Kind: rtnl.LinkChanged, Link: 7}, false, nil},
	} {
		e, k := newExporter(t)
		if lost := e.Lost(t.Context(), []rtnl.Change{{Kind: rtnl.RuleLost}, c.change}); lost != c.lost {
			t.Errorf("%s: lost is %t", c.name, lost)
		}
		if d := cmp.Diff(c.saw, k.saw); d != "" {
			t.Errorf("%s: saw (-want +got):\n%s", c.name, d)
		}
	}
}

func TestAdviceForEachKind(t *testing.T) {
	for _, k := range []string{BlockRoute, UnreachableRoute} {
		if Kinds[k] == "" {
			t.Errorf("none for %s", k)
		}
	}
}

// What people are told of the routes is what Export would do.
func TestLook(t *testing.T) {
	e, k := newExporter(t)
	blocks := []routes.HeldBlock{held("10.0.0.0/27"), held("10.0.1.0/27")}
	if err := e.Export(t.Context(), blocks); err != nil {
		t.Fatal(err)
	}
	wrong := func() (all []string) {
		for _, c := range inspection.Wrong(e.Look(t.Context(), blocks)) {
			all = append(all, c.String())
		}
		return all
	}
	if got := wrong(); len(got) > 0 {
		t.Errorf("wrong: %q", got)
	}
	delete(k.routes[119], netip.MustParsePrefix("10.0.1.0/27"))
	want := []string{"exported route of 10.0.1.0/27 is missing: it should be 10.0.1.0/27 dev 1 proto 30 table 119"}
	if d := cmp.Diff(want, wrong()); d != "" {
		t.Errorf("one is missing (-want +got):\n%s", d)
	}
	k.fail = 119
	for _, c := range e.Look(t.Context(), blocks) {
		if (c.Unknown != "") != strings.HasPrefix(c.Object, "exported") {
			t.Errorf("the exported ones can't be read: %+v", c)
		}
	}
}

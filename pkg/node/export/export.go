// Package export announces the node's blocks to routing daemons, as routes in a
// table that they import, and makes the rest of each block unreachable.
//
// It owns both tables. It must not know why a block is announced.
package export

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/routes"
)

// Table keeps the routes of one table; see package kernel/route.
type Table interface {
	Sync(ctx context.Context, want []dataplane.Route) (dataplane.Result, error)
	// Ensure deletes nothing.
	Ensure(ctx context.Context, want []dataplane.Route) (dataplane.Result, error)
	// Missing returns what Sync would add or replace.
	Missing(ctx context.Context, want []dataplane.Route) ([]dataplane.Route, error)
}

// The kinds of routes that are repaired; label kind of coil_repairs_total.
const (
	BlockRoute       = "block_route"
	UnreachableRoute = "unreachable_route"
)

const advice = "systemd-networkd deletes what it doesn't know unless a file in /etc/systemd/networkd.conf.d/ " +
	"says, below [Network], ManageForeignRoutes=no. A routing daemon must only import these tables"

// Kinds are the kinds with advice for the admin: which program is likely to destroy such objects again and again, and
// what to do about it.
var Kinds = map[string]string{BlockRoute: advice, UnreachableRoute: advice}

// Repairs counts routes that were there after the last Export and were not any more; see package reconcile.
type Repairs interface {
	Done(ctx context.Context, kind string, n int)
	Saw(kind, what string)
}

// Exporter implements the package's task.
type Exporter struct {
	tables     routes.ExportTables
	export     Table
	unassigned Table
	repairs    Repairs

	mu   sync.Mutex
	last struct{ export, unassigned []dataplane.Route } // of each table after the last success; guarded by mu
}

// New returns an exporter to two tables.
func New(tables routes.ExportTables, export, unassigned Table, repairs Repairs) *Exporter {
	return &Exporter{tables: tables, export: export, unassigned: unassigned, repairs: repairs}
}

// Remember takes the blocks that an earlier process exported, so that their missing routes
// count as repaired.
func (e *Exporter) Remember(blocks []routes.HeldBlock) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last.export, e.last.unassigned = routes.Exports(blocks, e.tables)
}

// Export announces exactly these blocks. A block's unreachable route is there
// before it is announced and goes after it was withdrawn, so that packets to
// addresses that no pod has never loop; also when an earlier process was interrupted
// in between.
func (e *Exporter) Export(ctx context.Context, blocks []routes.HeldBlock) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	export, unassigned := routes.Exports(blocks, e.tables)
	res, err := e.unassigned.Ensure(ctx, unassigned)
	e.repairs.Done(ctx, UnreachableRoute, routes.Restored(res.Added+res.Replaced, e.last.unassigned, unassigned))
	if err != nil {
		return fmt.Errorf("guard unassigned addresses: %w", err)
	}
	res, err = e.export.Sync(ctx, export)
	e.repairs.Done(ctx, BlockRoute, routes.Restored(res.Added+res.Replaced, e.last.export, export))
	if err != nil {
		return fmt.Errorf("export blocks: %w", err)
	}
	if res.Changed() {
		klog.FromContext(ctx).Info("Exported blocks changed", "added", res.Added, "replaced", res.Replaced,
			"withdrawn", res.Deleted, "routes", len(export))
	}
	if _, err := e.unassigned.Sync(ctx, unassigned); err != nil {
		return fmt.Errorf("guard unassigned addresses: %w", err)
	}
	e.last.export, e.last.unassigned = export, unassigned
	return nil
}

// Look compares the routes of blocks with those that Export makes of these, for people. Nothing is changed.
func (e *Exporter) Look(ctx context.Context, blocks []routes.HeldBlock) (all []inspection.Comparison) {
	export, unassigned := routes.Exports(blocks, e.tables)
	for _, t := range []struct {
		name  string
		table Table
		want  []dataplane.Route
	}{{"exported route", e.export, export}, {"unreachable route", e.unassigned, unassigned}} {
		missing, err := t.table.Missing(ctx, t.want)
		for _, r := range t.want {
			c := inspection.Comparison{Topic: inspection.Blocks, Object: t.name + " of " + r.Dst.String(), Want: r.String()}
			switch {
			case err != nil:
				c.Unknown = err.Error()
			case !slices.Contains(missing, r):
				c.Have, c.OK = r.String(), true
			}
			all = append(all, c)
		}
	}
	return all
}

// Lost says whether changes in the kernel concern the tables: one has lost a route, lo is another, or notifications
// were lost.
func (e *Exporter) Lost(_ context.Context, changes []rtnl.Change) (lost bool) {
	for _, c := range changes {
		switch c.Kind {
		case rtnl.Unknown:
			lost = true
		case rtnl.LinkChanged:
			lost = lost || c.Link == e.tables.Loopback
		case rtnl.RouteLost:
			switch {
			case c.Route.Table != e.tables.Export && c.Route.Table != e.tables.Unassigned:
				continue
			case c.Route.Type == dataplane.Unreachable || c.Route.Table == e.tables.Unassigned:
				e.repairs.Saw(UnreachableRoute, c.String())
			default:
				e.repairs.Saw(BlockRoute, c.String())
			}
			lost = true
		}
	}
	return lost
}

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
	"github.com/coil-net/coil/pkg/plan"
)

// Table makes the routes of one table what is wanted; see package kernel/route.
type Table interface {
	Sync(ctx context.Context, want []dataplane.Route) (dataplane.Result, error)
	// Ensure deletes nothing.
	Ensure(ctx context.Context, want []dataplane.Route) (dataplane.Result, error)
}

// Repaired counts routes that were there after the last Export and were not any more.
type Repaired struct{ Export, Unassigned int }

// Exporter implements the package's task.
type Exporter struct {
	tables     plan.ExportTables
	export     Table
	unassigned Table

	mu   sync.Mutex
	last last // guarded by mu
}

// last is what there was in each table after the last success.
type last struct{ export, unassigned []dataplane.Route }

// New returns an exporter to two tables.
func New(tables plan.ExportTables, export, unassigned Table) *Exporter {
	return &Exporter{tables: tables, export: export, unassigned: unassigned}
}

// Remember says what an earlier process exported, so that what is missing of it counts as
// repaired.
func (e *Exporter) Remember(blocks []plan.HeldBlock) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last.export, e.last.unassigned = plan.Exports(blocks, e.tables)
}

// Export announces exactly these blocks. A block's unreachable route is there
// before it is announced and goes after it was withdrawn, so that packets to
// addresses that no pod has never loop; also when an earlier process was interrupted
// in between.
func (e *Exporter) Export(ctx context.Context, blocks []plan.HeldBlock) (Repaired, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	export, unassigned := plan.Exports(blocks, e.tables)
	var repaired Repaired
	var err error
	if repaired.Unassigned, err = ensure(ctx, e.unassigned, e.last.unassigned, unassigned); err != nil {
		return repaired, fmt.Errorf("guard unassigned addresses: %w", err)
	}
	if repaired.Export, err = restore(ctx, e.export, e.last.export, export); err != nil {
		return repaired, fmt.Errorf("export blocks: %w", err)
	}
	res, err := e.export.Sync(ctx, export)
	if err != nil {
		return repaired, fmt.Errorf("export blocks: %w", err)
	}
	if res.Changed() {
		klog.FromContext(ctx).Info("Exported blocks changed", "added", res.Added, "replaced", res.Replaced,
			"withdrawn", res.Deleted, "routes", len(export))
	}
	if _, err := e.unassigned.Sync(ctx, unassigned); err != nil {
		return repaired, fmt.Errorf("guard unassigned addresses: %w", err)
	}
	e.last = last{export, unassigned}
	return repaired, nil
}

// ensure makes the wanted routes of a table, and returns how many of those that there were
// before had to be made again.
func ensure(ctx context.Context, t Table, before, want []dataplane.Route) (int, error) {
	restored, err := restore(ctx, t, before, want)
	if err == nil {
		_, err = t.Ensure(ctx, want)
	}
	return restored, err
}

// restore makes those of the wanted routes again that there were before, and returns how
// many weren't there.
func restore(ctx context.Context, t Table, before, want []dataplane.Route) (int, error) {
	var both []dataplane.Route
	for _, r := range want {
		if _, ok := slices.BinarySearchFunc(before, r, dataplane.CompareRoutes); ok {
			both = append(both, r)
		}
	}
	if len(both) == 0 {
		return 0, nil
	}
	res, err := t.Ensure(ctx, both)
	return res.Added + res.Replaced, err
}

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
	"github.com/coil-net/coil/pkg/plan/routes"
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
	tables     routes.ExportTables
	export     Table
	unassigned Table

	mu   sync.Mutex
	last last // guarded by mu
}

// last is what there was in each table after the last success.
type last struct{ export, unassigned []dataplane.Route }

// New returns an exporter to two tables.
func New(tables routes.ExportTables, export, unassigned Table) *Exporter {
	return &Exporter{tables: tables, export: export, unassigned: unassigned}
}

// Remember says what an earlier process exported, so that what is missing of it counts as
// repaired.
func (e *Exporter) Remember(blocks []routes.HeldBlock) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last.export, e.last.unassigned = routes.Exports(blocks, e.tables)
}

// Export announces exactly these blocks. A block's unreachable route is there
// before it is announced and goes after it was withdrawn, so that packets to
// addresses that no pod has never loop; also when an earlier process was interrupted
// in between.
func (e *Exporter) Export(ctx context.Context, blocks []routes.HeldBlock) (Repaired, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	export, unassigned := routes.Exports(blocks, e.tables)
	var repaired Repaired
	res, err := e.unassigned.Ensure(ctx, unassigned)
	repaired.Unassigned = again(res, e.last.unassigned, unassigned)
	if err != nil {
		return repaired, fmt.Errorf("guard unassigned addresses: %w", err)
	}
	res, err = e.export.Sync(ctx, export)
	repaired.Export = again(res, e.last.export, export)
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

// again is how many of the routes that were made there had been before.
func again(made dataplane.Result, before, want []dataplane.Route) int {
	n := made.Added + made.Replaced
	for _, r := range want {
		if _, ok := slices.BinarySearchFunc(before, r, dataplane.CompareRoutes); !ok {
			n--
		}
	}
	return max(n, 0)
}

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
}

// Exporter implements the package's task.
type Exporter struct {
	tables     plan.ExportTables
	export     Table
	unassigned Table

	mu   sync.Mutex
	last []dataplane.Route // in the unassigned table, after the last success
}

// New returns an exporter to two tables.
func New(tables plan.ExportTables, export, unassigned Table) *Exporter {
	return &Exporter{tables: tables, export: export, unassigned: unassigned}
}

// Export announces exactly these blocks. A block's unreachable route is there
// before it is announced and goes after it was withdrawn, so that packets to
// addresses that no pod has never loop.
func (e *Exporter) Export(ctx context.Context, blocks []plan.HeldBlock) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	export, unassigned := plan.Exports(blocks, e.tables)
	both := slices.Concat(unassigned, e.last)
	slices.SortFunc(both, dataplane.CompareRoutes)
	if _, err := e.unassigned.Sync(ctx, slices.Compact(both)); err != nil {
		return fmt.Errorf("guard unassigned addresses: %w", err)
	}
	res, err := e.export.Sync(ctx, export)
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
	e.last = unassigned
	return nil
}

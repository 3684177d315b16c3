package coilctl

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/coil-net/coil/pkg/plan/inventory"
)

// row is an object as a command lists it.
type row struct {
	namespace string
	// names are those by which it can be asked for; the first one is its own.
	names []string
	// value is for JSON and YAML, and cells for tables.
	value any
	cells []string
}

// list is a command that lists objects.
type list struct {
	*tool
	// name is that of the command. In messages the objects are of this kind, and several of them what.
	name, kind, what string
	short, long      string
	example          string
	// kinds are read.
	kinds []source
	// columns are those of tables. One that begins with + is in wide tables only.
	columns []string
	// rows are all that there are, in their order.
	rows func(inventory.Objects) []row
	// names completes arguments; nil if there is nothing to complete.
	names cobra.CompletionFunc

	watch bool
	asked []string
}

// lists returns the commands that list objects.
func (t *tool) lists() []*cobra.Command {
	return []*cobra.Command{t.nodes(), t.blocks(), t.addresses(), t.egresses(), t.services()}
}

// command returns the command of a list.
func (l *list) command() *cobra.Command {
	c := &cobra.Command{
		Use: l.name + " [NAME...]", Short: l.short, Example: l.example, ValidArgsFunction: l.names,
		Long: l.short + ". " + l.long + "\n\nRights: " + rights(l.kinds) + "; with --watch, watch them, too.",
		RunE: func(c *cobra.Command, names []string) error {
			l.asked = names
			return l.run(c.Context())
		},
	}
	c.Flags().BoolVarP(&l.watch, "watch", "w", false, "after listing, show changes as they happen, until interrupted")
	return c
}

func (l *list) run(ctx context.Context) error {
	if l.watch {
		return l.follow(ctx, l.kinds, l.changes())
	}
	all, err := l.read(ctx, l.kinds)
	if err != nil {
		return err
	}
	rows, missing := l.choose(l.rows(all))
	if len(missing) > 0 {
		return l.missing(missing)
	}
	return l.show(rows)
}

// missing is the error about names that nothing has.
func (l *list) missing(names []string) error {
	return fmt.Errorf("there is no %s %s", l.kind, strings.Join(names, ", nor "))
}

// choose returns the rows that are asked for, and the names of which there is none.
func (l *list) choose(all []row) (chosen []row, missing []string) {
	if n := *l.flags.Namespace; n != "" {
		all = slices.DeleteFunc(all, func(r row) bool { return r.namespace != n && r.namespace != "" })
	}
	if len(l.asked) == 0 {
		return all, nil
	}
	chosen = slices.DeleteFunc(slices.Clone(all), func(r row) bool {
		return !slices.ContainsFunc(l.asked, func(name string) bool { return slices.Contains(r.names, name) })
	})
	for _, name := range l.asked {
		if !slices.ContainsFunc(chosen, func(r row) bool { return slices.Contains(r.names, name) }) {
			missing = append(missing, name)
		}
	}
	return chosen, missing
}

// show prints rows.
func (l *list) show(rows []row) error {
	if len(rows) == 0 && l.format == formatTable {
		printf(l.ErrOut, "no %s found\n", l.what)
		return nil
	}
	values, cells := make([]any, 0, len(rows)), make([][]string, 0, len(rows))
	for _, r := range rows {
		values, cells = append(values, r.value), append(cells, l.cells(r))
	}
	return l.print(values, l.header(), cells)
}

// wideMark begins the names of columns of wide tables.
const wideMark = "+"

// header has the names of the columns.
func (l *list) header() (names []string) {
	for _, c := range l.columns {
		if name, wide := strings.CutPrefix(c, wideMark); !wide || l.wide {
			names = append(names, name)
		}
	}
	return names
}

// cells has those of the columns.
func (l *list) cells(r row) (cells []string) {
	for i, c := range l.columns {
		if l.wide || !strings.HasPrefix(c, wideMark) {
			cells = append(cells, r.cells[i])
		}
	}
	return cells
}

// truth is written as in conditions.
func truth(b bool) string {
	if b {
		return string(metav1.ConditionTrue)
	}
	return string(metav1.ConditionFalse)
}

// age is for how long something has been so; empty if that isn't known.
func age(since metav1.Time, now time.Time) string {
	if since.IsZero() {
		return ""
	}
	return duration.HumanDuration(now.Sub(since.Time))
}

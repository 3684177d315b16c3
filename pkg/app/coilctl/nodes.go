package coilctl

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan/inventory"
)

// nodes returns the command that lists nodes.
func (t *tool) nodes() *cobra.Command {
	l := &list{
		tool: t, name: "nodes", kind: "node", what: "nodes", kinds: []source{readNodes, readCoilds, readBlocks}, names: t.completeNames(resourceNodes),
		short: "List nodes, with what they have of pools",
		long: "READY is what kubelet says of the node, and COILD whether a coild on it is ready. ADDRESSES are those that pods have, of those of the node's AddressBlocks. " +
			"A name without a Node is that of a deleted one whose AddressBlocks are still there.",
		example: "  coilctl nodes\n  coilctl nodes worker-1 -o wide\n  coilctl nodes --watch",
		columns: []string{"NAME", "READY", "COILD", "BLOCKS", "ADDRESSES", "+COOLING", "FLOATING", "+INTERNAL-IP"},
	}
	l.rows = func(o inventory.Objects) (rows []row) {
		for _, n := range inventory.Nodes(o) {
			rows = append(rows, row{names: []string{n.Name}, value: n, cells: []string{
				n.Name, truth(n.Ready), truth(n.Coild), fmt.Sprint(n.Blocks), fmt.Sprintf("%d/%d", n.Allocated, n.Addresses), fmt.Sprint(n.Cooling), fmt.Sprint(n.Floating),
				strings.Join(n.InternalIPs, ","),
			}})
		}
		return rows
	}
	return l.command()
}

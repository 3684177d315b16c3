package coilctl

import (
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan/inventory"
)

// blocks returns the command that lists AddressBlocks.
func (t *tool) blocks() *cobra.Command {
	var pools, nodes []string
	l := &list{
		tool: t, name: "blocks", kind: "AddressBlock", what: "AddressBlocks", kinds: []source{readHeld}, names: t.completeNames(resourceBlocks),
		short: "List AddressBlocks that nodes hold, with their use",
		long: "USED are the addresses that pods have, of those of the block, and COOLING those that were freed and aren't reused yet. CHANGED is when the object was last written. " +
			"coild tells the use of a block at most every 30 seconds. Floating addresses are in the list of the command addresses.",
		example: "  coilctl blocks\n  coilctl blocks --pool=default --node=worker-1\n  coilctl blocks default-7 -o wide",
		columns: []string{"NAME", "NODE", "POOL", "+INDEX", "IPV4", "IPV6", "USED", "COOLING", "+RESERVED", "CHANGED"},
	}
	l.rows = func(o inventory.Objects) (rows []row) {
		for _, b := range inventory.Blocks(o) {
			if len(pools) > 0 && !slices.Contains(pools, b.Pool) || len(nodes) > 0 && !slices.Contains(nodes, b.Node) {
				continue
			}
			rows = append(rows, row{names: []string{b.Name}, value: b, cells: []string{
				b.Name, b.Node, b.Pool, fmt.Sprint(b.Index), b.IPv4, b.IPv6, fmt.Sprintf("%d/%d", b.Allocated, b.Addresses), fmt.Sprint(b.Cooling), truth(b.Reserved), age(b.Changed, o.Now),
			}})
		}
		return rows
	}
	c := l.command()
	c.Flags().StringSliceVar(&pools, "pool", nil, "only blocks of these AddressPools")
	c.Flags().StringSliceVar(&nodes, "node", nil, "only blocks that these nodes hold")
	complete(c, "pool", t.completeNames(resourcePools))
	complete(c, "node", t.completeNames(resourceNodes))
	c.AddCommand(t.release())
	return c
}

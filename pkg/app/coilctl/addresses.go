package coilctl

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan/inventory"
)

// addresses returns the command that lists floating addresses.
func (t *tool) addresses() *cobra.Command {
	l := &list{
		tool: t, name: "addresses", kind: "floating address", what: "floating addresses", kinds: []source{readFloating}, names: t.completeNames(resourceFloating),
		short: "List floating addresses, their owners and holders",
		long: "STATE is \"held\", \"no holder\" if none of the nodes that may have the address has it, \"on no node\" as those of gateways, and \"cooling down\" if it was released and " +
			"is given to nobody yet. NAME is an address, or the name of its AddressBlock.",
		example: "  coilctl addresses\n  coilctl addresses 192.0.2.7\n  coilctl addresses --watch",
		columns: []string{"ADDRESS", "+BLOCK", "+POOL", "OWNER", "STATE", "HOLDER", "SINCE", "PORTS", "ATTENTION"},
	}
	l.rows = func(o inventory.Objects) (rows []row) {
		for _, a := range inventory.Addresses(o) {
			since := ""
			if a.Since != nil {
				since = age(*a.Since, o.Now)
			}
			rows = append(rows, row{names: slices.Concat([]string{a.Block, a.Address}, strings.Split(a.Address, ",")), value: a, cells: []string{
				a.Address, a.Block, a.Pool, a.Owner, a.State, a.Holder, since, strings.Join(a.Ports, ", "), strings.Join(a.Attention, "; "),
			}})
		}
		return rows
	}
	return l.command()
}

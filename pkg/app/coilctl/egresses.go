package coilctl

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan/inventory"
)

// egresses returns the command that lists Egresses.
func (t *tool) egresses() *cobra.Command {
	l := &list{
		tool: t, name: "egresses", kind: "Egress", what: "Egresses", kinds: []source{readEgresses, readPolicies, readCluster}, names: t.completeNames(resourceEgresses),
		short: "List Egresses, their routers, clients and policies",
		long: "REPLICAS says how many routers there are, of how many the Egress wants, and POLICIES how many EgressPolicies and EgressClusterPolicies lead to it. Egresses of all namespaces are listed, or those of " +
			"--namespace.",
		example: "  coilctl egresses\n  coilctl egresses --namespace=internet nat -o wide\n  coilctl egresses --watch",
		columns: []string{"NAMESPACE", "NAME", "REPLICAS", "AVAILABLE", "CLIENTS", "ADDRESSES", "POLICIES", "+PEERING", "+DESTINATIONS", "AGE"},
	}
	l.rows = func(o inventory.Objects) (rows []row) {
		for _, e := range inventory.Egresses(o) {
			rows = append(rows, row{namespace: e.Namespace, names: []string{e.Name}, value: e, cells: []string{
				e.Namespace, e.Name, fmt.Sprintf("%d/%d", e.Routers, e.Wanted), truth(e.Available), fmt.Sprint(e.Clients), fmt.Sprint(e.Addresses), fmt.Sprint(e.Policies), e.Peering,
				strings.Join(e.Destinations, ","), age(e.Created, o.Now),
			}})
		}
		return rows
	}
	return l.command()
}

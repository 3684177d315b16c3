package coilctl

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/coil-net/coil/pkg/plan/inventory"
)

// services returns the command that lists Services.
func (t *tool) services() *cobra.Command {
	l := &list{
		tool: t, name: "services", kind: "Service of Coil", what: "Services of the type LoadBalancer that Coil serves", kinds: []source{readServices}, names: t.completeNames(resourceServices),
		short: "List Services of the type LoadBalancer that Coil serves",
		long: "ADDRESSES are those that the Service tells. STATUS and MESSAGE are those of the first condition that isn't as it should be, else of the last one. " +
			"Services of all namespaces are listed, or those of --namespace.",
		example: "  coilctl services\n  coilctl services --namespace=shop web -o wide\n  coilctl services --watch",
		columns: []string{"NAMESPACE", "NAME", "ADDRESSES", "+PORTS", "STATUS", "AGE", "MESSAGE"},
	}
	l.rows = func(o inventory.Objects) (rows []row) {
		for _, s := range inventory.Services(o) {
			rows = append(rows, row{namespace: s.Namespace, names: []string{s.Name}, value: s, cells: []string{
				s.Namespace, s.Name, strings.Join(s.Addresses, ","), strings.Join(s.Ports, ","), s.Reason, age(s.Created, o.Now), s.Message,
			}})
		}
		return rows
	}
	return l.command()
}

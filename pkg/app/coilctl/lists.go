package coilctl

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/coil-net/coil/pkg/plan/inventory"
)

// table is what a command prints: values as JSON and YAML, or rows.
type table struct {
	value  any
	header []string
	rows   [][]string
}

// lists returns the commands that list objects.
func (t *tool) lists() []*cobra.Command {
	return []*cobra.Command{
		t.list("nodes", "List nodes, with what they have of pools", nodesTable),
		t.list("addresses", "List floating addresses, their owners and holders", addressesTable),
		t.list("egresses", "List Egresses, their routers, clients and policies", egressesTable),
		t.list("services", "List Services of the type LoadBalancer that Coil serves", servicesTable),
	}
}

// list returns a command that reads a cluster's objects, and prints a table of them.
func (t *tool) list(name, short string, make func(inventory.Objects) table) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		Long: short + ".\n\nIt needs the right to list nodes, pods and services, and all kinds of coil.cybozu.com.",
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := t.read(c.Context(), everything)
			if err != nil {
				return err
			}
			made := make(all)
			return t.print(made.value, made.header, made.rows)
		},
	}
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// age is for how long something has been so; empty if that isn't known.
func age(since *metav1.Time, now time.Time) string {
	if since == nil {
		return ""
	}
	return duration.HumanDuration(now.Sub(since.Time))
}

func nodesTable(o inventory.Objects) table {
	all := inventory.Nodes(o)
	t := table{value: all, header: []string{"NODE", "READY", "COILD", "BLOCKS", "ADDRESSES", "FLOATING"}}
	for _, n := range all {
		t.rows = append(t.rows, []string{n.Name, yes(n.Ready), yes(n.Coild), fmt.Sprint(n.Blocks), fmt.Sprintf("%d/%d", n.Allocated, n.Addresses), fmt.Sprint(n.Floating)})
	}
	return t
}

func addressesTable(o inventory.Objects) table {
	all := inventory.Addresses(o)
	t := table{value: all, header: []string{"ADDRESS", "OWNER", "STATE", "HOLDER", "SINCE", "PORTS", "ATTENTION"}}
	for _, a := range all {
		t.rows = append(t.rows, []string{a.Address, a.Owner, a.State, a.Holder, age(a.Since, o.Now), strings.Join(a.Ports, ", "), strings.Join(a.Attention, "; ")})
	}
	return t
}

func egressesTable(o inventory.Objects) table {
	all := inventory.Egresses(o)
	t := table{value: all, header: []string{"NAMESPACE", "NAME", "PEERING", "ROUTERS", "CLIENTS", "ADDRESSES", "POLICIES", "AVAILABLE"}}
	for _, e := range all {
		t.rows = append(t.rows, []string{
			e.Namespace, e.Name, e.Peering, fmt.Sprintf("%d/%d", e.Routers, e.Wanted), fmt.Sprint(e.Clients), fmt.Sprint(e.Addresses), fmt.Sprint(e.Policies), yes(e.Available),
		})
	}
	return t
}

func servicesTable(o inventory.Objects) table {
	all := inventory.Services(o)
	t := table{value: all, header: []string{"NAMESPACE", "NAME", "ADDRESSES", "STATUS", "MESSAGE"}}
	for _, s := range all {
		t.rows = append(t.rows, []string{s.Namespace, s.Name, strings.Join(s.Addresses, ","), s.Reason, s.Message})
	}
	return t
}

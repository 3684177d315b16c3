// Package routes derives the routes to blocks: those that announce a node's own, and those to the blocks of other
// nodes.
//
// It must not know how blocks are held.
package routes

import (
	"cmp"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// HeldBlock is a block that the node holds.
type HeldBlock struct {
	Name string
	ipam.Block
	// Reserved blocks are exported; their addresses may be in use by pods that
	// Coil doesn't know.
	Reserved bool
}

// ExportTables are the numbers under which block routes are made.
type ExportTables struct {
	// Export is read by routing daemons.
	Export int
	// Unassigned catches addresses that no pod has.
	Unassigned int
	Protocol   int
	// Loopback is the interface index of lo.
	Loopback int
}

// Exports returns the routes that announce the blocks: one in the export table for
// each prefix, and one that makes the rest of the prefix unreachable, except for
// reserved blocks.
func Exports(blocks []HeldBlock, t ExportTables) (export, unassigned []dataplane.Route) {
	for _, b := range blocks {
		for _, p := range b.Prefixes() {
			export = append(export, dataplane.Route{
				Table: t.Export, Dst: p, Link: t.Loopback, Protocol: t.Protocol,
			})
			if !b.Reserved {
				unassigned = append(unassigned, dataplane.Route{
					Table: t.Unassigned, Dst: p, Type: dataplane.Unreachable, Protocol: t.Protocol,
				})
			}
		}
	}
	slices.SortFunc(export, dataplane.CompareRoutes)
	slices.SortFunc(unassigned, dataplane.CompareRoutes)
	return export, unassigned
}

// InternalIPs returns the node's InternalIP of each family, the first of each.
func InternalIPs(n *corev1.Node) ipam.Address {
	return ipam.AddressOf(plan.NodeAddrs(n, corev1.NodeInternalIP)...)
}

// Peers returns the routes to the blocks of all nodes but self, each by the
// InternalIP of the node that holds it. A block whose node isn't known, has no
// address of the family, or that can't be understood has no route; its name is
// in skipped.
func Peers(self string, nodes []*corev1.Node, blocks []*v2.AddressBlock, table, protocol int) (routes []dataplane.Route, skipped []string) {
	addrs := make(map[string]ipam.Address, len(nodes))
	for _, n := range nodes {
		addrs[n.Name] = InternalIPs(n)
	}
	for _, b := range blocks {
		holder := b.Labels[v2.LabelNode]
		if holder == self || b.Labels[v2.LabelFloating] == v2.FloatingValue {
			continue
		}
		block, err := ipam.ParseBlock(b.IPv4, b.IPv6)
		addr, known := addrs[holder]
		if err != nil || !known {
			skipped = append(skipped, b.Name)
			continue
		}
		missing := false
		for _, p := range block.Prefixes() {
			gw := addr.IPv6
			if p.Addr().Is4() {
				gw = addr.IPv4
			}
			if !gw.IsValid() {
				missing = true
				continue
			}
			routes = append(routes, dataplane.Route{Table: table, Dst: p, Gateway: gw, Protocol: protocol})
		}
		if missing {
			skipped = append(skipped, b.Name)
		}
	}
	slices.SortFunc(routes, func(a, b dataplane.Route) int {
		return cmp.Or(dataplane.CompareRoutes(a, b), a.Gateway.Compare(b.Gateway))
	})
	slices.Sort(skipped)
	// Two holders of one prefix can't both have the route: the first by address has it.
	routes = slices.CompactFunc(routes, func(a, b dataplane.Route) bool { return a.Dst == b.Dst })
	return routes, skipped
}

// Restored is how many of the routes that a sync made had been wanted before, so that they were lost since.
func Restored(made int, before, want []dataplane.Route) int {
	known := make(map[netip.Prefix]bool, len(before))
	for _, r := range before {
		known[r.Dst] = true
	}
	for _, r := range want {
		if !known[r.Dst] {
			made--
		}
	}
	return max(made, 0)
}

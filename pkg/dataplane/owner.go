// Package dataplane has the values that describe what Coil wants in the kernel:
// comparable, built on netip, printed as iproute2 prints them.
//
// It owns the numbers and names by which Coil recognises its own objects. It
// must not know how a value reaches the kernel, nor where it comes from.
package dataplane

// Every number and name that Coil reserves on a host. An object without one of
// these marks is somebody else's and is never touched.
const (
	// ProtocolNode marks routes and rules of coild (rtm_protocol, FRA_PROTOCOL).
	ProtocolNode = 30
	// ProtocolRouter marks routes of coil-router.
	ProtocolRouter = 31
	// ProtocolFloating marks coild's routes of floating addresses. Those of pods and blocks are in the same tables, and are synced by others.
	ProtocolFloating = 32
	// ProtocolTransit marks coild's routes of transit addresses (see TransitAddr), in the table of pods as well.
	ProtocolTransit = 33

	// TableMain is the kernel's main table (RT_TABLE_MAIN).
	TableMain = 254
	// TablePods has a route to each pod of the node.
	TablePods = 116
	// TableExport has a route to each block of the node, for routing daemons.
	TableExport = 119
	// TableUnassigned makes the addresses of blocks that no pod has unreachable,
	// so that they don't loop between the node and its router.
	TableUnassigned = 120

	// PriorityPods is the priority of the rule to TablePods; the rule to
	// TableUnassigned follows it.
	PriorityPods = 2000

	// LinkGroup is the group of host-side veths ("coil" in ASCII).
	LinkGroup = 0x636f696c
	// LinkGroupUnguarded is that of pods that may send from any address.
	LinkGroupUnguarded = LinkGroup + 1
	// LinkGroupRemoved is the first of the 2^28 groups in which links are removed together. A program
	// chooses one of them at random, so that it has no other members.
	LinkGroupRemoved = 0x70000000
	// AliasPrefix starts the alias of host-side veths: COIL:<pool>:<containerID>:<ifname>.
	AliasPrefix = "COIL:"
)

// OfPods says whether a group is that of host-side veths.
func OfPods(group uint32) bool { return group == LinkGroup || group == LinkGroupUnguarded }

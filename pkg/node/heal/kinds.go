package heal

// Kinds of what is repaired.
const (
	PodRoute         = "pod_route"
	Rule             = "rule"
	BlockRoute       = "block_route"
	UnreachableRoute = "unreachable_route"
	Link             = "link"
	LinkAddress      = "link_address"
	Sysctl           = "sysctl"
	SourceGuard      = "source_guard"
	EgressRoute      = "egress_route"
	EgressRule       = "egress_rule"
	EgressTunnel     = "egress_tunnel"
	EgressNexthop    = "egress_nexthop"
	EgressSetting    = "egress_setting"
)

// Kinds are all of them.
func Kinds() []string {
	return []string{PodRoute, Rule, BlockRoute, UnreachableRoute, Link, LinkAddress, Sysctl, SourceGuard, EgressRoute, EgressRule, EgressTunnel, EgressNexthop, EgressSetting}
}

// Advice says who the likely culprit is when objects of a kind are destroyed again and
// again, and what to do.
func Advice(kind string) string {
	const networkd = "systemd-networkd deletes what it doesn't know unless a file in /etc/systemd/networkd.conf.d/ " +
		"says, below [Network], "
	switch kind {
	case Rule:
		return networkd + "ManageForeignRoutingPolicyRules=no"
	case PodRoute:
		return networkd + "ManageForeignRoutes=no. Felix of Calico deletes routes of links that it takes for its own " +
			"unless FELIX_REMOVEEXTERNALROUTES=false. The kernel deletes IPv4 routes whose source is the node's address when that is removed"
	case BlockRoute, UnreachableRoute:
		return networkd + "ManageForeignRoutes=no. A routing daemon must only import these tables"
	case Link, LinkAddress:
		return "a network manager must leave the pods' links alone: Unmanaged=yes below [Link] in a .network file " +
			"that matches veth*, or unmanaged-devices of NetworkManager"
	case Sysctl:
		return "look for these parameters in /etc/sysctl.d, /usr/lib/sysctl.d and in what manages the node's configuration"
	case SourceGuard:
		return "a program flushes all of nftables: nftables.service does, when it starts again, if /etc/nftables.conf begins with " +
			"\"flush ruleset\"; let that file flush its own tables"
	case EgressRoute, EgressRule, EgressTunnel, EgressNexthop, EgressSetting:
		return "a program changes the network of pods that use an Egress: in their containers, or from beside, as service meshes do"
	}
	return ""
}

package apiserver

import (
	"fmt"
	"strings"
)

// destinations returns the YAML of an Egress with n destinations.
func destinations(n int) string {
	var b strings.Builder
	b.WriteString("spec: {destinations: [")
	for i := range n {
		fmt.Fprintf(&b, `"fd00:%x::/112", `, i+1)
	}
	return b.String() + "]}"
}

// egressAttempts are attempts to create or change an Egress.
func egressAttempts() []attempt {
	const (
		old     = `spec: {destinations: [192.0.2.0/24]}`
		notCIDR = "must be a subnet in CIDR notation"
		notZero = "host bits must be zero"
		pods    = "must be a number of pods or a percentage"
		service = "is the name of a Service"
	)
	with := func(more string) string { return `spec: {destinations: [0.0.0.0/0, "::/0"], ` + more + `}` }
	addresses := func(more string) string { return with(`peering: Direct, addresses: {` + more + `}`) }
	return []attempt{
		{name: "a destination", new: old},
		{name: "both families", new: with(``)},
		{name: "as many destinations as there may be", new: destinations(256)},
		{name: "the default", new: with(`default: true`)},
		{name: "no router", new: with(`replicas: 0`)},
		{name: "a strategy", new: with(`strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1, maxSurge: "25%"}}`)},
		{name: "a template without containers", new: with(`template: {metadata: {labels: {a: b}}, spec: {priorityClassName: high}}`)},
		{name: "a template with a container", new: with(`template: {spec: {containers: [{name: egress, resources: {limits: {memory: 400Mi}}}]}}`)},
		{name: "no session affinity", new: with(`sessionAffinity: None`)},
		{name: "a session affinity of an hour", new: with(`sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 3600}}`)},
		{name: "a number of available pods", new: with(`podDisruptionBudget: {minAvailable: 1}`)},
		{name: "a share of unavailable pods", new: with(`podDisruptionBudget: {maxUnavailable: "50%"}`)},
		{name: "all pods", new: with(`podDisruptionBudget: {maxUnavailable: "100%"}`)},
		{name: "chosen namespaces", new: with(`allowedNamespaces: {matchLabels: {team: a}, matchExpressions: [{key: stage, operator: In, values: [b]}]}`)},
		{name: "all namespaces", new: with(`allowedNamespaces: {}`)},
		{name: "only what clients open", new: with(`originatingOnly: true`)},
		{name: "no limit of connections", new: with(`maxConnectionsPerClient: 0`)},
		{name: "some addresses for clients", new: addresses(`use: Client, pool: partners, count: 4`)},
		{name: "listed addresses, packed", new: addresses(`use: Client, pool: partners, list: [198.51.100.10, 198.51.100.20-198.51.100.29, "2001:db8::/126"], placement: {strategy: Pack, maxPerNode: 3}`)},
		{name: "connections are copied all the time", new: addresses(`use: Client, pool: partners, count: 1, standby: true`)},
		{name: "or not, for addresses of routers", new: addresses(`use: Router, pool: partners, count: 1, standby: false`)},
		{name: "any number of addresses for each node, shared ones", new: addresses(`use: Client, pool: partners, count: 0, shared: [198.51.100.10, "2001:db8::7"], assignment: {strategy: LeastUsed, maxPolicies: 3, whenFull: Refuse}`)},
		{name: "the largest CIDRs", new: addresses(`use: Client, pool: partners, list: [198.51.100.0/22, "2001:db8::/118"]`)},
		{name: "another pool", old: addresses(`use: Client, pool: partners, count: 4`), new: addresses(`use: Client, pool: others, count: 4`)},
		{name: "the addresses of nodes", new: with(`addresses: {use: Node}`)},
		{name: "the addresses of nodes, of routers that clients choose", new: addresses(`use: Node`)},
		{name: "the addresses of nodes in place of others", old: addresses(`use: Client, pool: partners, count: 4`), new: addresses(`use: Node`)},
		{name: "no addresses any more", old: addresses(`use: Client, pool: partners, count: 4`), new: with(``)},
		{name: "choose namespaces later", old: old, new: with(`allowedNamespaces: {matchLabels: {team: a}}, originatingOnly: true`)},
		{name: "the longest name", object: strings.Repeat("e", 63), new: old},
		{name: "replace the destinations", old: old, new: `spec: {destinations: [198.51.100.0/24, "2001:db8::/32"]}`},

		{name: "too long a name", object: strings.Repeat("e", 64), new: old, field: "metadata.name", reason: service},
		{name: "a name with a dot", object: "a.b", new: old, field: "metadata.name", reason: service},
		{name: "a name that begins with a digit", object: "1a", new: old, field: "metadata.name", reason: service},
		{name: "no spec", new: `{}`, field: "spec", reason: "Required value"},
		{name: "no destinations", new: `spec: {replicas: 1}`, field: "spec.destinations", reason: "Required value"},
		{name: "an empty list of destinations", new: `spec: {destinations: []}`, field: "spec.destinations", reason: "should have at least 1 items"},
		{name: "too many destinations", new: destinations(257), field: "spec.destinations", reason: "must have at most 256 items"},
		{name: "a name as destination", new: `spec: {destinations: [10.0.0.0/8, example.com]}`, field: "spec.destinations[1]", reason: notCIDR},
		{name: "an empty destination", new: `spec: {destinations: [""]}`, field: "spec.destinations[0]", reason: notCIDR},
		{name: "an address as destination", new: `spec: {destinations: [192.0.2.1]}`, field: "spec.destinations[0]", reason: notCIDR},
		{name: "a length beyond the family", new: `spec: {destinations: [192.0.2.0/33]}`, field: "spec.destinations[0]", reason: notCIDR},
		{name: "IPv4 mapped into IPv6", new: `spec: {destinations: ["::ffff:192.0.2.0/120"]}`, field: "spec.destinations[0]", reason: notCIDR},
		{name: "IPv4 host bits", new: `spec: {destinations: [10.0.0.0/8, 192.0.2.1/24]}`, field: "spec.destinations[1]", reason: notZero},
		{name: "IPv6 host bits", new: `spec: {destinations: ["2001:db8::1/32"]}`, field: "spec.destinations[0]", reason: notZero},
		{name: "a negative number of routers", new: with(`replicas: -1`), field: "spec.replicas", reason: "greater than or equal to 0", also: ".spec.replicas"},
		{name: "minAvailable and maxUnavailable", new: with(`podDisruptionBudget: {minAvailable: 1, maxUnavailable: 1}`),
			field: "spec.podDisruptionBudget", reason: "minAvailable and maxUnavailable exclude each other"},
		{name: "a negative minAvailable", new: with(`podDisruptionBudget: {minAvailable: -1}`), field: "spec.podDisruptionBudget.minAvailable", reason: pods},
		{name: "addresses of clients that send to the Service", new: with(`addresses: {use: Client, pool: partners, count: 4}`), field: "spec.peering", reason: "must be Direct"},
		{name: "addresses by number and by list", new: addresses(`use: Client, pool: partners, count: 4, list: [198.51.100.10]`), field: "spec.addresses", reason: "count or list is required, and not both"},
		{name: "neither a number nor a list of addresses", new: addresses(`use: Client, pool: partners`), field: "spec.addresses", reason: "count or list is required, and not both"},
		{name: "addresses of no pool", new: addresses(`use: Client, count: 4`), field: "spec.addresses.pool", reason: "Required value"},
		{name: "the addresses of nodes out of a pool", new: addresses(`use: Node, pool: partners`), field: "spec.addresses.pool", reason: "isn't for the use Node"},
		{name: "a number of addresses of nodes", new: addresses(`use: Node, count: 4`), field: "spec.addresses.count", reason: "isn't for the use Node"},
		{name: "a list of addresses of nodes", new: addresses(`use: Node, list: [198.51.100.10]`), field: "spec.addresses.list", reason: "isn't for the use Node"},
		{name: "shared addresses of nodes", new: addresses(`use: Node, shared: [198.51.100.10]`), field: "spec.addresses.shared", reason: "is for the use Client"},
		{name: "placed addresses of nodes", new: addresses(`use: Node, placement: {strategy: Pack}`), field: "spec.addresses.placement", reason: "is for the use Client"},
		{name: "assigned addresses of nodes", new: addresses(`use: Node, assignment: {strategy: Random}`), field: "spec.addresses.assignment", reason: "is for the use Client"},
		{name: "addresses of routers without Direct", new: with(`addresses: {use: Router, pool: partners, count: 4}`), field: "spec.peering", reason: "must be Direct"},
		{name: "addresses for others", new: addresses(`use: Pod, pool: partners, count: 4`), field: "spec.addresses.use", reason: "supported values"},
		{name: "too many addresses", new: addresses(`use: Client, pool: partners, count: 1025`), field: "spec.addresses.count", reason: "should be less than or equal to 1024"},
		{name: "a name as address", new: addresses(`use: Client, pool: partners, list: [example.com]`), field: "spec.addresses.list[0]", reason: "must be an address, a range such as"},
		{name: "half a range", new: addresses(`use: Client, pool: partners, list: [198.51.100.10-]`), field: "spec.addresses.list[0]", reason: "must be an address, a range such as"},
		{name: "a range of both families", new: addresses(`use: Client, pool: partners, list: ["198.51.100.10-2001:db8::1"]`), field: "spec.addresses.list[0]", reason: "of one family"},
		{name: "an address with a length", new: addresses(`use: Client, pool: partners, list: [198.51.100.9, 198.51.100.10/24]`), field: "spec.addresses.list[1]", reason: "host bits must be zero"},
		{name: "too large a CIDR", new: addresses(`use: Client, pool: partners, list: [198.51.0.0/21]`), field: "spec.addresses.list[0]", reason: "must be /22 or smaller"},
		{name: "too large a CIDR of IPv6", new: addresses(`use: Client, pool: partners, list: ["2001:db8::/117"]`), field: "spec.addresses.list[0]", reason: "in IPv6 /118"},
		{name: "an empty list of addresses", new: addresses(`use: Client, pool: partners, list: []`), field: "spec.addresses.list", reason: "should have at least 1 items"},
		{name: "addresses for nobody", new: addresses(`pool: partners, count: 4`), field: "spec.addresses.use", reason: "Required value"},
		{name: "fewer addresses than none", new: addresses(`use: Client, pool: partners, count: -1`), field: "spec.addresses.count", reason: "greater than or equal to 0"},
		{name: "the name of no pool", new: addresses(`use: Client, pool: Partners, count: 4`), field: "spec.addresses.pool", reason: "should match"},
		{name: "a shared range", new: addresses(`use: Client, pool: partners, count: 4, shared: [198.51.100.0/31]`), field: "spec.addresses.shared[0]", reason: "must be an address"},
		{name: "an address shared twice", new: addresses(`use: Client, pool: partners, count: 4, shared: [198.51.100.1, 198.51.100.1]`), field: "spec.addresses.shared[1]", reason: "Duplicate value"},
		{name: "connections of routers are copied all the time", new: addresses(`use: Router, pool: partners, count: 4, standby: true`), field: "spec.addresses.standby", reason: "is for the use Client"},
		{name: "less than no policy", new: addresses(`use: Client, pool: partners, count: 4, assignment: {maxPolicies: -1}`), field: "spec.addresses.assignment.maxPolicies", reason: "greater than or equal to 0"},
		{name: "addresses assigned by size", new: addresses(`use: Client, pool: partners, count: 4, assignment: {strategy: Largest}`), field: "spec.addresses.assignment.strategy", reason: "supported values"},
		{name: "no addresses left, and waiting", new: addresses(`use: Client, pool: partners, count: 4, assignment: {whenFull: Wait}`), field: "spec.addresses.assignment.whenFull", reason: "supported values"},
		{name: "clients with addresses send to the Service", old: addresses(`use: Client, pool: partners, count: 4`), new: with(`peering: Service, addresses: {use: Client, pool: partners, count: 4}`), field: "spec.peering", reason: "must be Direct"},
		{name: "addresses placed by chance", new: addresses(`use: Client, pool: partners, count: 4, placement: {strategy: Random}`), field: "spec.addresses.placement.strategy", reason: "supported values"},
		{name: "a negative limit of connections", new: with(`maxConnectionsPerClient: -1`), field: "spec.maxConnectionsPerClient", reason: "should be greater than or equal to 0"},
		{name: "a negative maxUnavailable", new: with(`podDisruptionBudget: {maxUnavailable: -1}`), field: "spec.podDisruptionBudget.maxUnavailable", reason: pods},
		{name: "a number in a string", new: with(`podDisruptionBudget: {minAvailable: "1"}`), field: "spec.podDisruptionBudget.minAvailable", reason: pods},
		{name: "more than all pods", new: with(`podDisruptionBudget: {maxUnavailable: "101%"}`), field: "spec.podDisruptionBudget.maxUnavailable", reason: pods},
		{name: "an unknown session affinity", new: with(`sessionAffinity: Cookie`), field: "spec.sessionAffinity", reason: `supported values: "ClientIP", "None"`},
		{name: "a timeout without session affinity", new: with(`sessionAffinity: None, sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}`),
			field: "spec.sessionAffinityConfig", reason: "goes with the sessionAffinity ClientIP only"},
		{name: "no timeout", new: with(`sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}`),
			field: "spec.sessionAffinityConfig.clientIP.timeoutSeconds", reason: "must be within 1 and 86400 seconds"},
		{name: "a timeout of more than a day", new: with(`sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}`),
			field: "spec.sessionAffinityConfig.clientIP.timeoutSeconds", reason: "must be within 1 and 86400 seconds"},
		{name: "a list of namespaces", new: with(`allowedNamespaces: [default]`), field: "spec.allowedNamespaces", reason: "must be of type object"},
		{name: "an unknown strategy", new: with(`strategy: {type: BlueGreen}`), field: "spec.strategy.type", reason: "must be RollingUpdate or Recreate"},
		{name: "a rolling update that recreates", new: with(`strategy: {type: Recreate, rollingUpdate: {maxSurge: 1}}`),
			field: "spec.strategy.rollingUpdate", reason: "goes with the type RollingUpdate only"},
		{name: "a pod spec that is none", new: with(`template: {spec: [egress]}`), field: "spec.template.spec", reason: "must be of type object"},
		{name: "a bad destination appended", old: old, new: `spec: {destinations: [192.0.2.0/24, 192.0.2.9/24]}`, field: "spec.destinations[1]", reason: notZero},
		{name: "all destinations removed", old: old, new: `spec: {destinations: []}`, field: "spec.destinations", reason: "should have at least 1 items"},
	}
}

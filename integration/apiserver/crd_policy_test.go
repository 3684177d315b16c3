package apiserver

import (
	"strings"
)

// Messages about lists of ranges.
const (
	policyNotCIDR  = "must be a subnet in CIDR notation"
	policyHostBits = "host bits must be zero"
)

// list is n times the same element, in YAML.
func list(n int, element string) string { return "[" + strings.Repeat(element+", ", n) + "]" }

// useAttempts are attempts that policies of both kinds have in common. with returns the YAML of a policy that has more fields.
func useAttempts(with func(more string) string) []attempt {
	const dns = "should match"
	long := strings.Repeat("e", 64)
	return []attempt{
		{name: "the default Egress", new: with(``)},
		{name: "an Egress", new: with(`egress: {namespace: internet, name: nat}`)},
		{name: "an Egress in a namespace of digits", new: with(`egress: {namespace: "1", name: nat}`)},
		{name: "destinations", new: with(`destinations: [203.0.113.0/24, "2001:db8::/32"]`)},
		{name: "as many destinations as there may be", new: with(`destinations: ` + list(256, `"2001:db8:1234:5678:9abc:def0:1234:5600/120"`))},
		{name: "packets leave by the node", new: with(`onFailure: Node`)},
		{name: "packets are dropped", new: with(`onFailure: Closed`)},
		{name: "an address", new: with(`address: {ipv4: 198.51.100.10}`)},
		{name: "a pair of addresses", new: with(`address: {ipv4: 198.51.100.10, ipv6: "2001:db8::a"}`)},
		{name: "another address", old: with(`address: {ipv4: 198.51.100.10}`), new: with(`address: {ipv6: "2001:db8::a"}`)},
		{name: "an address no more", old: with(`address: {ipv4: 198.51.100.10}`), new: with(``)},
		{name: "another Egress", old: with(`egress: {namespace: internet, name: nat}`), new: with(`egress: {namespace: internet, name: other}`)},

		{name: "an Egress without a name", new: with(`egress: {namespace: internet}`), field: "spec.egress.name", reason: "Required value"},
		{name: "an Egress without a namespace", new: with(`egress: {name: nat}`), field: "spec.egress.namespace", reason: "Required value"},
		{name: "an Egress with an empty name", new: with(`egress: {namespace: internet, name: ""}`), field: "spec.egress.name", reason: "at least 1 chars long"},
		{name: "an Egress with an empty namespace", new: with(`egress: {namespace: "", name: nat}`), field: "spec.egress.namespace", reason: "at least 1 chars long"},
		{name: "a name that no Egress has", new: with(`egress: {namespace: internet, name: 1nat}`), field: "spec.egress.name", reason: dns},
		{name: "a namespace with a dot", new: with(`egress: {namespace: a.b, name: nat}`), field: "spec.egress.namespace", reason: dns},
		{name: "too long a name of an Egress", new: with(`egress: {namespace: internet, name: ` + long + `}`), field: "spec.egress.name", reason: "Too long"},
		{name: "too long a name of a namespace", new: with(`egress: {namespace: ` + long + `, name: nat}`), field: "spec.egress.namespace", reason: "Too long"},
		{name: "an empty list of destinations", new: with(`destinations: []`), field: "spec.destinations", reason: "should have at least 1 items"},
		{name: "too many destinations", new: with(`destinations: ` + list(257, "192.0.2.0/24")), field: "spec.destinations", reason: "must have at most 256 items"},
		{name: "an address as destination", new: with(`destinations: [192.0.2.0/24, 192.0.2.1]`), field: "spec.destinations[1]", reason: policyNotCIDR},
		{name: "a name as destination", new: with(`destinations: [example.com]`), field: "spec.destinations[0]", reason: policyNotCIDR},
		{name: "host bits of a destination", new: with(`destinations: [192.0.2.1/24]`), field: "spec.destinations[0]", reason: policyHostBits},
		{name: "host bits of a destination of IPv6", new: with(`destinations: ["2001:db8::1/32"]`), field: "spec.destinations[0]", reason: policyHostBits},
		{name: "an address of no family", new: with(`address: {}`), field: "spec.address", reason: "ipv4 or ipv6 is required"},
		{name: "a name as address", new: with(`address: {ipv4: example.com}`), field: "spec.address.ipv4", reason: "must be an IPv4 address"},
		{name: "a subnet as address", new: with(`address: {ipv4: 198.51.100.0/24}`), field: "spec.address.ipv4", reason: "must be an IPv4 address"},
		{name: "an address with a length", new: with(`address: {ipv4: 192.0.2.1/32}`), field: "spec.address.ipv4", reason: "must be an IPv4 address"},
		{name: "an address of IPv6 as one of IPv4", new: with(`address: {ipv4: "2001:db8::a"}`), field: "spec.address.ipv4", reason: "must be an IPv4 address"},
		{name: "an address of IPv4 as one of IPv6", new: with(`address: {ipv6: 198.51.100.10}`), field: "spec.address.ipv6", reason: "must be an IPv6 address"},
		{name: "an address of IPv4 in IPv6", new: with(`address: {ipv6: "::ffff:198.51.100.10"}`), field: "spec.address.ipv6", reason: "must be an IPv6 address"},
		{name: "an unknown word for failures", new: with(`onFailure: Open`), field: "spec.onFailure", reason: `supported values: "Closed", "Node"`},
		{name: "no spec", new: `{}`, field: "spec", reason: "Required value"},
	}
}

// rangeAttempts are those of podCIDRs.
func rangeAttempts(with func(podCIDRs string) string) []attempt {
	return []attempt{
		{name: "ranges of both families", new: with(`podCIDRs: [10.1.0.0/16, "fd00::/64"]`)},
		{name: "as many ranges as there may be", new: with(`podCIDRs: ` + list(64, `"2001:db8:1234:5678:9abc:def0:1234:5600/120"`))},
		{name: "an empty list of ranges", new: with(`podCIDRs: []`), field: "spec.podCIDRs", reason: "should have at least 1 items"},
		{name: "too many ranges", new: with(`podCIDRs: ` + list(65, "10.1.0.0/16")), field: "spec.podCIDRs", reason: "must have at most 64 items"},
		{name: "an address as range", new: with(`podCIDRs: [10.1.0.1]`), field: "spec.podCIDRs[0]", reason: policyNotCIDR},
		{name: "host bits of a range", new: with(`podCIDRs: [10.2.0.0/16, 10.1.0.1/16]`), field: "spec.podCIDRs[1]", reason: policyHostBits},
	}
}

// policyAttempts are attempts to create or change an EgressPolicy.
func policyAttempts() []attempt {
	const (
		one   = "one of pods, services and podCIDRs is required, and no other one of them"
		empty = "an empty selector is refused"
	)
	all := []attempt{
		{name: "labels", new: `spec: {pods: {matchLabels: {app: shop}}}`},
		{name: "expressions", new: `spec: {pods: {matchExpressions: [{key: no-egress, operator: DoesNotExist}]}}`},
		{name: "Services", new: `spec: {services: [frontend, backend]}`},
		{name: "as many Services as there may be", new: `spec: {services: [` + distinct(32) + `]}`},
		{name: "Services for labels", old: `spec: {pods: {matchLabels: {app: shop}}}`, new: `spec: {services: [frontend]}`},
		{name: "a name with a dot", object: "a.b", new: `spec: {services: [frontend]}`},

		{name: "no choice", new: `spec: {egress: {namespace: internet, name: nat}}`, field: "spec", reason: one},
		{name: "labels and Services", new: `spec: {pods: {matchLabels: {app: shop}}, services: [frontend]}`, field: "spec", reason: one},
		{name: "Services and ranges", new: `spec: {services: [frontend], podCIDRs: [10.1.0.0/16]}`, field: "spec", reason: one},
		{name: "labels and ranges", new: `spec: {pods: {matchLabels: {app: shop}}, podCIDRs: [10.1.0.0/16]}`, field: "spec", reason: one},
		{name: "all three", new: `spec: {pods: {matchLabels: {app: shop}}, services: [frontend], podCIDRs: [10.1.0.0/16]}`, field: "spec", reason: one},
		{name: "an empty selector", new: `spec: {pods: {}}`, field: "spec.pods", reason: empty},
		{name: "no labels", new: `spec: {pods: {matchLabels: {}}}`, field: "spec.pods", reason: "exclude a label that none has"},
		{name: "no expressions", new: `spec: {pods: {matchExpressions: []}}`, field: "spec.pods", reason: empty},
		{name: "a selector is emptied", old: `spec: {pods: {matchLabels: {app: shop}}}`, new: `spec: {pods: {}}`, field: "spec.pods", reason: empty},
		{name: "an empty list of Services", new: `spec: {services: []}`, field: "spec.services", reason: "should have at least 1 items"},
		{name: "a Service without a name", new: `spec: {services: [""]}`, field: "spec.services[0]", reason: "at least 1 chars long"},
		{name: "too long a name of a Service", new: `spec: {services: [` + strings.Repeat("s", 64) + `]}`, field: "spec.services[0]", reason: "Too long"},
		{name: "a Service twice", new: `spec: {services: [frontend, backend, frontend]}`, field: "spec.services[2]", reason: "Duplicate value"},
		{name: "too many Services", new: `spec: {services: [` + distinct(33) + `]}`, field: "spec.services", reason: "must have at most 32 items"},
	}
	all = append(all, useAttempts(func(more string) string { return `spec: {pods: {matchLabels: {app: shop}}, ` + more + `}` })...)
	return append(all, rangeAttempts(func(r string) string { return `spec: {` + r + `}` })...)
}

// distinct is a list of n different names.
func distinct(n int) string {
	var names []string
	for i := range n {
		names = append(names, "s"+strings.Repeat("x", i))
	}
	return strings.Join(names, ", ")
}

// clusterPolicyAttempts are attempts to create or change an EgressClusterPolicy.
func clusterPolicyAttempts() []attempt {
	const one = "pods or podCIDRs is required, and not both"
	all := []attempt{
		{name: "all pods of all namespaces", new: `spec: {namespaceSelector: {}, pods: {}}`},
		{name: "labels", new: `spec: {namespaceSelector: {matchLabels: {team: a}}, pods: {matchLabels: {app: shop}}}`},
		{name: "expressions", new: `spec: {namespaceSelector: {matchExpressions: [{key: team, operator: In, values: [a, b]}]}, pods: {}}`},

		{name: "no namespaces", new: `spec: {pods: {}}`, field: "spec.namespaceSelector", reason: "Required value"},
		{name: "no choice of pods", new: `spec: {namespaceSelector: {}}`, field: "spec", reason: one},
		{name: "labels and ranges", new: `spec: {namespaceSelector: {}, pods: {}, podCIDRs: [10.1.0.0/16]}`, field: "spec", reason: one},
	}
	all = append(all, useAttempts(func(more string) string { return `spec: {namespaceSelector: {}, pods: {}, ` + more + `}` })...)
	return append(all, rangeAttempts(func(r string) string { return `spec: {namespaceSelector: {}, ` + r + `}` })...)
}

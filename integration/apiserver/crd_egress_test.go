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

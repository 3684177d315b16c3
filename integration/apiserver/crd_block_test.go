package apiserver

import "strings"

// blockAttempts are attempts to create or change an AddressBlock.
func blockAttempts() []attempt {
	const (
		range4 = "must be an IPv4 range in CIDR notation, without host bits, of at most 2^16 addresses"
		range6 = "must be an IPv6 range in CIDR notation, without host bits, of at most 2^16 addresses"
		name   = "must be the name of the pool, a dash and the index"
	)
	return []attempt{
		{name: "IPv4", object: "b4-0", new: `{index: 0, ipv4: 10.0.0.0/27}`},
		{name: "IPv6", object: "b6-7", new: `{index: 7, ipv6: "fd00::e0/123"}`},
		{name: "dual stack", object: "b46-12", new: `{index: 12, ipv4: 10.0.1.128/27, ipv6: "fd00::180/123"}`},
		{name: "one address", object: "b1-1", new: `{index: 1, ipv4: 192.0.2.7/32}`},
		{name: "the largest block", object: "bl-1", new: `{index: 1, ipv4: 10.1.0.0/16, ipv6: "fd00::1:0/112"}`},
		{name: "the last index", object: "bi-2147483647", new: `{index: 2147483647, ipv6: "fd00::/128"}`},
		{name: "a pool with dashes, dots and digits", object: "b-1.2-x-3", new: `{index: 3, ipv4: 10.0.0.96/27}`},
		{name: "a floating address", object: "bf-5", new: floating(`ipv4: 192.0.2.5/32, ipv6: "fd00::5/128"`)},
		{name: "a floating address becomes another's", object: "bf6-5", old: floating(`ipv4: 192.0.2.5/32`), new: strings.ReplaceAll(floating(`ipv4: 192.0.2.5/32`), "nat", "other")},
		{name: "two floating addresses", object: "bf7-5", new: floating(`ipv4: 192.0.2.4/31`), field: "floating", reason: "is for blocks of one address"},
		{name: "two floating addresses of IPv6", object: "bf8-5", new: floating(`ipv6: "fd00::4/127"`), field: "floating", reason: "is for blocks of one address"},
		{name: "a node's block becomes a floating address", object: "bf10-5", old: `{index: 5, ipv4: 192.0.2.4/31}`, new: floating(`ipv4: 192.0.2.4/31`),
			field: "floating", reason: "is for blocks of one address"},
		{name: "a floating address of nobody", object: "bf9-5", new: `{index: 5, ipv4: 192.0.2.5/32, floating: {claim: c}}`, field: "floating.owner", reason: "Required value"},
		{name: "nothing new", object: "bn-4", old: `{index: 4, ipv4: 10.0.0.0/27}`, new: `{index: 4, ipv4: 10.0.0.0/27}`},

		{name: "the name of another index", object: "n-1", new: `{index: 2, ipv4: 10.0.0.0/27}`, field: "metadata.name", reason: name},
		{name: "a name without an index", object: "n", new: `{index: 2, ipv4: 10.0.0.0/27}`, field: "metadata.name", reason: name},
		{name: "a name without a pool", object: "2", new: `{index: 2, ipv4: 10.0.0.0/27}`, field: "metadata.name", reason: name},
		{name: "an index with zeros before it", object: "n-02", new: `{index: 2, ipv4: 10.0.0.0/27}`, field: "metadata.name", reason: name},
		{name: "a name with a number beyond 64 bits", object: "n-" + strings.Repeat("9", 30), new: `{index: 2, ipv4: 10.0.0.0/27}`, field: "metadata.name", reason: name},
		{name: "no index", object: "x-1", new: `{ipv4: 10.0.0.0/27}`, field: "index", reason: "Required value"},
		{name: "a negative index", object: "x-1", new: `{index: -1, ipv4: 10.0.0.0/27}`, field: "index", reason: "greater than or equal to 0", also: "metadata.name"},
		{name: "no family", object: "x-1", new: `{index: 1}`, field: "ipv4", reason: noFamily},
		{name: "IPv4 that is no CIDR", object: "x-1", new: `{index: 1, ipv4: 10.0.0.32}`, field: "ipv4", reason: range4},
		{name: "IPv6 that is no CIDR", object: "x-1", new: `{index: 1, ipv6: "fd00::20"}`, field: "ipv6", reason: range6},
		{name: "IPv6 as IPv4", object: "x-1", new: `{index: 1, ipv4: "fd00::20/123"}`, field: "ipv4", reason: range4},
		{name: "IPv4 as IPv6", object: "x-1", new: `{index: 1, ipv6: 10.0.0.32/27}`, field: "ipv6", reason: range6},
		{name: "IPv4 host bits", object: "x-1", new: `{index: 1, ipv4: 10.0.0.33/27}`, field: "ipv4", reason: range4},
		{name: "IPv6 host bits", object: "x-1", new: `{index: 1, ipv6: "fd00::21/123"}`, field: "ipv6", reason: range6},
		{name: "too large a block", object: "x-0", new: `{index: 0, ipv4: 10.0.0.0/15}`, field: "ipv4", reason: range4},
		{name: "unequal sizes", object: "x-1", new: `{index: 1, ipv4: 10.0.0.32/27, ipv6: "fd00::20/124"}`, field: "ipv6", reason: unequalSize},
		{name: "another index", object: "u-1", old: `{index: 1, ipv4: 10.0.0.32/27}`, new: `{index: 2, ipv4: 10.0.0.32/27}`, field: "index", reason: fixed},
		{name: "another IPv4 range", object: "u-2", old: `{index: 2, ipv4: 10.0.0.32/27}`, new: `{index: 2, ipv4: 10.0.0.64/27}`, field: "ipv4", reason: fixed},
		{name: "another IPv6 range", object: "u-3", old: `{index: 3, ipv6: "fd00::20/123"}`, new: `{index: 3, ipv6: "fd00::40/123"}`, field: "ipv6", reason: fixed},
		{name: "remove a family", object: "u-4", old: `{index: 4, ipv4: 10.0.0.32/27, ipv6: "fd00::20/123"}`, new: `{index: 4, ipv4: 10.0.0.32/27}`,
			field: "ipv6", reason: fixed},
		{name: "add a family", object: "u-5", old: `{index: 5, ipv6: "fd00::20/123"}`, new: `{index: 5, ipv4: 10.0.0.32/27, ipv6: "fd00::20/123"}`,
			field: "ipv4", reason: fixed},
	}
}

// requestAttempts are attempts to create or change a BlockRequest.
func requestAttempts() []attempt {
	const (
		old   = `spec: {nodeName: node, poolName: default}`
		claim = `spec: {nodeName: node, poolName: default, claim: default-1}`
	)
	return []attempt{
		{name: "a request", new: old},
		{name: "nothing new", old: old, new: old},

		{name: "no spec", new: `{}`, field: "spec", reason: "Required value"},
		{name: "no node", new: `spec: {poolName: default}`, field: "spec.nodeName", reason: "Required value"},
		{name: "no pool", new: `spec: {nodeName: node}`, field: "spec.poolName", reason: "Required value"},
		{name: "an empty node", new: `spec: {nodeName: "", poolName: default}`, field: "spec.nodeName", reason: "at least 1 chars"},
		{name: "an empty pool", new: `spec: {nodeName: node, poolName: ""}`, field: "spec.poolName", reason: "at least 1 chars"},
		{name: "a name of a pool without end", new: `spec: {nodeName: node, poolName: ` + strings.Repeat("p", 254) + `}`, field: "spec.poolName", reason: "Too long"},
		{name: "another node", old: old, new: `spec: {nodeName: other, poolName: default}`, field: "spec.nodeName", reason: fixed},
		{name: "another pool", old: old, new: `spec: {nodeName: node, poolName: other}`, field: "spec.poolName", reason: fixed},

		{name: "a claim", new: claim},
		{name: "the same claim", old: claim, new: claim},
		{name: "another claim", old: claim, new: `spec: {nodeName: node, poolName: default, claim: default-2}`, field: "spec.claim", reason: fixed},
		{name: "a claim added", old: old, new: claim, field: "spec.claim", reason: fixed},
		{name: "a claim removed", old: claim, new: old, field: "spec.claim", reason: fixed},
		{name: "a claim without end", new: `spec: {nodeName: node, poolName: default, claim: ` + strings.Repeat("b", 254) + `}`, field: "spec.claim", reason: "Too long"},
	}
}

// floating returns the YAML of a floating address of the fifth index.
func floating(ranges string) string {
	return `{index: 5, ` + ranges + `, floating: {claim: c, coolDownSeconds: 5, owner: {kind: Egress, namespace: internet, name: nat, uid: "1", summary: Egress internet/nat}}}`
}

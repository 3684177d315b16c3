package apiserver

import (
	"fmt"
	"strings"
)

// Reasons that several attempts share.
const (
	notIPv4     = "must be an IPv4 subnet in CIDR notation"
	notIPv6     = "must be an IPv6 subnet in CIDR notation"
	hostBits    = " has host bits: the address must be the first one of the subnet"
	overlaps    = " overlaps another subnet of the pool"
	unusable    = " has addresses that pods cannot have"
	smaller     = " is smaller than a block of 2^blockSizeBits addresses"
	appendOnly  = "subnets can be appended, not changed, reordered or removed"
	families    = "all subnets must have the same address families"
	unequalSize = "ipv4 and ipv6 must be of equal size"
	noFamily    = "ipv4, ipv6 or both are required"
	fixed       = "can't be changed"
	noRange     = "must be an address, a range such as 10.1.2.10-10.1.2.20, or a CIDR"
	outside     = " is not within one of spec.subnets"
)

// subnets returns the YAML of a pool with n dual-stack subnets.
func subnets(n int) string {
	var b strings.Builder
	b.WriteString("spec: {subnets: [")
	for i := range n {
		fmt.Fprintf(&b, `{ipv4: 10.%d.0.0/16, ipv6: "fd00:%x::/112"}, `, i, i+1)
	}
	return b.String() + "]}"
}

// excludes returns the YAML of a pool with n subnets and n excluded ranges.
func excludes(n int) string {
	var b strings.Builder
	b.WriteString(strings.TrimSuffix(subnets(min(n, 64)), "}") + ", exclude: [")
	for i := range n {
		fmt.Fprintf(&b, `"fd00:%x:0000:0000:0000:0000:0000:%04x-fd00:%x:0000:0000:0000:0000:0000:%04x", `, min(n, 64), 2*i, min(n, 64), 2*i+1)
	}
	return b.String() + "]}"
}

// poolAttempts are attempts to create an AddressPool.
func poolAttempts() []attempt {
	return []attempt{
		{name: "IPv4", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`},
		{name: "IPv6", new: `spec: {subnets: [{ipv6: "fd00::/112"}]}`},
		{name: "dual stack", new: `spec: {blockSizeBits: 8, subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}]}`},
		{name: "IPv6 in capitals and not shortened", new: `spec: {subnets: [{ipv6: "FD00:0:0:0:0:0:0:0/64"}]}`},
		{name: "everything", new: `spec: {subnets: [{ipv4: 0.0.0.0/0}]}`},
		{name: "single addresses", new: `spec: {blockSizeBits: 0, subnets: [{ipv4: 192.0.2.7/32}, {ipv4: 192.0.2.8/32}]}`},
		{name: "exactly one block", new: `spec: {blockSizeBits: 4, subnets: [{ipv4: 192.0.2.16/28, ipv6: "fd00::10/124"}]}`},
		{name: "the largest block", new: `spec: {blockSizeBits: 16, subnets: [{ipv4: 10.1.0.0/16, ipv6: "fd00::/112"}]}`},
		{name: "neighbours", new: `spec: {subnets: [{ipv4: 10.0.0.0/24}, {ipv4: 10.0.1.0/24}]}`},
		{name: "as many subnets as there may be", new: subnets(64)},
		{name: "the longest name", object: strings.Repeat("p", 63), new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`},

		{name: "floating addresses", new: `spec: {purpose: Floating, blockSizeBits: 0, subnets: [{ipv4: 10.0.0.0/24}]}`},
		{name: "any purpose", new: `spec: {purpose: Any, subnets: [{ipv4: 10.0.0.0/24}]}`},
		{name: "floating addresses in larger blocks", new: `spec: {purpose: Floating, subnets: [{ipv4: 10.0.0.0/24}]}`,
			field: "spec.purpose", reason: "a pool of floating addresses needs blockSizeBits: 0"},
		{name: "floating addresses for some namespaces", new: `spec: {blockSizeBits: 0, floatingNamespaces: [internet, partners], subnets: [{ipv4: 10.0.0.0/24}]}`},
		{name: "floating addresses for no namespace", new: `spec: {floatingNamespaces: [], subnets: [{ipv4: 10.0.0.0/24}]}`, field: "spec.floatingNamespaces", reason: "at least 1"},
		{name: "another purpose", new: `spec: {purpose: Pods, subnets: [{ipv4: 10.0.0.0/24}]}`, field: "spec.purpose", reason: "Unsupported value"},
		{name: "announced by routes", new: `spec: {announce: Route, subnets: [{ipv4: 10.0.0.0/24}]}`},
		{name: "announced to neighbours", new: `spec: {announce: Neighbor, subnets: [{ipv4: 10.0.0.0/24}]}`},
		{name: "floating addresses that are announced to neighbours", new: `spec: {purpose: Floating, announce: Neighbor, blockSizeBits: 0, subnets: [{ipv4: 10.0.0.0/24}]}`},
		{name: "announced in another way", new: `spec: {announce: BGP, subnets: [{ipv4: 10.0.0.0/24}]}`, field: "spec.announce", reason: "Unsupported value"},
		{name: "announced to nobody", new: `spec: {announce: "", subnets: [{ipv4: 10.0.0.0/24}]}`, field: "spec.announce", reason: "Unsupported value"},
		{name: "excluded addresses, ranges and CIDRs", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.2.0.0/16}], exclude: [10.0.0.5, 10.0.1.10-10.0.1.20, 10.2.0.0/28]}`},
		{name: "excluded addresses of both families", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}], exclude: [10.0.0.5, "fd00::7-fd00::1:0", "fd00::10/124"]}`,
			field: "spec.exclude", reason: "fd00::7-fd00::1:0" + outside},
		{name: "all is excluded", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}], exclude: [10.0.0.0/16]}`},
		{name: "a range of one address", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.5-10.0.0.5]}`},
		{name: "excluded ranges in either order", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}], exclude: [10.0.0.20-10.0.0.10, "fd00::10-fd00::9"]}`},
		{name: "the widest range", new: `spec: {subnets: [{ipv6: "::/0"}], exclude: ["::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "FD00:0:0:0:0:0:0:9-fd00::a"]}`},
		{name: "nothing is excluded", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: []}`},
		{name: "as many excluded ranges as there may be", new: excludes(64)},
		{name: "too many excluded ranges", new: excludes(65), field: "spec.exclude", reason: "must have at most 64 items"},
		{name: "an excluded word", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [gateway]}`, field: "spec.exclude[0]", reason: noRange},
		{name: "an excluded range without an end", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.1, 10.0.0.5-]}`, field: "spec.exclude[1]", reason: noRange},
		{name: "an excluded range of three", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.1-10.0.0.3-10.0.0.5]}`, field: "spec.exclude[0]", reason: noRange},
		{name: "an excluded range of two families", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}], exclude: ["10.0.0.1-fd00::2"]}`, field: "spec.exclude", reason: "10.0.0.1-fd00::2" + outside},
		{name: "an excluded CIDR with host bits", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.5/28]}`, field: "spec.exclude[0]", reason: "has host bits"},
		{name: "an excluded address of another family", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: ["fd00::1"]}`, field: "spec.exclude", reason: "fd00::1" + outside},
		{name: "an excluded address outside", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.1, 10.1.0.1]}`, field: "spec.exclude", reason: "10.1.0.1" + outside},
		{name: "an excluded CIDR around the subnet", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.0/8]}`, field: "spec.exclude", reason: "10.0.0.0/8" + outside},
		{name: "an excluded range over two subnets", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}], exclude: [10.0.255.250-10.1.0.5]}`, field: "spec.exclude", reason: "10.0.255.250-10.1.0.5" + outside},
		{name: "an excluded range twice", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.1, 10.0.0.1]}`, field: "spec.exclude[1]", reason: "Duplicate value"},
		{name: "draining", new: `spec: {drain: true, subnets: [{ipv4: 10.0.0.0/16}]}`},
		{name: "a name that is no label value", object: strings.Repeat("p", 64), new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`,
			field: "metadata.name", reason: "has at most 63 characters"},
		{name: "no spec", new: `{}`, field: "spec", reason: "Required value"},
		{name: "no subnets", new: `spec: {blockSizeBits: 5}`, field: "spec.subnets", reason: "Required value"},
		{name: "an empty list of subnets", new: `spec: {subnets: []}`, field: "spec.subnets", reason: "should have at least 1 items"},
		{name: "too many subnets", new: subnets(65), field: "spec.subnets", reason: "must have at most 64 items"},
		{name: "a subnet without a family", new: `spec: {subnets: [{}]}`, field: "spec.subnets[0]", reason: noFamily},
		{name: "an empty string", new: `spec: {subnets: [{ipv4: ""}]}`, field: "spec.subnets[0].ipv4", reason: notIPv4},
		{name: "a word", new: `spec: {subnets: [{ipv4: default}]}`, field: "spec.subnets[0].ipv4", reason: notIPv4},
		{name: "a number", new: `spec: {subnets: [{ipv4: 10}]}`, field: "spec.subnets[0].ipv4", reason: "must be of type string"},
		{name: "an address without a length", new: `spec: {subnets: [{ipv4: 10.0.0.0}]}`, field: "spec.subnets[0].ipv4", reason: notIPv4},
		{name: "an IPv4 length beyond the family", new: `spec: {subnets: [{ipv4: 10.0.0.0/33}]}`, field: "spec.subnets[0].ipv4", reason: notIPv4},
		{name: "an IPv6 length beyond the family", new: `spec: {subnets: [{ipv6: "fd00::/129"}]}`, field: "spec.subnets[0].ipv6", reason: notIPv6},
		{name: "a netmask", new: `spec: {subnets: [{ipv4: 10.0.0.0/255.255.0.0}]}`, field: "spec.subnets[0].ipv4", reason: notIPv4},
		{name: "an octal number", new: `spec: {subnets: [{ipv4: 010.0.0.0/16}]}`, field: "spec.subnets[0].ipv4", reason: notIPv4},
		{name: "IPv6 as IPv4", new: `spec: {subnets: [{ipv4: "fd00::/112"}]}`, field: "spec.subnets[0].ipv4", reason: notIPv4},
		{name: "IPv4 as IPv6", new: `spec: {subnets: [{ipv6: 10.0.0.0/16}]}`, field: "spec.subnets[0].ipv6", reason: notIPv6},
		{name: "IPv4 mapped into IPv6", new: `spec: {subnets: [{ipv6: "::ffff:10.0.0.0/112"}]}`, field: "spec.subnets[0].ipv6", reason: notIPv6},
		{name: "a zone", new: `spec: {subnets: [{ipv6: "fe80::%eth0/64"}]}`, field: "spec.subnets[0].ipv6", reason: notIPv6},
		{name: "a string without end", new: `spec: {subnets: [{ipv4: "` + strings.Repeat("1", 44) + `"}]}`, field: "spec.subnets[0].ipv4", reason: "Too long"},
		{name: "IPv4 host bits", new: `spec: {subnets: [{ipv4: 10.0.0.1/16}]}`, field: "spec.subnets", reason: "10.0.0.1/16" + hostBits},
		{name: "IPv6 host bits", new: `spec: {subnets: [{ipv6: "fd00::1/112"}]}`, field: "spec.subnets", reason: "fd00::1/112" + hostBits},
		{name: "host bits in another subnet", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.2.0/16}, {ipv4: 10.2.0.0/16}]}`,
			field: "spec.subnets", reason: "10.1.2.0/16" + hostBits},
		{name: "host bits in one family", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::8000/112"}]}`,
			field: "spec.subnets", reason: "fd00::8000/112" + hostBits},
		{name: "class E", new: `spec: {subnets: [{ipv4: 240.0.0.0/16}]}`},
		{name: "beside link-local", new: `spec: {subnets: [{ipv4: 169.253.0.0/16}, {ipv4: 169.255.0.0/16}]}`},
		{name: "IPv4 link-local, with the gateway of pods", new: `spec: {subnets: [{ipv4: 169.254.1.0/24}]}`, field: "spec.subnets", reason: "169.254.1.0/24" + unusable},
		{name: "IPv4 loopback", new: `spec: {subnets: [{ipv4: 127.0.0.0/8}]}`, field: "spec.subnets", reason: "127.0.0.0/8" + unusable},
		{name: "IPv4 this network", new: `spec: {subnets: [{ipv4: 0.1.0.0/16}]}`, field: "spec.subnets", reason: "0.1.0.0/16" + unusable},
		{name: "IPv4 multicast", new: `spec: {subnets: [{ipv4: 239.1.0.0/16}]}`, field: "spec.subnets", reason: "239.1.0.0/16" + unusable},
		{name: "IPv4 part of a multicast range", new: `spec: {subnets: [{ipv4: 224.0.0.0/27}]}`, field: "spec.subnets", reason: "224.0.0.0/27" + unusable},
		{name: "IPv6 link-local", new: `spec: {subnets: [{ipv6: "fe80::/112"}]}`, field: "spec.subnets", reason: "fe80::/112" + unusable},
		{name: "IPv6 multicast", new: `spec: {subnets: [{ipv6: "ff05::/112"}]}`, field: "spec.subnets", reason: "ff05::/112" + unusable},
		{name: "IPv6 unspecified and loopback", new: `spec: {subnets: [{ipv6: "::/112"}]}`, field: "spec.subnets", reason: "::/112" + unusable},
		{name: "mixed families", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv6: "fd00::/112"}]}`, field: "spec.subnets", reason: families},
		{name: "dual stack and a single family", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}, {ipv4: 10.1.0.0/16}]}`,
			field: "spec.subnets", reason: families},
		{name: "unequal sizes", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/64"}]}`, field: "spec.subnets[0]", reason: unequalSize},
		{name: "unequal sizes in another subnet", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}, {ipv4: 10.1.0.0/24, ipv6: "fd00:1::/119"}]}`,
			field: "spec.subnets[1]", reason: unequalSize},
		{name: "IPv4 smaller than a block", new: `spec: {subnets: [{ipv4: 10.0.0.0/28}]}`, field: "spec.subnets", reason: "10.0.0.0/28" + smaller},
		{name: "IPv6 smaller than a block", new: `spec: {blockSizeBits: 8, subnets: [{ipv6: "fd00::/112"}, {ipv6: "fd00:1::/121"}]}`,
			field: "spec.subnets", reason: "fd00:1::/121" + smaller},
		{name: "a negative block size", new: `spec: {blockSizeBits: -1, subnets: [{ipv4: 10.0.0.0/16}]}`, field: "spec.blockSizeBits", reason: "greater than or equal to 0"},
		{name: "too large a block size", new: `spec: {blockSizeBits: 17, subnets: [{ipv4: 10.0.0.0/8}]}`, field: "spec.blockSizeBits", reason: "less than or equal to 16"},
		{name: "a block size beyond the family", new: `spec: {blockSizeBits: 33, subnets: [{ipv6: "fd00::/64"}]}`, field: "spec.blockSizeBits", reason: "less than or equal to 16"},
		{name: "a block size in words", new: `spec: {blockSizeBits: five, subnets: [{ipv4: 10.0.0.0/16}]}`, field: "spec.blockSizeBits", reason: "must be of type integer"},
		{name: "the same subnet twice", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.0.0.0/16}]}`, field: "spec.subnets", reason: "10.0.0.0/16" + overlaps},
		{name: "a subnet within another", new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/24}, {ipv4: 10.0.7.0/24}]}`,
			field: "spec.subnets", reason: "10.0.7.0/24" + overlaps},
		{name: "a subnet around another", new: `spec: {subnets: [{ipv6: "fd00:0:0:1::/64"}, {ipv6: "fd00::/48"}]}`, field: "spec.subnets", reason: "fd00::/48" + overlaps},
		{name: "an overlap in one family", new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}, {ipv4: 10.1.0.0/16, ipv6: "fd00::/112"}]}`,
			field: "spec.subnets", reason: "fd00::/112" + overlaps},
	}
}

// poolChanges are attempts to change an AddressPool.
func poolChanges() []attempt {
	const old = `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`
	return []attempt{
		{name: "append a subnet", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.2.0.0/16}]}`},
		{name: "append the last subnet that fits", old: subnets(63), new: subnets(64)},
		{name: "leave the block size to its default", old: `spec: {blockSizeBits: 5, subnets: [{ipv4: 10.0.0.0/16}]}`, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`},

		{name: "announce to neighbours", old: old, new: `spec: {announce: Neighbor, subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`},
		{name: "announce by routes again", old: `spec: {announce: Neighbor, subnets: [{ipv4: 10.0.0.0/16}]}`, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`},
		{name: "announce in another way", old: old, new: `spec: {announce: neighbor, subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`,
			field: "spec.announce", reason: "Unsupported value"},

		{name: "exclude addresses", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}], exclude: [10.0.0.0/28]}`},
		{name: "exclude other addresses", old: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.0/28]}`, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.1.0]}`},
		{name: "exclude addresses of an appended subnet", old: `spec: {subnets: [{ipv4: 10.0.0.0/16}], exclude: [10.0.0.0/28]}`,
			new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}], exclude: [10.0.0.0/28, 10.1.0.9]}`},
		{name: "drain", old: old, new: `spec: {drain: true, subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`},
		{name: "drain no longer", old: `spec: {drain: true, subnets: [{ipv4: 10.0.0.0/16}]}`, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`},

		{name: "a smaller block size", old: old, new: `spec: {blockSizeBits: 4, subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`,
			field: "spec.blockSizeBits", reason: fixed},
		{name: "a larger block size", old: old, new: `spec: {blockSizeBits: 6, subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`,
			field: "spec.blockSizeBits", reason: fixed},
		{name: "another block size by default", old: `spec: {blockSizeBits: 8, subnets: [{ipv4: 10.0.0.0/16}]}`, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`,
			field: "spec.blockSizeBits", reason: fixed},
		{name: "remove the last subnet", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`, field: "spec.subnets", reason: appendOnly},
		{name: "remove the first subnet", old: old, new: `spec: {subnets: [{ipv4: 10.1.0.0/16}]}`, field: "spec.subnets", reason: appendOnly},
		{name: "remove all subnets", old: old, new: `spec: {subnets: []}`, field: "spec.subnets", reason: "should have at least 1 items"},
		{name: "edit a subnet", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.3.0.0/16}]}`, field: "spec.subnets", reason: appendOnly},
		{name: "enlarge a subnet", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.8.0.0/13}]}`, field: "spec.subnets", reason: appendOnly},
		{name: "shrink a subnet", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/17}]}`, field: "spec.subnets", reason: appendOnly},
		{name: "reorder subnets", old: old, new: `spec: {subnets: [{ipv4: 10.1.0.0/16}, {ipv4: 10.0.0.0/16}]}`, field: "spec.subnets", reason: appendOnly},
		{name: "prepend a subnet", old: old, new: `spec: {subnets: [{ipv4: 10.2.0.0/16}, {ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}]}`,
			field: "spec.subnets", reason: appendOnly},
		{name: "add a family to a subnet", old: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`, new: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}]}`,
			field: "spec.subnets", reason: appendOnly},
		{name: "remove a family of a subnet", old: `spec: {subnets: [{ipv4: 10.0.0.0/16, ipv6: "fd00::/112"}]}`, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}]}`,
			field: "spec.subnets", reason: appendOnly},
		{name: "append another family", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv6: "fd00::/112"}]}`,
			field: "spec.subnets", reason: families},
		{name: "append an overlap", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.1.4.0/24}]}`,
			field: "spec.subnets", reason: "10.1.4.0/24" + overlaps},
		{name: "append a subnet again", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.0.0.0/16}]}`,
			field: "spec.subnets", reason: "10.0.0.0/16" + overlaps},
		{name: "append host bits", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.2.0.1/16}]}`,
			field: "spec.subnets", reason: "10.2.0.1/16" + hostBits},
		{name: "append less than a block", old: old, new: `spec: {subnets: [{ipv4: 10.0.0.0/16}, {ipv4: 10.1.0.0/16}, {ipv4: 10.2.0.0/28}]}`,
			field: "spec.subnets", reason: "10.2.0.0/28" + smaller},
		{name: "append too many subnets", old: subnets(64), new: subnets(65), field: "spec.subnets", reason: "must have at most 64 items"},
	}
}

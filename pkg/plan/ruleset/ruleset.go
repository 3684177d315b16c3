// Package ruleset makes the tables of nftables of nodes, of clients and of routers of an Egress.
//
// It owns what the rules are, and the names of counters and sets. It must not know how a table reaches the kernel,
// nor where addresses and destinations come from.
package ruleset

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// family is a family of addresses. Rules have words in place of what differs between the two:
//
//	$f       ipv4       ipv6          also at the end of names
//	$ip      ip         ip6
//	$icmp    icmp       icmpv6
//	$ping    icmp       ipv6-icmp     the protocol
//	$hops    ip ttl     ip6 hoplimit
type family struct {
	dataplane.Family
	addr  string // type of a set's keys
	words *strings.Replacer
	// source and destination are the places of addresses in the header, and bits is their length, in bits.
	source, destination, bits int
}

// familyOf returns one of both.
func familyOf(f dataplane.Family) family {
	return families[slices.IndexFunc(families, func(known family) bool { return known.Family == f })]
}

// families are both, in the order in which rules have them. Loading an address of IPv6 costs more than
// passing its rules: in a router, where each packet meets many rules, IPv6 is the first.
var families = []family{
	{dataplane.IPv4, "ipv4_addr", strings.NewReplacer("$f", "ipv4", "$icmp", "icmp", "$ip", "ip", "$ping", "icmp", "$hops", "ip ttl"), 96, 128, 32},
	{dataplane.IPv6, "ipv6_addr", strings.NewReplacer("$f", "ipv6", "$icmp", "icmpv6", "$ip", "ip6", "$ping", "ipv6-icmp", "$hops", "ip6 hoplimit"), 64, 192, 128},
}

// rule adds a rule whose text has the family's words.
func (f family) rule(c *dataplane.Chain, comment, format string, args ...any) {
	c.Add(comment, f.words.Replace(fmt.Sprintf(format, args...)))
}

// set is a set of the family's addresses.
func (f family) set(name string, addrs []netip.Addr) dataplane.Set {
	s := dataplane.Set{Name: f.Named(name), Key: f.addr}
	for _, a := range f.of(addrs) {
		s.Elements = append(s.Elements, dataplane.Element{Key: dataplane.KeyOf(a)})
	}
	return s
}

// ranged is a set of the family's addresses in ranges, which are sorted and don't overlap.
func (f family) ranged(name string, ranges []netipx.IPRange) dataplane.Set {
	return dataplane.Set{Name: name, Key: f.addr, Interval: true, Ranges: f.ranges(ranges)}
}

// hashed is like ranged, with a name that has a hash of the ranges: other ranges are another set, which is made before
// the rules that use it. Tenants choose destinations: two with the same hash must be hard to find.
func (f family) hashed(name string, ranges []netipx.IPRange) dataplane.Set {
	s := f.ranged(f.Named(name), ranges)
	sum := sha256.New()
	hashRanges(sum, s.Ranges)
	s.Name += "_" + hex.EncodeToString(sum.Sum(nil)[:16])
	return s
}

// hashRanges adds ranges to a hash.
func hashRanges(h hash.Hash, ranges []netipx.IPRange) {
	for _, r := range ranges {
		h.Write([]byte{byte(r.From().BitLen())})
		h.Write(r.From().AsSlice())
		h.Write(r.To().AsSlice())
	}
}

// of are the addresses of the family.
func (f family) of(all []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return dataplane.FamilyOf(a) != f.Family })
}

// ranges are those of the family: they are sorted, which puts IPv4 before IPv6.
func (f family) ranges(all []netipx.IPRange) []netipx.IPRange {
	ipv6, _ := slices.BinarySearchFunc(all, netip.IPv6Unspecified(), func(r netipx.IPRange, a netip.Addr) int { return r.From().Compare(a) })
	if f.Family == dataplane.IPv4 {
		return all[:ipv6:ipv6]
	}
	return all[ipv6:]
}

// joined are the ranges of prefixes of the family, without some addresses.
func (f family) joined(prefixes []netip.Prefix, without []netip.Addr) []netipx.IPRange {
	var b netipx.IPSetBuilder
	for _, x := range prefixes {
		if dataplane.FamilyOf(x.Addr()) == f.Family {
			b.AddPrefix(x.Masked())
		}
	}
	for _, a := range without {
		b.Remove(a)
	}
	all, _ := b.IPSet() // an invalid prefix, of which it tells, is in no destination
	return all.Ranges()
}

// base returns a base chain.
func base(name, kind, hook string, priority int) dataplane.Chain {
	return dataplane.Chain{Name: name, Hook: &dataplane.Hook{Type: kind, Name: hook, Priority: priority}}
}

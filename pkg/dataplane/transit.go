package dataplane

import (
	"encoding/binary"
	"net/netip"
)

// Numbers and names that Coil reserves on a node for routers whose clients leave by the node's address.
const (
	// NftTableMasquerade is the name of the table that gives these clients' packets the node's address, in the family inet.
	NftTableMasquerade = "coil_masquerade"
	// TransitHops is the time to live, or hop limit, of packets that a router sends from a transit address: a node without the table doesn't
	// forward them. The table sets it to ForwardHops.
	TransitHops = 1
	ForwardHops = 64
	// Transits is how many transit addresses a node has.
	Transits = 1<<11 - 2
)

// transitRanges are link-local addresses (RFC 3927), which no router outside forwards, and unique local ones (RFC 4193).
var transitRanges = map[Family]netip.Prefix{
	IPv4: netip.MustParsePrefix("169.254.136.0/21"),
	IPv6: netip.MustParsePrefix("fd9c:41e7:6a5b::/64"),
}

// TransitAddr returns one of the node's transit addresses, numbered from 1 to Transits. A router sends its clients' packets from it to the node, and
// the node translates it to its own address. So the node can tell them from the router's own packets. The address exists on the router's link only.
func TransitAddr(f Family, n int) netip.Addr {
	bytes := transitRanges[f].Addr().AsSlice()
	low := bytes[len(bytes)-2:]
	binary.BigEndian.PutUint16(low, binary.BigEndian.Uint16(low)+uint16(n))
	a, _ := netip.AddrFromSlice(bytes) // of 4 or 16 bytes
	return a
}

// TransitNumber returns the number of a transit address; false if the address is none.
func TransitNumber(a netip.Addr) (n int, ok bool) {
	r := transitRanges[FamilyOf(a)]
	if !r.Contains(a) {
		return 0, false
	}
	bytes, first := a.AsSlice(), r.Addr().AsSlice()
	n = int(binary.BigEndian.Uint16(bytes[len(bytes)-2:])) - int(binary.BigEndian.Uint16(first[len(first)-2:]))
	return n, n >= 1 && n <= Transits && TransitAddr(FamilyOf(a), n) == a
}

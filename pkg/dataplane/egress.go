package dataplane

import (
	"crypto/sha1" // of names only
	"encoding/hex"
	"fmt"
	"net/netip"
)

// Numbers and names that Coil reserves in the network namespaces of clients and routers of an Egress.
const (
	// FouPort is the UDP port to which packets in FoU are sent (coil-egress --fou-port).
	FouPort = 5555

	// TableNarrow has a client's destinations inside PrivateRanges, TableWide all others.
	TableNarrow = 117
	TableWide   = 118

	// PriorityOriginating is that of the rule that answers, by the way they came, connections
	// from outside to a client.
	PriorityOriginating = 1700
	// PriorityLinkLocal is that of the rule that keeps link-local destinations off all routers.
	PriorityLinkLocal = 1800
	// PriorityPinned is that of the rules that keep single flows on a router.
	PriorityPinned = 1850
	// PriorityNarrow is that of the rule to TableNarrow.
	PriorityNarrow = 1900
	// PriorityPrivate is that of the first of the rules that keep PrivateRanges off TableWide.
	PriorityPrivate = 2000
	// PriorityWide is that of the rule to TableWide.
	PriorityWide = 2100
	// PriorityFiltered, PriorityOwn and PriorityUnfiltered are those of the rules by which a router
	// forwards nothing that its table of nftables hasn't seen.
	PriorityFiltered   = 2200
	PriorityOwn        = 2201
	PriorityUnfiltered = 2202

	// MetricUnreachable is that of the routes that make destinations unreachable as long as
	// no tunnel leads there: the worst there is.
	MetricUnreachable = 1<<32 - 1
	// MetricSink is that of the routes before these by which packets get lost, of Egresses that leave
	// connections from outside alone. For an answer the kernel looks for a way before anything can
	// mark it: where a destination is unreachable there is no packet to mark.
	MetricSink = MetricUnreachable - 1

	// MarkOriginating, within the mask of the same value, marks connections from outside to
	// a client, and its answers.
	MarkOriginating = 0x00100000
	// MarkFiltered is the mark that a router's table of nftables gives packets that may be forwarded.
	MarkFiltered = 0x00200000

	// NftTable is the table of nftables in each network namespace in which Coil filters or
	// translates, in the family inet.
	NftTable = "coil"
	// NftTableFloating is the name of a node's tables for floating addresses, of the families ip, ip6 and arp.
	NftTableFloating = "coil_floating"
	// NftTableProbes is the table of a node, in the family inet, while it looks whether it forwards packets of floating addresses.
	NftTableProbes = "coil_probes"

	// TunnelTTL is the time to live, or hop limit, of packets that a tunnel sends.
	TunnelTTL = 225
	// ReceiverIPv4 and ReceiverIPv6 take packets out of FoU that no tunnel expects: a router that
	// chooses its source ports isn't seen as the Service that its client sends to.
	ReceiverIPv4 = "coil_ipip4"
	ReceiverIPv6 = "coil_ipip6"
)

// RouterPriorities are those of a router's rules.
var RouterPriorities = []int{PriorityWide, PriorityFiltered, PriorityOwn, PriorityUnfiltered}

// PrivateRanges are the destinations that only an Egress for them captures, not one
// for a wider range (RFC 1918, RFC 4193).
var PrivateRanges = []netip.Prefix{
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("fc00::/7"),
}

// LinkLocalRanges are link-local destinations, which no Egress captures (RFC 3927, RFC 4291).
var LinkLocalRanges = []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10")}

// Tunnel is a point-to-point link that puts IPv4 into IPv4, or IPv6 into IPv6, into UDP
// (Foo over UDP). It is identified by Local and Remote, which are of one family.
type Tunnel struct {
	Local, Remote netip.Addr
	// SourcePort is the UDP port to send from; 0 lets the kernel choose one for each flow.
	SourcePort uint16
	// Port is the UDP port to send to.
	Port uint16
	// MTU is that of the inner packets.
	MTU int
	// Alias is that of the link, at most 255 bytes, which says whose the tunnel is; empty
	// leaves it as it is.
	Alias string
}

// TunnelLink is the link that a tunnel is.
type TunnelLink struct {
	Index int
	Name  string
	Alias string
}

// String prints the tunnel for logs and errors.
func (t Tunnel) String() string {
	port := "auto"
	if t.SourcePort != 0 {
		port = fmt.Sprint(t.SourcePort)
	}
	return fmt.Sprintf("fou %s -> %s sport %s dport %d mtu %d", t.Local, t.Remote, port, t.Port, t.MTU)
}

// Bytes that FoU adds to a packet: the outer IP header and that of UDP.
const (
	overheadIPv4 = 20 + 8
	overheadIPv6 = 40 + 8
)

// TunnelMTU returns the size of the largest packet that fits, in a tunnel of a family, into
// one of a link's MTU.
func TunnelMTU(f Family, linkMTU int) int {
	if f == IPv4 {
		return linkMTU - overheadIPv4
	}
	return linkMTU - overheadIPv6
}

// TunnelName returns the name of the link of a tunnel: fou4_ and the four bytes of the
// remote address, or fou6_ and four bytes of the SHA-1 of its sixteen. Two IPv6 addresses may
// so have one name: attempt, from 0 to 4, chooses other bytes.
func TunnelName(remote netip.Addr, attempt int) string {
	if remote.Is4() {
		a := remote.As4()
		return "fou4_" + hex.EncodeToString(a[:])
	}
	a := remote.As16()
	sum := sha1.Sum(a[:])
	return "fou6_" + hex.EncodeToString(sum[4*attempt:4*attempt+4])
}

package rtnl

import (
	"encoding/binary"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Parameters are those of a link below /proc/sys/net/ipv4/conf and /proc/sys/net/ipv6/conf
// that decide about a pod's packets.
type Parameters struct {
	// Forwarding, RPFilter and ARPFilter are IPv4's.
	Forwarding bool
	RPFilter   int
	ARPFilter  bool
	// HasIPv6 says that the kernel has IPv6 for this link; the others are zero without.
	HasIPv6        bool
	DisableIPv6    bool
	ForwardingIPv6 bool
	AcceptRA       int
	NoAutoAddress  bool
}

// LooseRPFilter is the value of rp_filter by which a packet is accepted if its source can
// be reached by any link (RFC 3704, section 2.4).
const LooseRPFilter = 2

// Indexes into the arrays of parameters of each family: IPV4_DEVCONF_ of linux/ip.h, which
// start at 1, and DEVCONF_ of linux/ipv6.h.
const (
	ipv4Forwarding  = 1
	ipv4RPFilter    = 8
	ipv4ARPFilter   = 13
	ipv6Forwarding  = 0
	ipv6AcceptRA    = 3
	ipv6DisableIPv6 = 26
)

// parse reads the parts by address family of a link (IFLA_AF_SPEC).
func (p *Parameters) parse(as *Attributes, spec []byte) {
	ipv4 := as.Find(spec, unix.AF_INET, unix.IFLA_INET_CONF)
	p.Forwarding = ipv4.element(ipv4Forwarding-1) != 0
	p.RPFilter = ipv4.element(ipv4RPFilter - 1)
	p.ARPFilter = ipv4.element(ipv4ARPFilter-1) != 0
	ipv6 := as.Find(spec, unix.AF_INET6, unix.IFLA_INET6_CONF)
	p.HasIPv6 = ipv6.Kind != 0
	p.ForwardingIPv6 = ipv6.element(ipv6Forwarding) != 0
	p.AcceptRA = ipv6.element(ipv6AcceptRA)
	p.DisableIPv6 = ipv6.element(ipv6DisableIPv6) != 0
	p.NoAutoAddress = as.Find(spec, unix.AF_INET6, unix.IFLA_INET6_ADDR_GEN_MODE).U8() == addrGenModeNone
}

// element is one of an array of 32-bit numbers; 0 if there are fewer.
func (a Attribute) element(i int) int {
	return int(int32(binary.NativeEndian.Uint32(a.bytes(4 * (i + 1))[4*i:])))
}

// parameters is the part of a change of a link by address family; nil if it changes none.
func (c LinkChange) parameters() *nl.RtAttr {
	var arp *nl.RtAttr
	if c.ARPFilter != nil {
		arp = number(ipv4ARPFilter, 0)
		if *c.ARPFilter {
			arp = number(ipv4ARPFilter, 1)
		}
	}
	ipv4 := c.Forwarding || c.RPFilter != 0 || arp != nil
	return when(c.NoAutoAddress || ipv4, nest(unix.IFLA_AF_SPEC,
		when(ipv4, nest(unix.AF_INET, nest(unix.IFLA_INET_CONF,
			when(c.Forwarding, number(ipv4Forwarding, 1)), numberIf(ipv4RPFilter, uint32(c.RPFilter)), arp))),
		when(c.NoAutoAddress, nest(unix.AF_INET6, nl.NewRtAttr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{addrGenModeNone})))))
}

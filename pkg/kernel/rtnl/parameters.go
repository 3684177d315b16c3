package rtnl

import (
	"encoding/binary"

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

// Indexes into what the kernel tells as one array each: IPV4_DEVCONF_ of linux/ip.h, which
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
func (p *Parameters) parse(spec []byte) error {
	families, err := attributes(spec)
	if err != nil {
		return err
	}
	for f := range families {
		parts, err := attributes(f.value)
		if err != nil {
			return err
		}
		for a := range parts {
			switch {
			case f.kind == unix.AF_INET && a.kind == unix.IFLA_INET_CONF:
				p.Forwarding = a.element(ipv4Forwarding-1) != 0
				p.RPFilter = a.element(ipv4RPFilter - 1)
				p.ARPFilter = a.element(ipv4ARPFilter-1) != 0
			case f.kind == unix.AF_INET6 && a.kind == unix.IFLA_INET6_CONF:
				p.HasIPv6 = true
				p.ForwardingIPv6 = a.element(ipv6Forwarding) != 0
				p.AcceptRA = a.element(ipv6AcceptRA)
				p.DisableIPv6 = a.element(ipv6DisableIPv6) != 0
			case f.kind == unix.AF_INET6 && a.kind == unix.IFLA_INET6_ADDR_GEN_MODE:
				p.NoAutoAddress = a.u8() == addrGenModeNone
			}
		}
	}
	return nil
}

// element is one of an array of 32-bit numbers; 0 if there are fewer.
func (a attribute) element(i int) int {
	if len(a.value) < 4*(i+1) {
		return 0
	}
	return int(int32(binary.NativeEndian.Uint32(a.value[4*i:])))
}

// parameters appends what a change of a link sets by address family.
func (e *encoder) parameters(c LinkChange) {
	ipv4 := c.Forwarding || c.RPFilter != 0 || c.ARPFilter != nil
	if !c.NoAutoAddress && !ipv4 {
		return
	}
	e.nest(unix.IFLA_AF_SPEC, func() {
		if ipv4 {
			e.nest(unix.AF_INET, func() {
				e.nest(unix.IFLA_INET_CONF, func() {
					if c.Forwarding {
						e.attrU32(ipv4Forwarding, 1)
					}
					if c.RPFilter != 0 {
						e.attrU32(ipv4RPFilter, uint32(c.RPFilter))
					}
					if c.ARPFilter != nil {
						var on uint32
						if *c.ARPFilter {
							on = 1
						}
						e.attrU32(ipv4ARPFilter, on)
					}
				})
			})
		}
		if c.NoAutoAddress {
			e.nest(unix.AF_INET6, func() {
				e.attr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{addrGenModeNone})
			})
		}
	})
}

package podnet_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// Frames as a pod sends them that may open packet sockets. Fields that only the one at the other end would look
// at, such as the checksums of UDP, aren't filled in.

// forger is the source of such frames, by which they are told from those of the pod's kernel.
var forger = net.HardwareAddr{2, 0, 0, 0, 0, 0x99}

// tag is a VLAN tag: IEEE 802.1Q or 802.1ad, and the number of the VLAN.
type tag struct{ kind, vlan uint16 }

// ethernet returns a frame.
func ethernet(dst net.HardwareAddr, kind uint16, payload []byte, tags ...tag) []byte {
	b := slices.Concat(dst, forger)
	for _, t := range tags {
		b = binary.BigEndian.AppendUint16(b, t.kind)
		b = binary.BigEndian.AppendUint16(b, t.vlan)
	}
	return append(binary.BigEndian.AppendUint16(b, kind), payload...)
}

// packet is an IP packet; mark is what tells it from others: the ID of IPv4, the flow label of IPv6.
type packet struct {
	src, dst netip.Addr
	proto    byte
	// options are those of IPv4's header.
	options []byte
	// fragment is the offset in units of 8 bytes, above bit 13 the flags, as in IPv4's header.
	fragment uint16
	payload  []byte
}

const moreFragments = 0x2000

func (p packet) bytes(mark uint16) []byte {
	if p.src.Is4() {
		header := len(p.options) + 20
		b := make([]byte, 20, header+len(p.payload))
		b[0], b[8], b[9] = byte(0x40|header/4), 64, p.proto
		binary.BigEndian.PutUint16(b[2:], uint16(header+len(p.payload)))
		binary.BigEndian.PutUint16(b[4:], mark)
		binary.BigEndian.PutUint16(b[6:], p.fragment)
		copy(b[12:], p.src.AsSlice())
		copy(b[16:], p.dst.AsSlice())
		b = append(b, p.options...)
		binary.BigEndian.PutUint16(b[10:], checksum(b))
		return append(b, p.payload...)
	}
	if p.fragment != 0 { // RFC 8200, section 4.5
		header := make([]byte, 8)
		header[0] = p.proto
		binary.BigEndian.PutUint16(header[2:], p.fragment<<3|p.fragment>>13&1)
		binary.BigEndian.PutUint32(header[4:], uint32(mark))
		p.proto, p.payload = unix.IPPROTO_FRAGMENT, append(header, p.payload...)
	}
	b := make([]byte, 40, 40+len(p.payload))
	binary.BigEndian.PutUint32(b, 0x60000000|uint32(mark))
	binary.BigEndian.PutUint16(b[4:], uint16(len(p.payload)))
	b[6], b[7] = p.proto, 255
	copy(b[8:], p.src.AsSlice())
	copy(b[24:], p.dst.AsSlice())
	return append(b, p.payload...)
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// kind is the EtherType of the packet.
func (p packet) kind() uint16 {
	if p.src.Is4() {
		return unix.ETH_P_IP
	}
	return unix.ETH_P_IPV6
}

// hardware is where a frame with the packet goes: to all, to a group, or to the host's end of the link.
func (p packet) hardware(host net.HardwareAddr) net.HardwareAddr {
	switch d := p.dst.AsSlice(); {
	case p.dst == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return net.HardwareAddr{255, 255, 255, 255, 255, 255}
	case p.dst.IsMulticast() && p.dst.Is4():
		return net.HardwareAddr{1, 0, 0x5e, d[1] & 0x7f, d[2], d[3]}
	case p.dst.IsMulticast():
		return net.HardwareAddr{0x33, 0x33, d[12], d[13], d[14], d[15]}
	}
	return host
}

// solicited is the group by which an address of IPv6 is asked for (RFC 4291, section 2.7.1).
func solicited(a netip.Addr) netip.Addr {
	g := netip.MustParseAddr("ff02::1:ff00:0").As16()
	d := a.As16()
	copy(g[13:], d[13:])
	return netip.AddrFrom16(g)
}

// neighbour is a message of neighbour discovery about an address, with the MAC address of the forger
// unless option is 0: 1 is that of a source, 2 that of a target (RFC 4861).
func neighbour(src, dst netip.Addr, kind, option byte, target netip.Addr) packet {
	b := make([]byte, 8, 32)
	b[0] = kind
	if kind == advertisement {
		b[4] = 0x20 // override
	}
	b = append(b, target.AsSlice()...)
	if option != 0 {
		b = append(append(b, option, 1), forger...)
	}
	pseudo := slices.Concat(src.AsSlice(), dst.AsSlice(), []byte{0, 0, 0, byte(len(b)), 0, 0, 0, unix.IPPROTO_ICMPV6})
	binary.BigEndian.PutUint16(b[2:], checksum(append(pseudo, b...)))
	return packet{src: src, dst: dst, proto: unix.IPPROTO_ICMPV6, payload: b}
}

const (
	solicitation, advertisement = 135, 136
	sourceMAC, targetMAC        = 1, 2
)

// arp is a message of ARP: 1 asks, 2 answers.
func arp(operation uint16, sender, target netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4}
	b = binary.BigEndian.AppendUint16(b, operation)
	return slices.Concat(b, forger, sender.AsSlice(), make([]byte, 6), target.AsSlice())
}

// inject sends frames by a pod's link.
func inject(t *testing.T, pod *netnstest.NS, frames ...[]byte) {
	t.Helper()
	testkit.Check(t, pod.Do(func() error {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		for _, f := range frames {
			if err := unix.Sendto(fd, f, 0, &unix.SockaddrLinklayer{Ifindex: link.Index}); err != nil {
				return err
			}
		}
		return nil
	}))
}

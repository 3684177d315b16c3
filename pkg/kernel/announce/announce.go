// Package announce tells the hosts of a link that an address is at this host, and hears what they say: by ARP (RFC 5227, section 3), and by
// neighbour discovery (RFC 4861, section 7.2.6).
//
// It owns the packets. It must not know why an address is here, nor whether the kernel answers for it.
package announce

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Announcement is an address that is reached by a link of this host.
type Announcement struct {
	// Link is the interface index of an Ethernet link, and MAC its address.
	Link int
	MAC  net.HardwareAddr
	Addr netip.Addr
}

// String names the address and its place.
func (a Announcement) String() string {
	return fmt.Sprintf("announce %s at %s by link %d", a.Addr, a.MAC, a.Link)
}

// Send sends announcements in a network namespace, each once. Hosts that have no entry for the address make none of it. A packet may be
// lost: repeat them after some seconds. The error joins why some couldn't be sent; a link that has stopped sending ends it.
func Send(ns *netns.NS, all []Announcement) error {
	if len(all) == 0 {
		return nil
	}
	return ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a packet socket: %w", err)
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &sendTimeout); err != nil {
			return fmt.Errorf("bound the time to send: %w", err)
		}
		var errs []error
		for _, a := range all {
			frames := a.frames()
			if len(frames) == 0 {
				errs = append(errs, fmt.Errorf("%s: not an Ethernet link, or no address", a))
			}
			for _, frame := range frames {
				if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: a.Link}); err != nil {
					errs = append(errs, fmt.Errorf("%s: %w", a, err))
					if errors.Is(err, unix.EAGAIN) {
						return errors.Join(errs...) // each of the others would take as long
					}
					break
				}
			}
		}
		return errors.Join(errs...)
	})
}

// sendTimeout bounds the time for one packet, on a link that has stopped sending.
var sendTimeout = unix.NsecToTimeval((100 * time.Millisecond).Nanoseconds())

// Sizes in bytes, types of Ethernet frames (IEEE 802 numbers), and the fields of ARP (RFC 826) and ICMPv6 (RFC 4443, RFC 4861).
const (
	macSize        = 6
	etherSize      = 2*macSize + 2
	etherARP       = 0x0806
	etherIPv6      = 0x86dd
	arpSize        = 28
	arpRequest     = 1
	arpReply       = 2
	ipv6Size       = 40
	advertSize     = 32
	protoICMPv6    = 58
	typeAdvert     = 136
	flagOverride   = 0x20
	optionTargetLL = 2
)

// frames are the Ethernet frames of an announcement. Of IPv4 they are a request and a reply: which of them a host takes differs.
func (a Announcement) frames() [][]byte {
	switch {
	case len(a.MAC) != macSize:
		return nil
	case a.Addr.Is4():
		return [][]byte{a.arp(arpRequest, nil), a.arp(arpReply, a.MAC)}
	case a.Addr.Is6() && !a.Addr.Is4In6():
		return [][]byte{a.advertisement()}
	}
	return nil
}

// arp is a broadcast with the address as sender and as target. The target's MAC address of a reply is the sender's: Linux ignores
// for a second what has that of the broadcast.
func (a Announcement) arp(operation uint16, target net.HardwareAddr) []byte {
	b := a.ether(net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, etherARP, arpSize)
	b = binary.BigEndian.AppendUint16(b, 1) // Ethernet
	b = binary.BigEndian.AppendUint16(b, 0x0800)
	b = append(b, macSize, 4)
	b = binary.BigEndian.AppendUint16(b, operation)
	b = append(append(b, a.MAC...), a.Addr.AsSlice()...)
	if target == nil {
		target = make(net.HardwareAddr, macSize)
	}
	return append(append(b, target...), a.Addr.AsSlice()...)
}

// advertisement goes to all nodes, with the address as its source, so that hosts see by whom it comes, and with the override flag.
func (a Announcement) advertisement() []byte {
	to := netip.MustParseAddr("ff02::1")
	b := a.ether(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, etherIPv6, ipv6Size+advertSize)
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, advertSize)
	b = append(b, protoICMPv6, 255) // the hop limit that receivers ask for
	b = append(append(b, a.Addr.AsSlice()...), to.AsSlice()...)
	body := append([]byte{typeAdvert, 0, 0, 0, flagOverride, 0, 0, 0}, a.Addr.AsSlice()...)
	body = append(append(body, optionTargetLL, 1), a.MAC...)
	binary.BigEndian.PutUint16(body[2:], checksum(a.Addr, to, body))
	return append(b, body...)
}

// ether is the header of a frame from the link, with room for its content.
func (a Announcement) ether(to net.HardwareAddr, kind uint16, size int) []byte {
	b := append(make([]byte, 0, etherSize+size), to...)
	return binary.BigEndian.AppendUint16(append(b, a.MAC...), kind)
}

// checksum is that of an ICMPv6 message (RFC 4443, section 2.3), whose size is even.
func checksum(from, to netip.Addr, message []byte) uint16 {
	b := append(append(from.AsSlice(), to.AsSlice()...), 0, 0, byte(len(message)>>8), byte(len(message)), 0, 0, 0, protoICMPv6)
	b = append(b, message...)
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

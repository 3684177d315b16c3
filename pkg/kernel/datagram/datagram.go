// Package datagram sends UDP datagrams out of a link, past the addresses, routes and rules of the link's network namespace.
//
// It owns the packet. It must not know what it is for.
package datagram

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Datagram is one, in a frame of Ethernet.
type Datagram struct {
	// MAC is the address on the link to which it goes.
	MAC net.HardwareAddr
	// From and To are of one family.
	From, To netip.Addr
	// Hops is how many routers may send it on.
	Hops    byte
	Content string
}

// Port is the source and the destination of all: discard (RFC 863), which answers nothing.
const Port = 9

// Sizes in bytes, and numbers of headers (IEEE 802, RFC 791, RFC 8200, RFC 768).
const (
	etherIPv4, etherIPv6 = 0x0800, 0x86dd
	ipv4Size, ipv6Size   = 20, 40
	udpSize              = 8
	protoUDP             = 17
	macSize              = 6
)

// Send sends a datagram in a network namespace, out of the link with an index.
func Send(ns *netns.NS, link int, d Datagram) error {
	frame, err := d.frame()
	if err != nil {
		return err
	}
	return ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open a packet socket: %w", err)
		}
		err = unix.Sendto(fd, frame, unix.MSG_DONTWAIT, &unix.SockaddrLinklayer{Ifindex: link})
		if err != nil {
			err = fmt.Errorf("send from %s to %s by link %d: %w", d.From, d.To, link, err)
		}
		return errors.Join(err, unix.Close(fd))
	})
}

func (d Datagram) frame() ([]byte, error) {
	if len(d.MAC) != macSize || !d.From.IsValid() || d.From.Is4() != d.To.Is4() || d.To.Is4In6() {
		return nil, fmt.Errorf("no datagram goes from %s to %s at %q", d.From, d.To, d.MAC)
	}
	udp := binary.BigEndian.AppendUint16(nil, Port)
	udp = binary.BigEndian.AppendUint16(udp, Port)
	udp = binary.BigEndian.AppendUint16(udp, uint16(udpSize+len(d.Content)))
	udp = append(append(udp, 0, 0), d.Content...)
	pseudo := append(append(d.From.AsSlice(), d.To.AsSlice()...), 0, protoUDP, byte(len(udp)>>8), byte(len(udp)))
	if sum := checksum(append(pseudo, udp...)); sum != 0 {
		binary.BigEndian.PutUint16(udp[6:], sum)
	} else {
		binary.BigEndian.PutUint16(udp[6:], 0xffff)
	}
	kind := uint16(etherIPv6)
	if d.From.Is4() {
		kind = etherIPv4
	}
	// The receiver doesn't look at the sender's MAC address. It is one of those that anybody may use.
	frame := append(append([]byte{}, d.MAC...), 2, 0, 0, 0, 0, 1)
	frame = binary.BigEndian.AppendUint16(frame, kind)
	return append(append(frame, d.header(len(udp))...), udp...), nil
}

// header is that of the network.
func (d Datagram) header(content int) []byte {
	if !d.From.Is4() {
		b := make([]byte, 8, ipv6Size)
		b[0], b[6], b[7] = 0x60, protoUDP, d.Hops
		binary.BigEndian.PutUint16(b[4:], uint16(content))
		return append(append(b, d.From.AsSlice()...), d.To.AsSlice()...)
	}
	b := make([]byte, 12, ipv4Size)
	b[0], b[8], b[9] = 0x45, d.Hops, protoUDP
	binary.BigEndian.PutUint16(b[2:], uint16(ipv4Size+content))
	b = append(append(b, d.From.AsSlice()...), d.To.AsSlice()...)
	binary.BigEndian.PutUint16(b[10:], checksum(b))
	return b
}

// checksum is that of RFC 1071.
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

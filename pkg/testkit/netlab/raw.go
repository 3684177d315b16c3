package netlab

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
)

// Raw sends packets of a protocol whose header and payload it is given, with the checksum of the transport layer.
type Raw struct {
	fd       int
	from, to netip.Addr
	protocol byte
	checksum int // offset
}

// NewRaw opens one in the namespace. The source is the one that the route says, from; checksum is the offset of the
// checksum in what is sent.
func (n *NS) NewRaw(from, to netip.Addr, protocol byte, checksum int) (*Raw, error) {
	family := unix.AF_INET
	if to.Is6() {
		family = unix.AF_INET6
	}
	fd, err := netns.In(n.NS, func() (int, error) { return unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol)) })
	return &Raw{fd, from, to, protocol, checksum}, err
}

// Send sends one packet.
func (r *Raw) Send(b []byte) error {
	binary.BigEndian.PutUint16(b[r.checksum:], 0)
	binary.BigEndian.PutUint16(b[r.checksum:], TransportChecksum(r.from, r.to, r.protocol, b))
	if r.to.Is4() {
		return unix.Sendto(r.fd, b, 0, &unix.SockaddrInet4{Addr: r.to.As4()})
	}
	return unix.Sendto(r.fd, b, 0, &unix.SockaddrInet6{Addr: r.to.As16()})
}

// Close gives the socket up.
func (r *Raw) Close() { unix.Close(r.fd) }

// TransportChecksum is that of a header of TCP, UDP or ICMPv6, whose checksum is zero, and what follows it.
func TransportChecksum(from, to netip.Addr, protocol byte, b []byte) uint16 {
	// The pseudo header of RFC 9293, section 3.1, and RFC 8200, section 8.1, give the same sum.
	pseudo := append(append(from.AsSlice(), to.AsSlice()...), 0, protocol, byte(len(b)>>8), byte(len(b)))
	return Checksum(append(pseudo, b...))
}

// Checksum is that of RFC 1071.
func Checksum(b []byte) uint16 {
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// TCPHeader is one without options.
func TCPHeader(sport, dport uint16, seq, ack uint32, flags byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, sport)
	b = binary.BigEndian.AppendUint16(b, dport)
	b = binary.BigEndian.AppendUint32(b, seq)
	b = binary.BigEndian.AppendUint32(b, ack)
	return append(b, 5<<4, flags, 0xff, 0xff, 0, 0, 0, 0)
}

package echo

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

const (
	// identifier is that of all requests, so that a connection tracker has one entry for all that
	// a host asks another one: answers are told apart by their secret.
	identifier = 0xc011
	secretSize = 16
	headerICMP = 8
	headerIPv4 = 20
	headerIPv6 = 40
	hopLimit   = 64
	maxMessage = 1500 // more than any answer has
)

// protocol is how one address family asks.
type protocol struct {
	family, icmp int
	ether        uint16
	ask, reply   byte
	// skip is the size of the header that a socket returns before the message.
	skip int
}

var protocols = map[dataplane.Family]protocol{
	dataplane.IPv4: {unix.AF_INET, unix.IPPROTO_ICMP, unix.ETH_P_IP, 8, 0, headerIPv4},
	dataplane.IPv6: {unix.AF_INET6, unix.IPPROTO_ICMPV6, unix.ETH_P_IPV6, 128, 129, 0},
}

// packet is a request in IP.
func (p protocol) packet(q Question, sequence uint16, secret []byte) []byte {
	m := []byte{p.ask, 0, 0, 0}
	m = binary.BigEndian.AppendUint16(m, identifier)
	m = binary.BigEndian.AppendUint16(m, sequence)
	m = append(m, secret...)
	from, to := q.From.AsSlice(), q.To.AsSlice()
	var b []byte
	if p.family == unix.AF_INET {
		binary.BigEndian.PutUint16(m[2:], checksum(m))
		b = binary.BigEndian.AppendUint16([]byte{0x45, 0}, uint16(headerIPv4+len(m)))
		b = append(b, 0, 0, 0x40, 0, hopLimit, byte(p.icmp), 0, 0) // must not be fragmented
		b = append(append(b, from...), to...)
		binary.BigEndian.PutUint16(b[10:], checksum(b))
		return append(b, m...)
	}
	pseudo := append(append([]byte(nil), from...), to...) // RFC 8200, 8.1
	pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(m)))
	pseudo = append(pseudo, 0, 0, 0, byte(p.icmp))
	binary.BigEndian.PutUint16(m[2:], checksum(append(pseudo, m...)))
	b = binary.BigEndian.AppendUint16([]byte{0x60, 0, 0, 0}, uint16(len(m)))
	b = append(b, byte(p.icmp), hopLimit)
	b = append(append(b, from...), to...)
	return append(b, m...)
}

// answer returns the sequence number of a message that a socket has read, if the message is an answer.
func (p protocol) answer(b, secret []byte) (sequence uint16, ok bool) {
	skip := p.skip
	if skip > 0 && len(b) > 0 {
		skip = int(b[0]&0xf) * 4 // there may be options
	}
	if len(b) < skip+headerICMP {
		return 0, false
	}
	m := b[skip:]
	return binary.BigEndian.Uint16(m[6:]), m[0] == p.reply && binary.BigEndian.Uint16(m[4:]) == identifier && bytes.Equal(m[headerICMP:], secret)
}

// checksum is that of RFC 1071 over an even number of bytes.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

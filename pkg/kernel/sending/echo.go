package sending

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Sizes of headers, and the longest message that is read.
const (
	headerICMP = 8
	headerIPv6 = 40
	maxMessage = 1500
)

// mostMessages bounds what is read at once: in a pod messages may come as quickly as they are read.
const mostMessages = 64

// icmp is ICMP of a family.
type icmp struct {
	number     int
	ask, reply byte
	// errors are the types of errors that say that a packet didn't get to its destination.
	errors []byte
}

// RFC 792 and RFC 4443: unreachable, and the hop limit was exceeded.
var (
	icmp4 = icmp{unix.IPPROTO_ICMP, 8, 0, []byte{3, 11}}
	icmp6 = icmp{unix.IPPROTO_ICMPV6, 128, 129, []byte{1, 3}}
)

func icmpOf(a netip.Addr) icmp {
	if a.Is4() {
		return icmp4
	}
	return icmp6
}

// echo sends echo requests. Each has an identifier of its own, from first on.
type echo struct {
	to      netip.Addr
	content []byte
	first   uint16
	socket  int
}

func (e *echo) open() (err error) {
	p := icmpOf(e.to)
	if e.socket, err = unix.Socket(domain(e.to), unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, p.number); err != nil {
		return fmt.Errorf("open a socket for ICMP: %w", err)
	}
	b := make([]byte, 2)
	_, _ = rand.Read(b) // never fails
	e.first = binary.NativeEndian.Uint16(b)
	return nil
}

func (e *echo) close() {
	if e.socket >= 0 {
		_ = unix.Close(e.socket)
	}
}

func (e *echo) send(i int) (uint16, error) {
	id := e.first + uint16(i)
	return id, unix.Sendto(e.socket, icmpOf(e.to).request(id, uint16(i+1), e.content), 0, sockaddr(netip.AddrPortFrom(e.to, 0)))
}

func (e *echo) sockets([]int) []unix.PollFd {
	return []unix.PollFd{{Fd: int32(e.socket), Events: unix.POLLIN}}
}

func (e *echo) read(_ int32, note func(int, Outcome)) {
	b := make([]byte, maxMessage)
	for range mostMessages {
		n, from, err := unix.Recvfrom(e.socket, b, 0)
		if err != nil {
			return // there is no more for now
		}
		if id, o, ok := e.hear(b[:n], addrPort(from).Addr()); ok {
			note(int(id-e.first), o)
		}
	}
}

// hear reads a message that the socket has received, and says to which identifier it is an answer.
func (e *echo) hear(b []byte, from netip.Addr) (id uint16, o Outcome, ok bool) {
	p := icmpOf(e.to)
	m := payload(b, e.to.Is4()) // the socket has the header of IPv4, and none of IPv6
	if len(m) < headerICMP {
		return 0, o, false
	}
	o.By = from
	if m[0] == p.reply {
		o.Answer = Replied
		return binary.BigEndian.Uint16(m[4:]), o, bytes.Equal(m[headerICMP:], e.content)
	}
	if !bytes.Contains(p.errors, m[:1]) {
		return 0, o, false
	}
	o.Answer, o.Type, o.Code = Failed, m[0], m[1]
	id, ok = e.quoted(m[headerICMP:])
	return id, o, ok
}

// quoted is the identifier of the packet that an error is about.
func (e *echo) quoted(b []byte) (uint16, bool) {
	p, at, size, proto := icmpOf(e.to), 16, 4, 9
	m := payload(b, true)
	if !e.to.Is4() {
		at, size, proto, m = 24, 16, 6, b[min(len(b), headerIPv6):]
	}
	if len(m) < headerICMP || int(b[proto]) != p.number || m[0] != p.ask {
		return 0, false
	}
	return binary.BigEndian.Uint16(m[4:]), bytes.Equal(b[at:at+size], e.to.AsSlice())
}

// payload cuts the header of IPv4, if there is one.
func payload(b []byte, header bool) []byte {
	if !header {
		return b
	}
	const shortest = 20
	if len(b) < shortest || int(b[0]&0xf)*4 < shortest {
		return nil
	}
	return b[min(len(b), int(b[0]&0xf)*4):]
}

// request is an echo request. The kernel makes the checksum of ICMPv6, and of ICMP none.
func (p icmp) request(id, sequence uint16, content []byte) []byte {
	m := []byte{p.ask, 0, 0, 0}
	m = binary.BigEndian.AppendUint16(m, id)
	m = binary.BigEndian.AppendUint16(m, sequence)
	m = append(m, content...)
	var sum uint32 // RFC 1071, over an even number of bytes
	for i := 0; i+1 < len(m); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(m[i:]))
	}
	for sum>>16 > 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(m[2:], ^uint16(sum))
	return m
}

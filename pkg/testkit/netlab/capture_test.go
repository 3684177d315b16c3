package netlab

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// The addresses, protocol, ports and flags of a packet are those of its headers, whatever their length, and what isn't IP
// is no packet.
func TestParse(t *testing.T) {
	src4, dst4 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	src6, dst6 := netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")
	header4 := func(first, fragment, protocol byte, options ...byte) []byte {
		b := append([]byte{first, 0, 0, 99, 0, 0, 0, fragment, 64, protocol, 0, 0}, src4.AsSlice()...)
		return append(append(b, dst4.AsSlice()...), options...)
	}
	header6 := func(protocol byte) []byte {
		b := append([]byte{0x60, 0, 0, 0, 0, 59, protocol, 64}, src6.AsSlice()...)
		return append(b, dst6.AsSlice()...)
	}
	udp := []byte{0x15, 0xb3, 0, 53, 0, 8, 0x12, 0x34}
	for _, c := range []struct {
		name string
		b    []byte
		want Packet
	}{
		{"UDP", append(header4(0x45, 0, unix.IPPROTO_UDP), udp...), Packet{Src: src4, Dst: dst4, Protocol: unix.IPPROTO_UDP, Size: 99, SPort: 5555, DPort: 53, Checksum: 0x1234}},
		{"with options", append(header4(0x46, 0, unix.IPPROTO_UDP, 1, 1, 1, 1), udp...), Packet{Src: src4, Dst: dst4, Protocol: unix.IPPROTO_UDP, Size: 99, SPort: 5555, DPort: 53, Checksum: 0x1234}},
		{"later fragment", append(header4(0x45, 1, unix.IPPROTO_UDP), udp...), Packet{Src: src4, Dst: dst4, Protocol: unix.IPPROTO_UDP, Size: 99}},
		{"TCP over IPv6", append(header6(unix.IPPROTO_TCP), TCPHeader(5555, 80, 1, 2, 0x12)...), Packet{Src: src6, Dst: dst6, Protocol: unix.IPPROTO_TCP, Size: 99, SPort: 5555, DPort: 80, TCPFlags: 0x12}},
		{"ICMP", append(header4(0x45, 0, unix.IPPROTO_ICMP), udp...), Packet{Src: src4, Dst: dst4, Protocol: unix.IPPROTO_ICMP, Size: 99}},
		{"ARP", append([]byte{0, 1, 8, 0, 6, 4, 0, 1}, make([]byte, 40)...), Packet{}},
		{"cut off", header6(unix.IPPROTO_TCP)[:39], Packet{}},
	} {
		if p, ok := parse(c.b); p != c.want || ok != c.want.Src.IsValid() {
			t.Errorf("%s: %+v, %t; want %+v", c.name, p, ok, c.want)
		}
	}
}

// The checksum of a header that has its checksum is zero (RFC 1071).
func TestChecksum(t *testing.T) {
	for _, b := range [][]byte{{1, 2, 0, 0, 5, 6}, {0xff, 0xff, 0, 0, 0xff, 0xfe, 7}} {
		sum := Checksum(b)
		b[2], b[3] = byte(sum>>8), byte(sum)
		if got := Checksum(b); got != 0 {
			t.Errorf("%x: %x is left", b, got)
		}
	}
}

package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Request is one netlink message that is ready to be sent. Its text, for errors,
// is what "ip" would be asked for.
type Request struct {
	kind, flags uint16
	body        []byte
	text        func() string
}

// NewRequest returns a message of another netlink protocol than rtnetlink: its type, its
// flags beside those of all requests, and what follows the header of netlink(7). text
// says what it asks for, for errors.
func NewRequest(kind, flags uint16, body []byte, text func() string) Request {
	return Request{kind, flags, body, text}
}

// String says what the request asks for.
func (r Request) String() string { return r.text() }

// encoder appends the parts of a netlink message, in the byte order of the host
// and aligned to 4 bytes, as netlink(7) wants it.
type encoder struct{ b []byte }

func (e *encoder) u8(v ...uint8) { e.b = append(e.b, v...) }
func (e *encoder) u16(v uint16)  { e.b = binary.NativeEndian.AppendUint16(e.b, v) }
func (e *encoder) u32(v uint32)  { e.b = binary.NativeEndian.AppendUint32(e.b, v) }
func (e *encoder) pad()          { e.b = append(e.b, make([]byte, align(len(e.b))-len(e.b))...) }

// attr appends an attribute.
func (e *encoder) attr(kind uint16, value []byte) {
	e.u16(uint16(unix.SizeofRtAttr + len(value)))
	e.u16(kind)
	e.b = append(e.b, value...)
	e.pad()
}

func (e *encoder) attrU32(kind uint16, v uint32) {
	e.attr(kind, binary.NativeEndian.AppendUint32(nil, v))
}

func (e *encoder) attrU16(kind uint16, v uint16) {
	e.attr(kind, binary.NativeEndian.AppendUint16(nil, v))
}

// attrPort appends a number of 16 bits in the network's byte order.
func (e *encoder) attrPort(kind uint16, v uint16) {
	e.attr(kind, binary.BigEndian.AppendUint16(nil, v))
}

// attrString appends a string with its terminating zero.
func (e *encoder) attrString(kind uint16, s string) {
	e.attr(kind, append([]byte(s), 0))
}

func (e *encoder) attrAddr(kind uint16, a netip.Addr) {
	e.attr(kind, a.AsSlice())
}

// nest appends an attribute that contains what fill appends.
func (e *encoder) nest(kind uint16, fill func()) {
	start := len(e.b)
	e.u16(0)
	e.u16(kind | unix.NLA_F_NESTED)
	fill()
	binary.NativeEndian.PutUint16(e.b[start:], uint16(len(e.b)-start))
}

// align rounds up to the alignment of netlink messages and attributes.
func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }

// attribute is one attribute of a message that was received.
type attribute struct {
	kind  uint16
	value []byte
}

// attributes returns the attributes of a message; none if it is malformed. A dump has
// dozens of them for each of thousands of objects, so that they aren't copied.
func attributes(b []byte) (iter.Seq[attribute], error) {
	if err := EachAttribute(b, func(uint16, []byte) error { return nil }); err != nil {
		return func(func(attribute) bool) {}, err
	}
	return func(yield func(attribute) bool) {
		_ = EachAttribute(b, func(kind uint16, value []byte) error {
			if !yield(attribute{kind, value}) {
				return errEnough
			}
			return nil
		})
	}, nil
}

// errEnough ends EachAttribute.
var errEnough = errors.New("the rest isn't asked for")

// EachAttribute calls each with the attributes that b consists of, without copying, until
// it returns an error.
func EachAttribute(b []byte, each func(kind uint16, value []byte) error) error {
	for len(b) >= unix.SizeofRtAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return fmt.Errorf("attribute of %d bytes in %d bytes: %w", n, len(b), errMalformed)
		}
		kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		if err := each(kind, b[unix.SizeofRtAttr:n]); err != nil {
			return err
		}
		b = b[min(align(n), len(b)):]
	}
	return nil
}

// AppendAttribute appends an attribute to b, which is aligned.
func AppendAttribute(b []byte, kind uint16, value []byte) []byte {
	e := encoder{b}
	e.attr(kind, value)
	return e.b
}

func (a attribute) u8() uint8 {
	if len(a.value) < 1 {
		return 0
	}
	return a.value[0]
}

// port reads a number of 16 bits in the network's byte order.
func (a attribute) port() uint16 {
	if len(a.value) < 2 {
		return 0
	}
	return binary.BigEndian.Uint16(a.value)
}

func (a attribute) u16() uint16 {
	if len(a.value) < 2 {
		return 0
	}
	return binary.NativeEndian.Uint16(a.value)
}

func (a attribute) u32() uint32 {
	if len(a.value) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(a.value)
}

func (a attribute) string() string { return unix.ByteSliceToString(a.value) }

func (a attribute) addr() netip.Addr {
	addr, _ := netip.AddrFromSlice(a.value)
	return addr
}

// zero says whether all bytes of the value are zero.
func (a attribute) zero() bool {
	for _, b := range a.value {
		if b != 0 {
			return false
		}
	}
	return true
}

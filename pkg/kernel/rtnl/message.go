package rtnl

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Request is one netlink message that is ready to be sent. Its text, for errors,
// is the command that ip(8) would be given.
type Request struct {
	kind, flags uint16
	body        []byte
	text        func() string
}

// NewRequest returns a message: its type, its flags beside those of all requests, and the bytes
// after the header of netlink(7). The format and its arguments name the request in errors.
func NewRequest(kind, flags uint16, body []byte, format string, args ...any) Request {
	return Request{kind, flags, body, text(format, args...)}
}

// String is the text of the request.
func (r Request) String() string { return r.text() }

// The flags by which objects are made.
const (
	create  = unix.NLM_F_CREATE | unix.NLM_F_EXCL
	replace = unix.NLM_F_CREATE | unix.NLM_F_REPLACE
)

// newRequest returns a message of rtnetlink: a header of its type, and attributes, of which nil
// is none. The library would send it by itself; it is sent together with others.
func newRequest(kind, flags uint16, text func() string, header nl.NetlinkRequestData, attrs ...*nl.RtAttr) Request {
	body := bytes.Clone(header.Serialize())
	for _, a := range attrs {
		if a != nil {
			body = append(body, a.Serialize()...)
		}
	}
	return Request{kind, flags, body, text}
}

// text formats the text of a request when it is asked for.
func text(format string, args ...any) func() string {
	return func() string { return fmt.Sprintf(format, args...) }
}

// NativeEndian of the library sets a variable at its first call, without a lock. A call during initialisation comes before
// all goroutines, and so avoids a data race.
var _ = nl.NativeEndian()

// number is an attribute of 32 bits, numberIf one unless it is 0.
func number(kind int, v uint32) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint32Attr(v)) }

func numberIf(kind int, v uint32) *nl.RtAttr { return when(v != 0, number(kind, v)) }

// word is an attribute with a string and its terminating zero, wordIf one unless it is empty.
func word(kind int, s string) *nl.RtAttr { return nl.NewRtAttr(kind, nl.ZeroTerminated(s)) }

func wordIf(kind int, s string) *nl.RtAttr { return when(s != "", word(kind, s)) }

// address is an attribute with an address, or nil if that isn't valid.
func address(kind int, a netip.Addr) *nl.RtAttr {
	return when(a.IsValid(), nl.NewRtAttr(kind, a.AsSlice()))
}

// nest is an attribute that contains others, of which nil is none.
func nest(kind int, inner ...*nl.RtAttr) *nl.RtAttr {
	outer := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
	for _, a := range inner {
		if a != nil {
			outer.AddChild(a)
		}
	}
	return outer
}

// when is the attribute, or nil unless it is needed.
func when(needed bool, a *nl.RtAttr) *nl.RtAttr {
	if needed {
		return a
	}
	return nil
}

// align rounds up to the alignment of netlink messages and attributes.
func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }

// Attribute is one attribute of a message that was received. A number that isn't there is 0.
type Attribute struct {
	Kind  uint16
	Value []byte
}

// Attributes reads the attributes of messages. Err is the error of the first malformed one, at
// which reading ends. Values aren't copied, since a dump has dozens for each of thousands of
// objects. The library's reader copies, and panics at an attribute that is too short.
type Attributes struct{ Err error }

// In yields the attributes that b consists of.
func (as *Attributes) In(b []byte) iter.Seq[Attribute] {
	return func(yield func(Attribute) bool) {
		for a, rest, ok := as.next(b); ok && yield(a); {
			a, rest, ok = as.next(rest)
		}
	}
}

// next cuts the first attribute off b, if there is one.
func (as *Attributes) next(b []byte) (a Attribute, rest []byte, ok bool) {
	if len(b) < unix.SizeofRtAttr || as.Err != nil {
		return a, nil, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < unix.SizeofRtAttr || n > len(b) {
		as.Err = fmt.Errorf("attribute of %d bytes in %d bytes: %w", n, len(b), errMalformed)
		return a, nil, false
	}
	kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
	return Attribute{kind, b[unix.SizeofRtAttr:n]}, b[min(align(n), len(b)):], true
}

// Cut returns the header of a message, which has a size, the attributes that follow it, and their reader.
func Cut(body []byte, size int) (header, attributes []byte, as Attributes) {
	if len(body) < size {
		as.Err = fmt.Errorf("object in %d bytes: %w", len(body), errMalformed)
		body = make([]byte, size)
	}
	return body[:size], body[size:], as
}

// Find returns the first attribute of a kind in b. Of several kinds each is nested in the one before. The Attribute has
// kind 0 if there is none.
func (as *Attributes) Find(b []byte, kinds ...uint16) (found Attribute) {
	for _, kind := range kinds {
		found = Attribute{}
		for a, rest, ok := as.next(b); ok && found.Kind == 0; a, rest, ok = as.next(rest) {
			if a.Kind == kind {
				found = a
			}
		}
		b = found.Value
	}
	return found
}

// AppendAttribute appends an attribute to b, which is aligned.
func AppendAttribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
	return append(b, make([]byte, align(len(b))-len(b))...)
}

// bytes are the first n of the value, zeros if it has fewer.
func (a Attribute) bytes(n int) []byte {
	if len(a.Value) < n {
		return make([]byte, n)
	}
	return a.Value[:n]
}

// U8 reads a number of 8 bits.
func (a Attribute) U8() uint8 { return a.bytes(1)[0] }

// U16 reads a number of 16 bits.
func (a Attribute) U16() uint16 { return binary.NativeEndian.Uint16(a.bytes(2)) }

// Port reads a number of 16 bits in the network's byte order.
func (a Attribute) Port() uint16 { return binary.BigEndian.Uint16(a.bytes(2)) }

// U32 reads a number of 32 bits.
func (a Attribute) U32() uint32 { return binary.NativeEndian.Uint32(a.bytes(4)) }

// BE32 reads a number of 32 bits in the network's byte order.
func (a Attribute) BE32() uint32 { return binary.BigEndian.Uint32(a.bytes(4)) }

// BE64 reads a number of 64 bits in the network's byte order.
func (a Attribute) BE64() uint64 { return binary.BigEndian.Uint64(a.bytes(8)) }

// Text reads a string.
func (a Attribute) Text() string { return unix.ByteSliceToString(a.Value) }

// Addr reads an address, which isn't valid if it has another size.
func (a Attribute) Addr() netip.Addr {
	addr, _ := netip.AddrFromSlice(a.Value)
	return addr
}

// zero says whether all bytes of the value are zero.
func (a Attribute) zero() bool { return len(bytes.Trim(a.Value, "\x00")) == 0 }

// Package frames has what two nodes say about connections of floating addresses: frames on a connection, and flows in them.
//
// It owns their form. It must not know who says them, and when: packages handover and standby do.
package frames

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
)

// Kind is what a frame is for. A frame has the length of the rest, four bytes, its kind, and a payload.
type Kind byte

const (
	// Offer begins a hand-over: the Address.
	Offer Kind = iota + 1
	// Opened are flows that the receiver may not have yet.
	Opened
	// Changed are flows that it has.
	Changed
	// End ends a pass, or a turn.
	End
	// Ready is the receiver's answer to Offer and End.
	Ready
	// Refused is the receiver's last word, and says why.
	Refused
	// Follow begins a connection for flows that are copied all the time.
	Follow
	// Begin comes before all flows of an address: the Address.
	Begin
	// Complete comes after all flows of an address: the Address.
	Complete
	// Ended are flows that are over.
	Ended
)

const (
	// MostPayload is how long the payload of a frame may be.
	MostPayload = 64 << 10
	// FlowsPerFrame is how many flows a frame has at most.
	FlowsPerFrame = 512
	// MostReason is how long a refusal may be.
	MostReason = 300
)

// ErrFrame is the error of what can't be read.
var ErrFrame = errors.New("the frame can't be understood")

// Write writes a frame.
func Write(w io.Writer, k Kind, payload []byte) error {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 5+len(payload)), uint32(1+len(payload)))
	_, err := w.Write(append(append(b, byte(k)), payload...))
	return err
}

// Read reads a frame. The payload is valid until the next one is read into the same buffer.
func Read(r io.Reader, buffer *[]byte) (Kind, []byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n < 1 || n-1 > MostPayload {
		return 0, nil, fmt.Errorf("%w: it has %d bytes", ErrFrame, n)
	}
	if cap(*buffer) < MostPayload {
		*buffer = make([]byte, MostPayload)
	}
	payload := (*buffer)[:n-1]
	_, err := io.ReadFull(r, payload)
	return Kind(head[4]), payload, err
}

// A flow is, in this order: protocol; 4 or 6; source, destination and known source, each address before its port; timeout; mark; and
// the five bytes of TCP.
const (
	sizeIPv4 = 2 + 3*(4+2) + 4 + 4 + 5
	sizeIPv6 = 2 + 3*(16+2) + 4 + 4 + 5
)

// AppendFlow appends a flow to a payload.
func AppendFlow(b []byte, f conntrack.Flow) []byte {
	version := byte(4)
	if f.Src.Addr().Is6() {
		version = 6
	}
	b = append(b, f.Protocol, version)
	for _, a := range []netip.AddrPort{f.Src, f.Dst, f.Translated} {
		b = append(b, a.Addr().AsSlice()...)
		b = binary.BigEndian.AppendUint16(b, a.Port())
	}
	b = binary.BigEndian.AppendUint32(b, f.Timeout)
	b = binary.BigEndian.AppendUint32(b, f.Mark)
	return append(b, f.TCP.State, f.TCP.ScaleOrig, f.TCP.ScaleReply, f.TCP.FlagsOrig, f.TCP.FlagsReply)
}

// ParseFlows returns the flows of a payload. Package conntrack checks what a flow may be.
func ParseFlows(b []byte) ([]conntrack.Flow, error) {
	flows := make([]conntrack.Flow, 0, len(b)/sizeIPv4)
	for len(b) > 0 {
		size, length := 0, 0
		if len(b) > 1 {
			size, length = map[byte]int{4: sizeIPv4, 6: sizeIPv6}[b[1]], map[byte]int{4: 4, 6: 16}[b[1]]
		}
		if size == 0 || len(b) < size || len(flows) == FlowsPerFrame {
			return nil, fmt.Errorf("%w: after %d flows", ErrFrame, len(flows))
		}
		f := conntrack.Flow{Protocol: b[0]}
		rest := b[2:size]
		for _, to := range []*netip.AddrPort{&f.Src, &f.Dst, &f.Translated} {
			a, _ := netip.AddrFromSlice(rest[:length])
			*to = netip.AddrPortFrom(a, binary.BigEndian.Uint16(rest[length:]))
			rest = rest[length+2:]
		}
		f.Timeout, f.Mark = binary.BigEndian.Uint32(rest), binary.BigEndian.Uint32(rest[4:])
		if tcp := rest[8:]; f.Protocol == unix.IPPROTO_TCP {
			f.TCP = conntrack.TCP{State: tcp[0], ScaleOrig: tcp[1], ScaleReply: tcp[2], FlagsOrig: tcp[3], FlagsReply: tcp[4]}
		}
		flows, b = append(flows, f), b[size:]
	}
	return flows, nil
}

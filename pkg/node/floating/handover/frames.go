package handover

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
)

// kind is what a frame is for. A frame has the length of the rest, four bytes, its kind, and a payload.
type kind byte

const (
	// offer begins a hand-over: the address, as JSON.
	offer kind = iota + 1
	// opened are flows that the receiver may not have yet, changed are flows that it has.
	opened
	changed
	// end ends a pass, or a turn.
	end
	// ready is the receiver's answer to offer and end.
	ready
	// refused is the receiver's last word, and says why.
	refused
	// follow begins a connection for flows that are copied all the time.
	follow
	// begin and complete are about all flows of an address: the address, as JSON.
	begin
	complete
	// ended are flows that are over.
	ended
)

const (
	// mostPayload is how long the payload of a frame may be.
	mostPayload = 64 << 10
	// flowsPerFrame is how many flows a frame has at most.
	flowsPerFrame = 512
	// mostReason is how long a refusal may be.
	mostReason = 300
)

var errFrame = errors.New("the frame can't be understood")

// writeFrame writes a frame.
func writeFrame(w io.Writer, k kind, payload []byte) error {
	b := binary.BigEndian.AppendUint32(make([]byte, 0, 5+len(payload)), uint32(1+len(payload)))
	_, err := w.Write(append(append(b, byte(k)), payload...))
	return err
}

// readFrame reads a frame. The payload is valid until the next one is read into the same buffer.
func readFrame(r io.Reader, buffer *[]byte) (kind, []byte, error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n < 1 || n-1 > mostPayload {
		return 0, nil, fmt.Errorf("%w: it has %d bytes", errFrame, n)
	}
	if cap(*buffer) < mostPayload {
		*buffer = make([]byte, mostPayload)
	}
	payload := (*buffer)[:n-1]
	_, err := io.ReadFull(r, payload)
	return kind(head[4]), payload, err
}

// A flow is, in this order: protocol; 4 or 6; source, destination and known source, each address before its port; timeout; mark; and
// the five bytes of TCP.
const (
	sizeIPv4 = 2 + 3*(4+2) + 4 + 4 + 5
	sizeIPv6 = 2 + 3*(16+2) + 4 + 4 + 5
)

func appendFlow(b []byte, f conntrack.Flow) []byte {
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

// parseFlows returns the flows of a payload. Package conntrack checks what a flow may be.
func parseFlows(b []byte) ([]conntrack.Flow, error) {
	flows := make([]conntrack.Flow, 0, len(b)/sizeIPv4)
	for len(b) > 0 {
		size, length := 0, 0
		if len(b) > 1 {
			size, length = map[byte]int{4: sizeIPv4, 6: sizeIPv6}[b[1]], map[byte]int{4: 4, 6: 16}[b[1]]
		}
		if size == 0 || len(b) < size || len(flows) == flowsPerFrame {
			return nil, fmt.Errorf("%w: after %d flows", errFrame, len(flows))
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

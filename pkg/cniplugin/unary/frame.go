package unary

import (
	"encoding/binary"
	"fmt"
	"io"
)

// HTTP/2 as far as one client call needs it. golang.org/x/net/http2 has a Framer, but
// its package links net/http and crypto/tls, which costs a process that lives for
// one call a sixth of its time.

// preface is the beginning of a connection of HTTP/2 (RFC 9113, section 3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

type frameType uint8

// Types of frames (RFC 9113, section 6).
const (
	frameData         frameType = 0
	frameHeaders      frameType = 1
	frameRSTStream    frameType = 3
	frameSettings     frameType = 4
	framePushPromise  frameType = 5
	framePing         frameType = 6
	frameGoAway       frameType = 7
	frameWindowUpdate frameType = 8
	frameContinuation frameType = 9
)

// Flags of frames; 1 means another thing by type.
const (
	flagEndStream  = 0x01 // DATA, HEADERS
	flagAck        = 0x01 // SETTINGS, PING
	flagEndHeaders = 0x04 // HEADERS, CONTINUATION
	flagPadded     = 0x08 // DATA, HEADERS
	flagPriority   = 0x20 // HEADERS
)

// Identifiers of settings (RFC 9113, section 6.5.2).
const (
	settingEnablePush    = 2
	settingInitialWindow = 4
	settingMaxFrameSize  = 5
)

const (
	frameHeaderSize = 9
	// defaultMaxFrame is the payload that each side takes until it says otherwise. We
	// don't.
	defaultMaxFrame = 16384
	// defaultWindow is the flow-control window of a connection, and of a stream
	// until SETTINGS says otherwise.
	defaultWindow = 65535
	maxWindow     = 1<<31 - 1
)

// frame is a frame that was read.
type frame struct {
	kind    frameType
	flags   uint8
	stream  uint32
	payload []byte
}

func (f frame) has(flag uint8) bool { return f.flags&flag != 0 }

// appendSetting appends one setting of a SETTINGS frame.
func appendSetting(b []byte, id uint16, value uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(b, id), value)
}

// readFrame reads a frame. A frame that is longer than we allow is an error of the
// protocol; a peer that speaks another protocol usually ends here.
func readFrame(r io.Reader) (frame, error) {
	var h [frameHeaderSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return frame{}, err
	}
	length := int(h[0])<<16 | int(h[1])<<8 | int(h[2])
	if length > defaultMaxFrame {
		return frame{}, protocolError{fmt.Sprintf("frame of %d bytes", length)}
	}
	payload := make([]byte, length)
	if _, err := io.ReadFull(r, payload); err != nil {
		return frame{}, err
	}
	return frame{
		kind:    frameType(h[3]),
		flags:   h[4],
		stream:  binary.BigEndian.Uint32(h[5:]) & maxWindow, // the first bit is reserved
		payload: payload,
	}, nil
}

// unpad removes the padding of a DATA or HEADERS frame.
func (f frame) unpad() ([]byte, error) {
	p := f.payload
	if !f.has(flagPadded) {
		return p, nil
	}
	if len(p) == 0 || int(p[0]) >= len(p) {
		return nil, protocolError{"padding that is longer than its frame"}
	}
	return p[1 : len(p)-int(p[0])], nil
}

// protocolError is a peer that doesn't keep to HTTP/2.
type protocolError struct{ what string }

func (e protocolError) Error() string { return "not HTTP/2: " + e.what }

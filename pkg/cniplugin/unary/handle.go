package unary

import (
	"encoding/binary"
	"strconv"
	"strings"

	"golang.org/x/net/http2/hpack"
)

// maxHeaders bounds a block of headers, compressed and not, in bytes.
const maxHeaders = 1 << 20

// handle acts on a frame; done when the server ended the call well.
func (l *call) handle(f frame) (done bool, err error) {
	if !l.greeted && (f.kind != frameSettings || f.has(flagAck)) {
		return false, protocolError{"server didn't begin with SETTINGS"}
	}
	if l.inBlock != (f.kind == frameContinuation) {
		return false, protocolError{"CONTINUATION out of place"}
	}
	switch f.kind {
	case frameData, frameHeaders, frameContinuation, frameRSTStream:
		if f.stream != stream {
			return false, protocolError{"frame of stream " + strconv.Itoa(int(f.stream))}
		}
	case frameSettings, framePing, frameGoAway:
		if f.stream != 0 {
			return false, protocolError{"frame of the connection on a stream"}
		}
	}
	switch f.kind {
	case frameData:
		return l.data(f)
	case frameHeaders, frameContinuation:
		return l.headerBlock(f)
	case frameRSTStream:
		if len(f.payload) != 4 {
			return false, protocolError{"RST_STREAM of a wrong length"}
		}
		code := binary.BigEndian.Uint32(f.payload)
		return false, broken(codeOfReset(code), "server reset the stream (code %d)", code)
	case frameSettings:
		return false, l.settings(f)
	case framePing:
		if len(f.payload) != 8 {
			return false, protocolError{"PING of a wrong length"}
		}
		if !f.has(flagAck) {
			l.enqueue(framePing, flagAck, 0, f.payload)
		}
	case frameGoAway:
		return false, goAway(f.payload)
	case frameWindowUpdate:
		return false, l.windowUpdate(f)
	case framePushPromise:
		return false, protocolError{"PUSH_PROMISE"}
	}
	return false, nil // types that we don't know are ignored, as PRIORITY is
}

// settings applies the server's SETTINGS and answers them.
func (l *call) settings(f frame) error {
	if f.has(flagAck) {
		return nil
	}
	if len(f.payload)%6 != 0 {
		return protocolError{"SETTINGS of a wrong length"}
	}
	for p := f.payload; len(p) > 0; p = p[6:] {
		value := binary.BigEndian.Uint32(p[2:])
		switch binary.BigEndian.Uint16(p) {
		case settingInitialWindow:
			if value > maxWindow {
				return protocolError{"window that is too large"}
			}
			// Bytes that were sent already count (RFC 9113, section 6.9.2).
			l.streamWindow += int64(value) - l.initialWindow
			l.initialWindow = int64(value)
		case settingMaxFrameSize:
			if value < defaultMaxFrame || value >= 1<<24 {
				return protocolError{"maximal frame that can't be"}
			}
			l.maxFrame = int(value)
		}
	}
	l.greeted = true
	l.enqueue(frameSettings, flagAck, 0, nil)
	return nil
}

// windowUpdate opens a window of the server.
func (l *call) windowUpdate(f frame) error {
	if len(f.payload) != 4 {
		return protocolError{"WINDOW_UPDATE of a wrong length"}
	}
	w := &l.connWindow
	if f.stream == stream {
		w = &l.streamWindow
	}
	*w += int64(binary.BigEndian.Uint32(f.payload) & maxWindow)
	if *w > maxWindow {
		return protocolError{"window that is too large"}
	}
	return nil
}

// headerBlock collects a block of headers; done when it is complete, ends the
// stream and says OK.
func (l *call) headerBlock(f frame) (done bool, err error) {
	p := f.payload
	if f.kind == frameHeaders {
		if p, err = f.unpad(); err != nil {
			return false, err
		}
		if f.has(flagPriority) {
			if len(p) < 5 {
				return false, protocolError{"HEADERS that are too short"}
			}
			p = p[5:]
		}
		l.ends = f.has(flagEndStream)
	}
	if len(l.block)+len(p) > maxHeaders {
		return false, broken(Internal, "headers exceed %d bytes", maxHeaders)
	}
	l.block = append(l.block, p...)
	if l.inBlock = !f.has(flagEndHeaders); l.inBlock {
		return false, nil
	}
	h, err := l.decodeBlock()
	if err != nil {
		return false, err
	}
	return l.answered(h)
}

// decodeBlock decodes the collected block to values by names. The decoder is one for all
// blocks: they share a table.
func (l *call) decodeBlock() (map[string]string, error) {
	h := map[string]string{}
	size := 0
	l.decoder.SetEmitFunc(func(f hpack.HeaderField) {
		if size += int(f.Size()); size <= maxHeaders {
			h[f.Name] = f.Value
		}
	})
	_, err := l.decoder.Write(l.block)
	if err == nil {
		err = l.decoder.Close()
	}
	l.block = l.block[:0]
	if err != nil {
		return nil, protocolError{err.Error()}
	}
	if size > maxHeaders {
		return nil, broken(Internal, "headers exceed %d bytes", maxHeaders)
	}
	return h, nil
}

// answered acts on a complete block: headers, trailers, or both in one.
func (l *call) answered(h map[string]string) (done bool, err error) {
	if l.headers == 0 {
		s := h[":status"]
		if len(s) == 3 && s[0] == '1' && !l.ends {
			return false, nil // informational
		}
		if s != "200" {
			return false, broken(codeOfHTTP(s), "server answered with HTTP status %q", s)
		}
		if t := h["content-type"]; t != "application/grpc" && !strings.HasPrefix(t, "application/grpc+") && !strings.HasPrefix(t, "application/grpc;") {
			return false, broken(Unknown, "server answered with content type %q", t)
		}
	}
	l.headers++
	if !l.ends {
		if l.headers > 1 {
			return false, broken(Internal, "server sent headers in the middle of the answer")
		}
		return false, nil
	}
	status := h["grpc-status"]
	if status == "" {
		return false, broken(Unknown, "server ended the call without a status")
	}
	code, err := strconv.ParseUint(status, 10, 31)
	if err != nil {
		return false, broken(Unknown, "server ended the call with status %q", status)
	}
	if Code(code) == OK {
		return true, nil
	}
	return false, &Status{
		Code:       Code(code),
		Message:    decodeMessage(h["grpc-message"]),
		Details:    decodeBinary(h["grpc-status-details-bin"]),
		FromServer: true,
	}
}

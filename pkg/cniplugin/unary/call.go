// Package unary makes one gRPC call with one message each way over a unix socket, for
// a process that lives only for that call.
//
// It owns gRPC's and HTTP/2's client side as far as that needs: one connection, one
// stream, the request in one write. It keeps to what grpc-go answers in the same
// situation, which the tests compare. It must not know what the messages mean, nor
// link grpc-go, protobuf or package net: starting them takes longer than the call.
package unary

import (
	"bufio"
	"encoding/binary"
	"errors"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/net/http2/hpack"
)

const (
	// MaxMessage is the largest answer that is taken, in bytes; grpc-go's default.
	MaxMessage = 4 << 20
	// prefixSize is the length of a message's prefix: flag of compression and length.
	prefixSize = 5
	// window lets the server send the largest answer without waiting for us.
	window = MaxMessage + 64<<10
	// connectInterval is the pause between two attempts to connect.
	connectInterval = 20 * time.Millisecond
	stream          = 1
)

// ConnectError: no connection was made, so the server knows nothing of the call.
type ConnectError struct{ Err error }

func (e *ConnectError) Error() string { return e.Err.Error() }

// Unwrap returns why the last attempt failed.
func (e *ConnectError) Unwrap() error { return e.Err }

// Client calls the server that listens on a unix socket.
type Client struct {
	// Socket is the path of the socket.
	Socket string
	// ConnectTimeout bounds the attempts to connect while nobody listens yet. At
	// least one is made.
	ConnectTimeout time.Duration
}

// Call sends request to a method ("/package.Service/Method", shorter than 127 bytes) and
// returns the message of the answer. The deadline is told to the server and bounds everything.
// Errors are of type *ConnectError or *Status.
func (c Client) Call(deadline time.Time, method string, request []byte) ([]byte, error) {
	conn, err := c.connect(deadline)
	if err != nil {
		return nil, &ConnectError{err}
	}
	defer conn.Close()

	l := call{
		conn: conn, in: bufio.NewReader(conn), decoder: hpack.NewDecoder(4096, nil),
		connWindow: defaultWindow, streamWindow: defaultWindow, initialWindow: defaultWindow, maxFrame: defaultMaxFrame,
	}
	l.decoder.SetMaxStringLength(maxHeaders)
	l.start(deadline, method, request)
	answer, err := l.run()
	if err == nil {
		return answer, nil
	}
	var s *Status
	switch {
	case errors.As(err, &s):
		// The server's timer may be faster than ours; it then cancels the stream.
		if s.Code == Canceled && !s.FromServer && !deadline.After(time.Now()) {
			s.Code = DeadlineExceeded
		}
		return nil, s
	case errors.Is(err, syscall.EAGAIN):
		return nil, broken(DeadlineExceeded, "no answer in time")
	}
	return nil, broken(Unavailable, "connection broke: %v", err)
}

// connect connects, and tries again while the server may be starting.
func (c Client) connect(deadline time.Time) (socket, error) {
	last := time.Now().Add(c.ConnectTimeout)
	if deadline.Before(last) {
		last = deadline
	}
	for {
		conn, err := dial(c.Socket, deadline)
		if err == nil || !transient(err) || time.Until(last) <= 0 {
			return conn, err
		}
		<-time.After(connectInterval)
	}
}

// transient tells whether another attempt can succeed: the server may be starting, have a full backlog (EAGAIN, see
// connect(2)), or a signal came.
func transient(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR)
}

// call is the state of a call.
type call struct {
	conn socket
	in   *bufio.Reader
	out  []byte // frames to write

	pending                  []byte // of the request, for when the windows open
	connWindow, streamWindow int64  // of the server
	initialWindow            int64  // of streams
	maxFrame                 int    // of the server

	greeted bool // the server's first SETTINGS came
	decoder *hpack.Decoder
	block   []byte // of headers, as far as it came
	inBlock bool   // CONTINUATION must follow
	ends    bool   // the block that is being read ends the stream
	headers int    // blocks that came, without informational ones
	body    []byte
}

// start prepares the first write: the preface, our settings, and as much of the
// request as the default windows allow.
func (l *call) start(deadline time.Time, method string, request []byte) {
	l.out = append(l.out, preface...)
	l.enqueue(frameSettings, 0, 0, appendSetting(appendSetting(nil, settingEnablePush, 0), settingInitialWindow, window))
	l.enqueue(frameWindowUpdate, 0, 0, binary.BigEndian.AppendUint32(nil, window-defaultWindow))
	l.enqueue(frameHeaders, flagEndHeaders, stream, requestHeaders(deadline, method))

	l.pending = make([]byte, prefixSize, prefixSize+len(request))
	binary.BigEndian.PutUint32(l.pending[1:], uint32(len(request)))
	l.pending = append(l.pending, request...)
	l.send()
}

// requestHeaders returns the header block of the request: literals without indexing nor Huffman coding (RFC 7541,
// section 6.2.2), each shorter than the 127 bytes of which the length is one byte. With hpack.Encoder a call takes
// 0.07 ms longer: it needs maps of all static headers.
func requestHeaders(deadline time.Time, method string) []byte {
	b := make([]byte, 0, 256)
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "http"}, {":path", method}, {":authority", "localhost"},
		{"content-type", "application/grpc"}, {"user-agent", "coil"}, {"te", "trailers"},
		{"grpc-timeout", encodeTimeout(time.Until(deadline))},
	} {
		b = append(b, 0)
		for _, s := range h {
			b = append(append(b, byte(len(s))), s...)
		}
	}
	return b
}

// encodeTimeout writes a duration in milliseconds, rounded up. The header has at most 8 digits, so the longest is a day.
func encodeTimeout(d time.Duration) string {
	ms := (d + time.Millisecond - 1) / time.Millisecond
	return strconv.FormatInt(int64(min(max(ms, 0), 99999999)), 10) + "m"
}

// enqueue appends a frame to the bytes to write.
func (l *call) enqueue(kind frameType, flags uint8, id uint32, payload []byte) {
	n := len(payload)
	l.out = append(l.out, byte(n>>16), byte(n>>8), byte(n), byte(kind), flags)
	l.out = append(binary.BigEndian.AppendUint32(l.out, id), payload...)
}

// send appends DATA frames with as much of the request as the windows allow.
func (l *call) send() {
	for len(l.pending) > 0 {
		n := min(int64(len(l.pending)), int64(l.maxFrame), l.connWindow, l.streamWindow)
		if n <= 0 {
			return
		}
		var flags uint8
		if n == int64(len(l.pending)) {
			flags = flagEndStream
		}
		l.enqueue(frameData, flags, stream, l.pending[:n])
		l.pending = l.pending[n:]
		l.connWindow -= n
		l.streamWindow -= n
	}
}

// run writes and reads until the call ends.
func (l *call) run() ([]byte, error) {
	var deaf error // the server reads no more, but may have said why
	for {
		if len(l.out) > 0 && deaf == nil {
			_, deaf = l.conn.Write(l.out)
		}
		l.out = l.out[:0]
		f, err := readFrame(l.in)
		if err != nil {
			if deaf != nil && !errors.As(err, new(protocolError)) {
				err = deaf
			}
			return nil, err
		}
		done, err := l.handle(f)
		if err != nil {
			return nil, err
		}
		if done {
			return l.message()
		}
		l.send()
	}
}

// message returns the message in the body of a call that ended well.
func (l *call) message() ([]byte, error) {
	if len(l.body) == 0 {
		return nil, broken(Internal, "server sent no message")
	}
	if len(l.body) < prefixSize {
		return nil, broken(Internal, "message is cut off")
	}
	if l.body[0] != 0 {
		return nil, broken(Internal, "message is compressed, although that wasn't offered")
	}
	length, rest := int64(binary.BigEndian.Uint32(l.body[1:])), l.body[prefixSize:]
	switch {
	case length > int64(len(rest)):
		return nil, broken(Internal, "message is cut off")
	case length < int64(len(rest)):
		return nil, broken(Internal, "server sent more than one message")
	}
	return rest, nil
}

// data takes a DATA frame's part of the body.
func (l *call) data(f frame) (done bool, err error) {
	if l.headers == 0 {
		return false, protocolError{"DATA before HEADERS"}
	}
	p, err := f.unpad()
	if err != nil {
		return false, err
	}
	if len(l.body)+len(p) > window {
		return false, broken(ResourceExhausted, "answer exceeds %d bytes", MaxMessage)
	}
	l.body = append(l.body, p...)
	if len(l.body) >= prefixSize {
		if n := binary.BigEndian.Uint32(l.body[1:]); n > MaxMessage {
			return false, broken(ResourceExhausted, "message of %d bytes exceeds %d", n, MaxMessage)
		}
	}
	if f.has(flagEndStream) {
		return false, broken(Internal, "server closed the stream without a status")
	}
	return false, nil
}

// goAway handles GOAWAY: our stream goes on if the server took it.
func goAway(p []byte) error {
	if len(p) < 8 {
		return protocolError{"short GOAWAY"}
	}
	if last := binary.BigEndian.Uint32(p) & maxWindow; last >= stream {
		return nil
	}
	return broken(Unavailable, "server closes the connection (code %d, %q)", binary.BigEndian.Uint32(p[4:]), p[8:min(len(p), 256)])
}

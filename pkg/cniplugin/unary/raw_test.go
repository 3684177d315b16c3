package unary_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/cniplugin/unary"
	"github.com/coil-net/coil/pkg/testkit"
)

func anyOf(m proto.Message) (*anypb.Any, error) { return anypb.New(m) }

// peer is a server made of frames.
type peer struct {
	*http2.Framer
	conn  net.Conn
	block bytes.Buffer
	enc   *hpack.Encoder
}

// listen runs script on each connection and returns the socket.
func listen(t *testing.T, script func(net.Conn)) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				script(c)
			}()
		}
	}()
	t.Cleanup(func() { l.Close(); <-ended })
	return socket
}

// greet reads the preface and the request, answers SETTINGS and returns the peer.
func greet(c net.Conn) *peer {
	p := &peer{Framer: http2.NewFramer(c, c), conn: c}
	p.enc = hpack.NewEncoder(&p.block)
	p.WriteSettings()
	io.ReadFull(c, make([]byte, len(http2.ClientPreface)))
	for {
		f, err := p.ReadFrame()
		if err != nil {
			return p
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				p.WriteSettingsAck()
			}
		case *http2.PingFrame:
			p.WritePing(true, f.Data)
		case *http2.DataFrame:
			if f.StreamEnded() {
				return p
			}
		}
	}
}

// encode returns a block of headers given as name, value, ...
func (p *peer) encode(pairs ...string) []byte {
	p.block.Reset()
	for i := 0; i < len(pairs); i += 2 {
		p.enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return bytes.Clone(p.block.Bytes())
}

func (p *peer) headers(end bool, pairs ...string) {
	p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.encode(pairs...), EndStream: end, EndHeaders: true})
}

// ok writes the headers of an answer.
func (p *peer) ok() { p.headers(false, ":status", "200", "content-type", "application/grpc") }

// message is an AddResponse with the result "hi" as gRPC sends it.
var message = append([]byte{0, 0, 0, 0, 4}, "\x0a\x02hi"...)

// drain keeps the connection until the client closes it, so that the client can't
// tell the end of the script from an answer.
func (p *peer) drain() {
	for {
		if _, err := p.ReadFrame(); err != nil {
			return
		}
	}
}

// Servers that behave oddly: each ends the call with the code that grpc-go gives.
// want is set where the code must differ, and why says the reason.
func TestOddServers(t *testing.T) {
	details := base64.RawStdEncoding.EncodeToString([]byte("\x08\x0d\x12\x01m"))
	tests := []struct {
		name   string
		script func(*peer)
		want   codes.Code
		why    string
	}{
		{name: "plain answer", script: func(p *peer) { p.ok(); p.WriteData(1, false, message); p.headers(true, "grpc-status", "0") }},
		{name: "answer in bytes", script: func(p *peer) {
			p.ok()
			for _, b := range message {
				p.WriteData(1, false, []byte{b})
			}
			p.headers(true, "grpc-status", "0")
		}},
		{name: "padded frames", script: func(p *peer) {
			p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: p.encode(":status", "200", "content-type", "application/grpc+proto"),
				EndHeaders: true, PadLength: 9, Priority: http2.PriorityParam{StreamDep: 3, Weight: 7}})
			p.WriteDataPadded(1, false, message, make([]byte, 200))
			p.headers(true, "grpc-status", "0")
		}},
		{name: "CONTINUATION", script: func(p *peer) {
			b := p.encode(":status", "200", "content-type", "application/grpc", "x", strings.Repeat("y", 100))
			p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:3]})
			p.WriteContinuation(1, false, b[3:50])
			p.WriteContinuation(1, true, b[50:])
			p.WriteData(1, false, message)
			p.headers(true, "grpc-status", "0")
		}},
		{name: "informational headers", script: func(p *peer) {
			p.headers(false, ":status", "103")
			p.ok()
			p.WriteData(1, false, message)
			p.headers(true, "grpc-status", "0")
		}, want: codes.OK, why: "RFC 9113 8.1 lets them be; grpc-go ends the call"},
		{name: "PING, PRIORITY, unknown frames, SETTINGS again", script: func(p *peer) {
			p.WritePing(false, [8]byte{1})
			p.WritePriority(1, http2.PriorityParam{StreamDep: 5})
			p.WriteRawFrame(0xfa, 0xff, 1, []byte("grease"))
			p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 10}, http2.Setting{ID: 0xaaaa, Val: 1})
			p.WriteWindowUpdate(0, 100)
			p.WriteWindowUpdate(1, 100)
			p.ok()
			p.WriteData(1, false, message)
			p.headers(true, "grpc-status", "0")
		}},
		{name: "GOAWAY that leaves the call", script: func(p *peer) {
			p.WriteGoAway(1, http2.ErrCodeNo, nil)
			p.ok()
			p.WriteData(1, false, message)
			p.headers(true, "grpc-status", "0")
		}},
		{name: "details", script: func(p *peer) {
			p.headers(true, ":status", "200", "content-type", "application/grpc", "grpc-status", "13", "grpc-message", "m", "grpc-status-details-bin", details)
		}},
		{name: "details, padded", script: func(p *peer) {
			p.headers(true, ":status", "200", "content-type", "application/grpc", "grpc-status", "13", "grpc-message", "m", "grpc-status-details-bin", details+"==="[:(4-len(details)%4)%4])
		}},
		{name: "details that are garbage", script: func(p *peer) {
			p.headers(true, ":status", "200", "content-type", "application/grpc", "grpc-status", "5", "grpc-status-details-bin", "?")
		}, want: codes.NotFound, why: "the status itself is good"},
		{name: "no message", script: func(p *peer) { p.ok(); p.headers(true, "grpc-status", "0") }},
		{name: "no message, trailers only", script: func(p *peer) {
			p.headers(true, ":status", "200", "content-type", "application/grpc", "grpc-status", "0")
		}},
		{name: "two messages", script: func(p *peer) {
			p.ok()
			p.WriteData(1, false, bytes.Repeat(message, 2))
			p.headers(true, "grpc-status", "0")
		}},
		{name: "message that is cut off", script: func(p *peer) { p.ok(); p.WriteData(1, false, message[:7]); p.headers(true, "grpc-status", "0") }},
		{name: "prefix that is cut off", script: func(p *peer) { p.ok(); p.WriteData(1, false, message[:3]); p.headers(true, "grpc-status", "0") }},
		{name: "compressed message", script: func(p *peer) {
			p.ok()
			p.WriteData(1, false, append([]byte{1}, message[1:]...))
			p.headers(true, "grpc-status", "0")
		}},
		{name: "message that says 4 GiB", script: func(p *peer) { p.ok(); p.WriteData(1, false, []byte{0, 0xff, 0xff, 0xff, 0xff}); p.drain() }},
		{name: "message and error", script: func(p *peer) { p.ok(); p.WriteData(1, false, message); p.headers(true, "grpc-status", "8") }},
		{name: "DATA that ends the stream", script: func(p *peer) { p.ok(); p.WriteData(1, true, message) }},
		{name: "headers in the middle", script: func(p *peer) { p.ok(); p.headers(false, "grpc-status", "0") }},
		{name: "no grpc-status", script: func(p *peer) { p.ok(); p.WriteData(1, false, message); p.headers(true, "x", "y") }},
		{name: "no grpc-status, trailers only", script: func(p *peer) { p.headers(true, ":status", "200", "content-type", "application/grpc") }},
		{name: "grpc-status that is no number", script: func(p *peer) { p.ok(); p.headers(true, "grpc-status", "x") }},
		{name: "grpc-status that is negative", script: func(p *peer) { p.ok(); p.headers(true, "grpc-status", "-1") },
			want: codes.Unknown, why: "grpc-go makes it a code of 32 bits"},
		{name: "HTML", script: func(p *peer) { p.headers(true, ":status", "200", "content-type", "text/html") }},
		{name: "no content type", script: func(p *peer) { p.headers(true, ":status", "200") }},
		{name: "no HTTP status", script: func(p *peer) { p.headers(true, "content-type", "application/grpc", "grpc-status", "0") }},
		{name: "HTTP 400", script: func(p *peer) { p.headers(true, ":status", "400") }},
		{name: "HTTP 401", script: func(p *peer) { p.headers(true, ":status", "401") }},
		{name: "HTTP 403", script: func(p *peer) { p.headers(true, ":status", "403") }},
		{name: "HTTP 404", script: func(p *peer) { p.headers(true, ":status", "404") }},
		{name: "HTTP 418", script: func(p *peer) { p.headers(true, ":status", "418") }},
		{name: "HTTP 502", script: func(p *peer) { p.headers(true, ":status", "502", "content-type", "text/html") }},
		{name: "RST_STREAM no error", script: func(p *peer) { p.WriteRSTStream(1, http2.ErrCodeNo); p.drain() }},
		{name: "RST_STREAM cancel", script: func(p *peer) { p.WriteRSTStream(1, http2.ErrCodeCancel); p.drain() }},
		{name: "RST_STREAM internal", script: func(p *peer) { p.WriteRSTStream(1, http2.ErrCodeInternal); p.drain() }},
		{name: "RST_STREAM enhance your calm", script: func(p *peer) { p.WriteRSTStream(1, http2.ErrCodeEnhanceYourCalm); p.drain() }},
		{name: "RST_STREAM inadequate security", script: func(p *peer) { p.WriteRSTStream(1, http2.ErrCodeInadequateSecurity); p.drain() }},
		{name: "RST_STREAM after headers", script: func(p *peer) { p.ok(); p.WriteRSTStream(1, http2.ErrCodeProtocol); p.drain() }},
		{name: "close after the request", script: func(*peer) {}},
		{name: "close after the headers", script: func(p *peer) { p.ok() }},
		{name: "close in the message", script: func(p *peer) { p.ok(); p.WriteData(1, false, message[:6]) }},
		{name: "close in a frame", script: func(p *peer) { p.conn.Write([]byte{0, 0, 9, 0, 0, 0, 0, 0, 1, 'x'}) }},
		{name: "frame that is too long", script: func(p *peer) { p.conn.Write([]byte{0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1}); p.drain() }},
		{name: "headers that are no HPACK", script: func(p *peer) {
			p.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, EndHeaders: true})
			p.drain()
		}, want: codes.Unavailable, why: "the connection is useless; grpc-go says Internal"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			socket := listen(t, func(c net.Conn) { tt.script(greet(c)) })
			if tt.why == "" {
				compare(t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{Netns: "x"})
				return
			}
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(20*time.Second))
			defer cancel()
			if got := ours(ctx, t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{}); got.Code != tt.want {
				t.Errorf("code is %v (%s), want %v", got.Code, got.Message, tt.want)
			}
		})
	}
}

// Servers that don't speak HTTP/2 at all end the call at once, with Unavailable.
func TestServersThatAreNotGRPC(t *testing.T) {
	read := func(c net.Conn) { c.Read(make([]byte, 4096)) }
	tests := []struct {
		name   string
		script func(net.Conn)
	}{
		{"HTTP/1.1", func(c net.Conn) { read(c); io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }},
		{"HTTP/1.1 that doesn't read", func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") }},
		{"echo", func(c net.Conn) { io.Copy(c, c) }},
		{"close at once", func(net.Conn) {}},
		{"close after reading", read},
		{"zeros", func(c net.Conn) { read(c); c.Write(make([]byte, 4096)) }},
		{"settings that are an ACK", func(c net.Conn) { read(c); http2.NewFramer(c, c).WriteSettingsAck() }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			socket := listen(t, tt.script)
			got := ours(t.Context(), t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{StdinData: make([]byte, 30000)})
			if got.Code != codes.Unavailable {
				t.Errorf("code is %v (%s), want Unavailable", got.Code, got.Message)
			}
		})
	}
}

func TestServerThatSaysNothing(t *testing.T) {
	for name, script := range map[string]func(net.Conn){
		"reads":         func(c net.Conn) { io.Copy(io.Discard, c) },
		"doesn't read":  func(c net.Conn) { <-t.Context().Done() },
		"only SETTINGS": func(c net.Conn) { greet(c).drain() },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			got := ours(ctx, t, listen(t, script), cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{StdinData: make([]byte, 1<<20)})
			if got.Code != codes.DeadlineExceeded {
				t.Errorf("code is %v (%s), want DeadlineExceeded", got.Code, got.Message)
			}
		})
	}
}

// The server's settings are kept: a small window that opens slowly, in small and
// large frames.
func TestSmallWindows(t *testing.T) {
	const size = 5000
	got := make(chan []byte, 1)
	socket := listen(t, func(c net.Conn) {
		p := &peer{Framer: http2.NewFramer(c, c), conn: c}
		p.enc = hpack.NewEncoder(&p.block)
		p.SetMaxReadFrameSize(1 << 24)
		io.ReadFull(c, make([]byte, len(http2.ClientPreface)))
		p.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1}, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1 << 20})
		var body []byte
		acked := false
		for {
			f, err := p.ReadFrame()
			if err != nil {
				return
			}
			switch f := f.(type) {
			case *http2.SettingsFrame:
				// The bytes that were sent before exceed the new window by far: open it to 100.
				if acked = acked || f.IsAck(); f.IsAck() {
					p.WriteWindowUpdate(1, 65535-1+100)
					p.WriteWindowUpdate(0, 100)
				}
			case *http2.DataFrame:
				body = append(body, f.Data()...)
				if acked && len(f.Data()) > 100 {
					got <- nil
					return
				}
				if f.StreamEnded() {
					got <- body
					p.ok()
					p.WriteData(1, false, message)
					p.headers(true, "grpc-status", "0")
					return
				}
				if acked {
					p.WriteWindowUpdate(0, 100)
					p.WriteWindowUpdate(1, 100)
				}
			}
		}
	})
	in := bytes.Repeat([]byte("0123456789"), (65535+size)/10)
	answer, err := unary.Client{Socket: socket, ConnectTimeout: time.Second}.Call(time.Now().Add(testkit.Timeout(20*time.Second)), "/a/b", in)
	if err == nil && string(answer) == "\x0a\x02hi" {
		if body := <-got; !bytes.Equal(body[5:], in) {
			t.Errorf("server got %d bytes that differ from what was sent", len(body))
		}
		return
	}
	t.Errorf("got %q, %v", answer, err)
}

func TestConnect(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const wait = 500 * time.Millisecond
	tests := []struct {
		name, socket string
		want         error
		waits        bool
	}{
		{"no socket", filepath.Join(dir, "none"), syscall.ENOENT, true},
		{"nobody listens", stale, syscall.ECONNREFUSED, true},
		{"a file", file, syscall.ECONNREFUSED, true},
		{"below a file", filepath.Join(file, "s"), syscall.ENOTDIR, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			start := time.Now()
			_, err := unary.Client{Socket: tt.socket, ConnectTimeout: wait}.Call(time.Now().Add(time.Minute), "/a/b", nil)
			var ce *unary.ConnectError
			if !errors.As(err, &ce) || !errors.Is(err, tt.want) {
				t.Errorf("error is %v (%T), want a ConnectError of %v", err, err, tt.want)
			}
			if took := time.Since(start); tt.waits != (took >= wait) {
				t.Errorf("took %v with a timeout of %v", took, wait)
			}
		})
	}
}

// A server that starts while the plugin waits is found.
func TestConnectWaitsForTheServer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	type result struct {
		answer []byte
		err    error
	}
	called := make(chan result, 1)
	go func() {
		answer, err := unary.Client{Socket: socket, ConnectTimeout: testkit.Timeout(30 * time.Second)}.Call(time.Now().Add(testkit.Timeout(time.Minute)), "/a/b", nil)
		called <- result{answer, err}
	}()
	time.Sleep(50 * time.Millisecond) // some attempts find nothing; without them the test passes too
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p := greet(c)
	p.ok()
	p.WriteData(1, false, message)
	p.headers(true, "grpc-status", "0")
	if r := <-called; r.err != nil || string(r.answer) != "\x0a\x02hi" {
		t.Errorf("got %q, %v", r.answer, r.err)
	}
}

// Whatever the bytes are that a server sends, the call ends with a status.
func FuzzAnswer(f *testing.F) {
	frames := func(script func(*peer)) []byte {
		var b bytes.Buffer
		p := &peer{Framer: http2.NewFramer(&b, nil)}
		p.enc = hpack.NewEncoder(&p.block)
		p.WriteSettings()
		script(p)
		return b.Bytes()
	}
	f.Add(frames(func(p *peer) { p.ok(); p.WriteData(1, false, message); p.headers(true, "grpc-status", "0") }))
	f.Add(frames(func(p *peer) {
		p.headers(true, ":status", "200", "content-type", "application/grpc", "grpc-status", "13", "grpc-message", "%4", "grpc-status-details-bin", "AA=")
	}))
	f.Add(frames(func(p *peer) { p.WriteGoAway(0, 0, []byte("x")); p.WriteRSTStream(1, 8) }))
	f.Add(frames(func(p *peer) {
		p.WritePing(false, [8]byte{})
		p.WriteWindowUpdate(0, 1)
		p.WritePriority(1, http2.PriorityParam{})
	}))
	f.Fuzz(func(t *testing.T, sent []byte) {
		socket := listen(t, func(c net.Conn) {
			go io.Copy(io.Discard, c)
			c.Write(sent)
			c.(*net.UnixConn).CloseWrite()
		})
		_, err := unary.Client{Socket: socket, ConnectTimeout: time.Second}.Call(time.Now().Add(testkit.Timeout(10*time.Second)), "/a/b", []byte("request"))
		var s *unary.Status
		if err != nil && (!errors.As(err, &s) || s.Code == unary.DeadlineExceeded || s.Code == unary.OK) {
			t.Errorf("call ended with %v (%T)", err, err)
		}
	})
}

// A server whose timer is faster cancels the stream: that is the deadline, once it
// has passed here, and a cancellation before.
func TestResetAroundTheDeadline(t *testing.T) {
	for name, tt := range map[string]struct {
		late bool
		want codes.Code
	}{"before": {false, codes.Canceled}, "after": {true, codes.DeadlineExceeded}} {
		t.Run(name, func(t *testing.T) {
			deadline := time.Now().Add(testkit.Timeout(time.Minute))
			if tt.late {
				deadline = time.Now().Add(-time.Second)
			}
			socket := listen(t, func(c net.Conn) { p := greet(c); p.WriteRSTStream(1, http2.ErrCodeCancel); p.drain() })
			if got := ours(pastDeadline{t.Context(), deadline}, t, socket, "/a/b", &cnirpc.CNIArgs{}); got.Code != tt.want {
				t.Errorf("code is %v (%s), want %v", got.Code, got.Message, tt.want)
			}
		})
	}
}

// pastDeadline is a context whose timer hasn't fired yet.
type pastDeadline struct {
	context.Context
	deadline time.Time
}

func (c pastDeadline) Deadline() (time.Time, bool) { return c.deadline, true }

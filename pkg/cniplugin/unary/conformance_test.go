package unary_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	statuspb "google.golang.org/genproto/googleapis/rpc/status"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/cniplugin/unary"
	"github.com/coil-net/coil/pkg/testkit"
)

// server is a grpc-go server whose Add is given by the test.
type server struct {
	cnirpc.UnimplementedCNIServer
	add func(context.Context, *cnirpc.CNIArgs) (*cnirpc.AddResponse, error)
}

func (s server) Add(ctx context.Context, in *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
	return s.add(ctx, in)
}

// serve starts a grpc-go server and returns it with the path of its socket.
func serve(t *testing.T, add func(context.Context, *cnirpc.CNIArgs) (*cnirpc.AddResponse, error), opts ...grpc.ServerOption) (*grpc.Server, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(opts...)
	cnirpc.RegisterCNIServer(s, server{add: add})
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return s, socket
}

// outcome is how a call ended.
type outcome struct {
	Code    codes.Code
	Message string
	Details *statuspb.Status
	Answer  []byte
	ours    *unary.Status
}

// reference makes the call with grpc-go.
func reference(ctx context.Context, t *testing.T, socket, method string, in *cnirpc.CNIArgs) outcome {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var out cnirpc.AddResponse
	err = conn.Invoke(ctx, method, in, &out)
	st := status.Convert(err)
	o := outcome{Code: st.Code(), Message: st.Message(), Answer: out.Result}
	if len(st.Details()) > 0 {
		o.Details = st.Proto()
	}
	return o
}

// ours makes the call with the package.
func ours(ctx context.Context, t *testing.T, socket, method string, in *cnirpc.CNIArgs) outcome {
	t.Helper()
	request, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(time.Minute)
	}
	answer, err := unary.Client{Socket: socket, ConnectTimeout: time.Second}.Call(deadline, method, request)
	if err != nil {
		var s *unary.Status
		if !errors.As(err, &s) {
			t.Fatalf("error %v (%T) is no status", err, err)
		}
		o := outcome{Code: codes.Code(s.Code), Message: s.Message, ours: s}
		if s.Details != nil {
			o.Details = new(statuspb.Status)
			if err := proto.Unmarshal(s.Details, o.Details); err != nil {
				t.Fatalf("details: %v", err)
			}
		}
		return o
	}
	var out cnirpc.AddResponse
	if err := proto.Unmarshal(answer, &out); err != nil {
		t.Fatal(err)
	}
	return outcome{Answer: out.Result}
}

// compare fails the test unless both clients end the call alike. Messages are
// compared only when they come from the server.
func compare(t *testing.T, socket, method string, in *cnirpc.CNIArgs) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(20*time.Second))
	defer cancel()
	want, got := reference(ctx, t, socket, method, in), ours(ctx, t, socket, method, in)
	if got.Code != want.Code {
		t.Errorf("code is %v (%s), grpc-go's is %v (%s)", got.Code, got.Message, want.Code, want.Message)
	}
	if got.ours != nil && got.ours.FromServer {
		if got.Message != want.Message {
			t.Errorf("message is %q, grpc-go's is %q", got.Message, want.Message)
		}
		if g, w := (&statuspb.Status{Details: got.Details.GetDetails()}), (&statuspb.Status{Details: want.Details.GetDetails()}); !proto.Equal(g, w) {
			t.Errorf("details are %v, grpc-go's are %v", g, w)
		}
	}
	if want.Code == codes.OK && !bytes.Equal(got.Answer, want.Answer) {
		t.Errorf("answer has %d bytes, grpc-go's has %d", len(got.Answer), len(want.Answer))
	}
	return got
}

func TestEachStatusIsThatOfGRPCGo(t *testing.T) {
	messages := []string{"", "plain", "percent %41 % %zz", "line\nbreak\tand \"quotes\"", "日本語 ✓", strings.Repeat("long ", 4000)}
	for code := codes.Canceled; code <= 18; code++ {
		t.Run(code.String(), func(t *testing.T) {
			_, socket := serve(t, func(_ context.Context, in *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
				return nil, status.Error(code, in.Netns)
			})
			for _, m := range messages {
				got := compare(t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{Netns: m})
				if got.Code != code || got.Message != m {
					t.Errorf("got %v %q, want %v %q", got.Code, got.Message, code, m)
				}
				if !got.ours.FromServer {
					t.Error("status doesn't say that it is the server's")
				}
			}
		})
	}
}

func TestDetailsAreThoseOfGRPCGo(t *testing.T) {
	big := wrapperspb.String(strings.Repeat("x", 100<<10))
	cniError := &cnirpc.CNIError{Code: cnirpc.ErrorCode_TRY_AGAIN_LATER, Msg: "no block", Details: "pool default"}
	tests := []struct {
		name    string
		details []proto.Message
	}{
		{"CNIError", []proto.Message{cniError}},
		{"foreign", []proto.Message{wrapperspb.Bytes([]byte{0, 0xff})}},
		{"several", []proto.Message{&emptypb.Empty{}, cniError, wrapperspb.Int64(-1)}},
		{"large enough for CONTINUATION", []proto.Message{big, cniError}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			st := status.New(codes.Internal, "why").Proto()
			for _, d := range tt.details {
				a, err := anyOf(d)
				if err != nil {
					t.Fatal(err)
				}
				st.Details = append(st.Details, a)
			}
			_, socket := serve(t, func(context.Context, *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
				return nil, status.ErrorProto(st)
			})
			got := compare(t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{})
			if n := len(got.Details.GetDetails()); n != len(tt.details) {
				t.Errorf("got %d details, want %d", n, len(tt.details))
			}
		})
	}
}

func TestMessagesOfAllSizes(t *testing.T) {
	_, socket := serve(t, func(_ context.Context, in *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
		return &cnirpc.AddResponse{Result: in.StdinData}, nil
	})
	for _, size := range []int{0, 1, 100, 16379, 16380, 16384, 65530, 65535, 65536, 100000, 1 << 20, 3 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			got := compare(t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{StdinData: bytes.Repeat([]byte("z"), size)})
			if len(got.Answer) != size {
				t.Errorf("answer has %d bytes, want %d (%v %s)", len(got.Answer), size, got.Code, got.Message)
			}
		})
	}
}

func TestMessagesThatAreTooLarge(t *testing.T) {
	_, socket := serve(t, func(_ context.Context, in *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
		return &cnirpc.AddResponse{Result: make([]byte, len(in.ContainerId)<<20)}, nil
	})
	for name, in := range map[string]*cnirpc.CNIArgs{
		"request":        {StdinData: make([]byte, 5<<20)},
		"answer":         {ContainerId: "12345"},
		"answer, larger": {ContainerId: "0123456789"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := compare(t, socket, cnirpc.CNI_Add_FullMethodName, in); got.Code != codes.ResourceExhausted {
				t.Errorf("code is %v (%s), want ResourceExhausted", got.Code, got.Message)
			}
		})
	}
}

func TestMethodThatTheServerDoesNotKnow(t *testing.T) {
	_, socket := serve(t, nil)
	for _, method := range []string{cnirpc.CNI_Status_FullMethodName, "/pkg.cnirpc.CNI/Nonesuch", "/other.Service/Add"} {
		if got := compare(t, socket, method, &cnirpc.CNIArgs{}); got.Code != codes.Unimplemented || !got.ours.FromServer {
			t.Errorf("%s: code is %v (%s), want Unimplemented", method, got.Code, got.Message)
		}
	}
}

func TestServerThatDiesInTheCall(t *testing.T) {
	var s *grpc.Server
	for name, call := range map[string]func(context.Context, *testing.T, string, string, *cnirpc.CNIArgs) outcome{"grpc-go": reference, "ours": ours} {
		t.Run(name, func(t *testing.T) {
			var socket string
			s, socket = serve(t, func(ctx context.Context, _ *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
				go s.Stop()
				<-ctx.Done()
				return nil, ctx.Err()
			})
			got := call(t.Context(), t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{})
			if got.Code != codes.Unavailable {
				t.Errorf("code is %v (%s), want Unavailable", got.Code, got.Message)
			}
			if got.ours != nil && got.ours.FromServer {
				t.Error("a broken call counts as answered")
			}
		})
	}
}

// A server that stops gracefully sends GOAWAY and finishes the call.
func TestServerThatStopsGracefullyInTheCall(t *testing.T) {
	for name, call := range map[string]func(context.Context, *testing.T, string, string, *cnirpc.CNIArgs) outcome{"grpc-go": reference, "ours": ours} {
		t.Run(name, func(t *testing.T) {
			var s *grpc.Server
			stopping := make(chan struct{})
			var socket string
			s, socket = serve(t, func(context.Context, *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
				go func() { s.GracefulStop(); close(stopping) }()
				// The socket is gone once the server began to stop.
				testkit.Eventually(t, 10*time.Second, "server stops listening", func() error {
					c, err := net.Dial("unix", socket)
					if err == nil {
						c.Close()
						return errors.New("still listening")
					}
					return nil
				})
				return &cnirpc.AddResponse{Result: []byte("done")}, nil
			})
			got := call(t.Context(), t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{})
			if got.Code != codes.OK || string(got.Answer) != "done" {
				t.Errorf("got %v %q %q, want the answer", got.Code, got.Message, got.Answer)
			}
			<-stopping
		})
	}
}

func TestDeadlineReachesTheServerAndEndsTheCall(t *testing.T) {
	type seen struct {
		left  time.Duration
		ended error
	}
	calls := make(chan seen, 2)
	_, socket := serve(t, func(ctx context.Context, _ *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
		deadline, ok := ctx.Deadline()
		if !ok {
			calls <- seen{}
			return nil, errors.New("no deadline")
		}
		left := time.Until(deadline)
		<-ctx.Done()
		calls <- seen{left, ctx.Err()}
		return nil, ctx.Err()
	})
	for _, call := range []func(context.Context, *testing.T, string, string, *cnirpc.CNIArgs) outcome{reference, ours} {
		const timeout = 600 * time.Millisecond
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		got := call(ctx, t, socket, cnirpc.CNI_Add_FullMethodName, &cnirpc.CNIArgs{})
		cancel()
		if got.Code != codes.DeadlineExceeded {
			t.Errorf("code is %v (%s), want DeadlineExceeded", got.Code, got.Message)
		}
		if s := <-calls; s.left <= 0 || s.left > timeout+time.Millisecond || s.ended == nil {
			t.Errorf("server had %v left and ended by %v, want at most %v", s.left, s.ended, timeout)
		}
	}
}

func TestNamesOfCodes(t *testing.T) {
	for c := range codes.Code(20) {
		if got, want := unary.Code(c).String(), c.String(); got != want {
			t.Errorf("code %d is %q, want %q", c, got, want)
		}
	}
}

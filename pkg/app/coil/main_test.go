package coil_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/coil-net/coil/generated/cnirpc"
)

// bin is the folder of the plugin, built as it is released.
var bin string

// released is the version that the plugin has.
const released = "v1.2.3-rc.1"

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "coil-bin-*")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	bin = dir
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w -X=github.com/coil-net/coil/pkg/app/coil.version="+released,
		"-o", filepath.Join(bin, "coil"), "github.com/coil-net/coil/cmd/coil")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build coil: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// result is what the daemon answers to ADD.
const result = `{"cniVersion":"1.1.0","interfaces":[{"name":"veth1","mac":"02:00:00:00:00:02","mtu":1400},` +
	`{"name":"eth0","mac":"02:00:00:00:00:01","mtu":1400,"sandbox":"/run/netns/x"}],` +
	`"ips":[{"interface":1,"address":"10.1.0.1/32","gateway":"169.254.1.1"},{"interface":1,"address":"fd01::1/128","gateway":"fe80::1"}],` +
	`"routes":[{"dst":"0.0.0.0/0","gw":"169.254.1.1"},{"dst":"::/0","gw":"fe80::1"}]}`

// daemon is a coild over grpc-go that remembers what it was asked.
type daemon struct {
	cnirpc.UnimplementedCNIServer
	fail   error  // answer of every method, if set
	answer string // to ADD

	mu    sync.Mutex
	calls []call // guarded by mu
}

// call is a request that came.
type call struct {
	method string
	in     *cnirpc.CNIArgs
}

func (d *daemon) seen(method string, in *cnirpc.CNIArgs) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, call{method, in})
	return d.fail
}

// take returns the calls so far and forgets them.
func (d *daemon) take() []call {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.calls
	d.calls = nil
	return c
}

func (d *daemon) Add(_ context.Context, in *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
	if err := d.seen("Add", in); err != nil {
		return nil, err
	}
	return &cnirpc.AddResponse{Result: []byte(d.answer)}, nil
}

func (d *daemon) Del(_ context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, d.seen("Del", in)
}

func (d *daemon) Check(_ context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, d.seen("Check", in)
}

func (d *daemon) GC(_ context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, d.seen("GC", in)
}

func (d *daemon) Status(_ context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, d.seen("Status", in)
}

// serve starts the daemon on the socket; stop ends it.
func (d *daemon) serve(socket string) (stop func(), err error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	s := grpc.NewServer()
	cnirpc.RegisterCNIServer(s, d)
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(l) }()
	return func() { s.Stop(); <-done }, nil
}

// cniError is a status that carries a CNIError.
func cniError(code cnirpc.ErrorCode, msg, details string) error {
	st, err := status.New(codes.Internal, msg).WithDetails(&cnirpc.CNIError{Code: code, Msg: msg, Details: details})
	if err != nil {
		return err
	}
	return st.Err()
}

package cniplugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/delqueue"
	"github.com/coil-net/coil/pkg/testkit"
)

const result = `{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","mac":"02:00:00:00:00:01","mtu":1400,"sandbox":"/ns"}],` +
	`"ips":[{"interface":0,"address":"10.1.0.1/32","gateway":"169.254.1.1"},{"interface":0,"address":"fd01::1/128"}],` +
	`"routes":[{"dst":"0.0.0.0/0"}]}`

// daemon is a coild whose answers the test gives: one function for all methods.
type daemon struct {
	cnirpc.UnimplementedCNIServer
	answer func(ctx context.Context, method string, in *cnirpc.CNIArgs) ([]byte, error)
}

func (d daemon) Add(ctx context.Context, in *cnirpc.CNIArgs) (*cnirpc.AddResponse, error) {
	b, err := d.answer(ctx, "Add", in)
	return &cnirpc.AddResponse{Result: b}, err
}

func (d daemon) empty(ctx context.Context, method string, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	_, err := d.answer(ctx, method, in)
	return &emptypb.Empty{}, err
}

func (d daemon) Del(ctx context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return d.empty(ctx, "Del", in)
}

func (d daemon) Check(ctx context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return d.empty(ctx, "Check", in)
}

func (d daemon) GC(ctx context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return d.empty(ctx, "GC", in)
}

func (d daemon) Status(ctx context.Context, in *cnirpc.CNIArgs) (*emptypb.Empty, error) {
	return d.empty(ctx, "Status", in)
}

// serve starts a daemon on the socket and returns it.
func serve(t *testing.T, socket string, answer func(ctx context.Context, method string, in *cnirpc.CNIArgs) ([]byte, error)) *grpc.Server {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	cnirpc.RegisterCNIServer(s, daemon{answer: answer})
	done := make(chan struct{})
	go func() { defer close(done); s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return s
}

// node is where a plugin runs: its socket, its queue and what it writes.
type node struct {
	socket, queue string
	out           bytes.Buffer
	plugin        Plugin
}

func newNode(t *testing.T) *node {
	dir := t.TempDir()
	n := &node{socket: filepath.Join(dir, "s"), queue: filepath.Join(dir, "lib", "q")}
	n.plugin = Plugin{Stdout: &n.out}
	return n
}

// env is a command for container c; extra is added to the configuration.
func (n *node) env(v verb, extra string) environ {
	return environ{
		"CNI_COMMAND": string(v), "CNI_CONTAINERID": "c", "CNI_NETNS": "/ns", "CNI_IFNAME": "eth0", "CNI_PATH": "/p",
		"CNI_ARGS": "K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod",
		"stdin":    fmt.Sprintf(`{"cniVersion":"1.1.0","name":"n","type":"coil","socket":%q,"delQueueDir":%q%s}`, n.socket, n.queue, extra),
	}
}

// environ is the environment of a process, and its standard input under the key stdin.
type environ map[string]string

func (e environ) get(name string) string { return e[name] }

// run does a command.
func (n *node) run(e environ) error {
	if err := n.plugin.Main(e.get, strings.NewReader(e["stdin"])); err != nil {
		return err
	}
	return nil
}

// do does a command for container c; extra is added to the configuration.
func (n *node) do(v verb, extra string) error { return n.run(n.env(v, extra)) }

func (n *node) queued(t *testing.T) []delqueue.Record {
	t.Helper()
	records, aside, err := delqueue.New(n.queue).List()
	if err != nil || len(aside) > 0 {
		t.Fatalf("queue: %v, set aside %q", err, aside)
	}
	return records
}

// mustCode fails the test unless err is a CNI error of this code.
func mustCode(t *testing.T, err error, code uint) *spec.Error {
	t.Helper()
	var e *spec.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("error is %v (%T), want a CNI error of code %d", err, err, code)
	}
	return e
}

const gcList = `,"cni.dev/valid-attachments":[]`

// each runs every command and gives its name to check.
func (n *node) each(t *testing.T, check func(t *testing.T, v verb, err error)) {
	t.Helper()
	for _, c := range []struct {
		v     verb
		extra string
	}{
		{verbAdd, ""}, {verbDel, ""}, {verbCheck, `,"prevResult":` + result}, {verbGC, gcList}, {verbStatus, ""},
	} {
		t.Run(string(c.v), func(t *testing.T) { check(t, c.v, n.do(c.v, c.extra)) })
	}
}

func TestMethodsAreThoseOfTheContract(t *testing.T) {
	want := map[verb]string{
		verbAdd: cnirpc.CNI_Add_FullMethodName, verbDel: cnirpc.CNI_Del_FullMethodName, verbCheck: cnirpc.CNI_Check_FullMethodName,
		verbGC: cnirpc.CNI_GC_FullMethodName, verbStatus: cnirpc.CNI_Status_FullMethodName,
	}
	for v, traits := range verbs {
		if traits.method != want[v] {
			t.Errorf("method of %s is %q, want %q", v, traits.method, want[v])
		}
	}
}

func TestCommandsReachTheirMethod(t *testing.T) {
	n := newNode(t)
	var got string
	serve(t, n.socket, func(_ context.Context, method string, in *cnirpc.CNIArgs) ([]byte, error) {
		got = method + " " + in.ContainerId
		return []byte(result), nil
	})
	want := map[verb]string{verbAdd: "Add c", verbDel: "Del c", verbCheck: "Check c", verbGC: "GC c", verbStatus: "Status c"}
	n.each(t, func(t *testing.T, v verb, err error) {
		if err != nil || got != want[v] {
			t.Errorf("got %q, %v, want %q", got, err, want[v])
		}
	})
	if _, err := os.Stat(n.queue); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the queue was touched: %v", err)
	}
}

func TestNoDaemon(t *testing.T) {
	n := newNode(t)
	start := time.Now()
	n.each(t, func(t *testing.T, v verb, err error) {
		switch v {
		case verbDel:
			if err != nil {
				t.Errorf("DEL failed: %v", err)
			}
		case verbStatus:
			mustCode(t, err, 50)
		default:
			if e := mustCode(t, err, 11); !strings.Contains(e.Msg, "coild is not reachable at "+n.socket+": no such file or directory") {
				t.Errorf("message is %q", e.Msg)
			}
		}
	})
	if took := time.Since(start); took < 5*ConnectTimeout || took > 5*ConnectTimeout+testkit.Limit(10*time.Second) {
		t.Errorf("5 commands took %v, want about 5 s", took)
	}
	records := n.queued(t)
	if len(records) != 1 || records[0].ID != (attachment.ID{ContainerID: "c", IfName: "eth0"}) ||
		records[0].PodNamespace != "ns" || records[0].PodName != "pod" || time.Since(records[0].QueuedAt) > time.Minute {
		t.Errorf("queue is %+v, want the DEL", records)
	}
}

func TestDelIsQueuedWhenTheDaemonDies(t *testing.T) {
	n := newNode(t)
	var s *grpc.Server
	s = serve(t, n.socket, func(ctx context.Context, _ string, _ *cnirpc.CNIArgs) ([]byte, error) {
		go s.Stop()
		<-ctx.Done()
		return nil, ctx.Err()
	})
	if err := n.do(verbDel, ""); err != nil {
		t.Fatal(err)
	}
	if got := n.queued(t); len(got) != 1 {
		t.Errorf("queue is %+v, want the DEL", got)
	}
}

// coild may bind its socket and read the queue between the plugin's attempt and its
// record: the second attempt tells it.
func TestDelReachesADaemonThatStartedMeanwhile(t *testing.T) {
	n := newNode(t)
	dels := make(chan string, 2)
	calls := 0
	serve(t, n.socket, func(_ context.Context, _ string, in *cnirpc.CNIArgs) ([]byte, error) {
		dels <- in.ContainerId
		return nil, nil
	})
	// The first connection breaks off before the daemon sees it.
	back, front := n.socket, n.socket+"-front"
	l, err := net.Listen("unix", front)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if calls++; calls == 1 {
				c.Close()
				continue
			}
			go proxy(c, back)
		}
	}()
	n.socket = front
	if err := n.do(verbDel, ""); err != nil {
		t.Fatal(err)
	}
	select {
	case id := <-dels:
		if id != "c" {
			t.Errorf("daemon deleted %q", id)
		}
	default:
		t.Error("the daemon wasn't told")
	}
	if got := n.queued(t); len(got) != 0 {
		t.Errorf("queue is %+v, want none: coild did it", got)
	}
}

// A replay after the ADD would delete the new attachment.
func TestAddCancelsAQueuedDel(t *testing.T) {
	n := newNode(t)
	other := n.env(verbDel, "")
	other["CNI_CONTAINERID"] = "c2"
	for _, e := range []environ{n.env(verbDel, ""), other} {
		if err := n.run(e); err != nil {
			t.Fatal(err)
		}
	}
	serve(t, n.socket, func(context.Context, string, *cnirpc.CNIArgs) ([]byte, error) {
		for _, r := range n.queued(t) {
			if r.ContainerID == "c" {
				t.Error("coild was asked while the record could still be replayed")
			}
		}
		return []byte(result), nil
	})
	if err := n.do(verbAdd, ""); err != nil {
		t.Fatal(err)
	}
	if got := n.queued(t); len(got) != 1 || got[0].ContainerID != "c2" {
		t.Errorf("queue is %+v, want only c2", got)
	}
}

func TestAddThatCannotCancelAQueuedDelFails(t *testing.T) {
	n := newNode(t)
	if err := os.MkdirAll(filepath.Join(n.queue, "c:eth0.json", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	mustCode(t, n.do(verbAdd, ""), 11)
}

// A daemon that answers, or is too slow to, isn't gone: its DEL isn't queued.
func TestDelFailsWhenTheDaemonSaysSo(t *testing.T) {
	n := newNode(t)
	serve(t, n.socket, func(context.Context, string, *cnirpc.CNIArgs) ([]byte, error) {
		return nil, status.Error(codes.Unavailable, "starting")
	})
	if e := mustCode(t, n.do(verbDel, ""), 11); !strings.Contains(e.Msg, "starting") {
		t.Errorf("message is %q", e.Msg)
	}
	if got := n.queued(t); len(got) != 0 {
		t.Errorf("queue is %+v, want none", got)
	}
}

func TestDelThatCannotBeQueuedFails(t *testing.T) {
	n := newNode(t)
	n.queue = filepath.Join(n.socket+"-file", "q")
	if err := os.WriteFile(n.socket+"-file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	e := mustCode(t, n.do(verbDel, ""), 11)
	if !strings.Contains(e.Msg, "not reachable") || !strings.Contains(e.Details, "queue deletion of c") {
		t.Errorf("error is %+v", e)
	}
}

func TestEachCommandHasItsDeadline(t *testing.T) {
	n := newNode(t)
	n.plugin.timeout = 150 * time.Millisecond
	serve(t, n.socket, func(ctx context.Context, _ string, _ *cnirpc.CNIArgs) ([]byte, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	n.each(t, func(t *testing.T, v verb, err error) {
		want := uint(11)
		if v == verbStatus {
			want = 50
		}
		if e := mustCode(t, err, want); !strings.Contains(e.Msg, "did not answer "+string(v)+" in time") {
			t.Errorf("message is %q", e.Msg)
		}
	})
	if got := n.queued(t); len(got) != 0 {
		t.Errorf("queue is %+v, want none: coild may still do it", got)
	}
}

func TestDeadlineIsToldToTheDaemon(t *testing.T) {
	n := newNode(t)
	want := map[string]time.Duration{"Add": 100 * time.Second, "Del": time.Minute, "Check": 30 * time.Second, "GC": time.Minute, "Status": 5 * time.Second}
	serve(t, n.socket, func(ctx context.Context, method string, _ *cnirpc.CNIArgs) ([]byte, error) {
		deadline, ok := ctx.Deadline()
		if left := time.Until(deadline); !ok || left > want[method] || left < want[method]-testkit.Limit(4*time.Second) {
			t.Errorf("%s has %v left, want almost %v", method, left, want[method])
		}
		return []byte(result), nil
	})
	n.each(t, func(t *testing.T, _ verb, err error) {
		if err != nil {
			t.Error(err)
		}
	})
}

func TestOldDaemonKnowsNoGCAndNoStatus(t *testing.T) {
	n := newNode(t)
	serve(t, n.socket, func(_ context.Context, method string, _ *cnirpc.CNIArgs) ([]byte, error) {
		return nil, status.Errorf(codes.Unimplemented, "method %s not implemented", method)
	})
	n.each(t, func(t *testing.T, v verb, err error) {
		if v == verbGC || v == verbStatus {
			if err != nil {
				t.Errorf("%s failed: %v", v, err)
			}
			return
		}
		if e := mustCode(t, err, 999); !strings.Contains(e.Msg, "does not know "+string(v)) {
			t.Errorf("message is %q", e.Msg)
		}
	})
}

func TestAddResult(t *testing.T) {
	const prev = `,"prevResult":{"cniVersion":"1.1.0","ips":[{"address":"192.168.0.1/24"}]}`
	tests := []struct {
		name, answer, extra string
		ip                  string
		code                uint
	}{
		{name: "of the newest version", answer: result, ip: "10.1.0.1/32"},
		{name: "of an older daemon", answer: `{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.0.1/32"}]}`, ip: "10.1.0.1/32"},
		{name: "in a chain", answer: result, extra: prev, ip: "10.1.0.1/32"},
		{name: "in a chain, nothing added", extra: prev, ip: "192.168.0.1/24"},
		{name: "none", code: 6},
		{name: "garbage", answer: "{", code: 6},
		{name: "no result", answer: `[]`, code: 6},
		{name: "null", answer: `null`, code: 6},
		{name: "of an unknown version", answer: `{"cniVersion":"9.0.0"}`, code: 6},
		{name: "with null addresses", answer: `{"cniVersion":"1.1.0","ips":[null]}`, code: 6},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := newNode(t)
			serve(t, n.socket, func(context.Context, string, *cnirpc.CNIArgs) ([]byte, error) { return []byte(tt.answer), nil })
			err := n.do(verbAdd, tt.extra)
			if tt.code != 0 {
				mustCode(t, err, tt.code)
				if n.out.Len() > 0 {
					t.Errorf("wrote %q before the error", n.out.String())
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var out struct {
				CNIVersion string
				IPs        []struct{ Address string }
			}
			if err := json.Unmarshal(n.out.Bytes(), &out); err != nil {
				t.Fatal(err)
			}
			if out.CNIVersion != "1.1.0" || out.IPs[0].Address != tt.ip {
				t.Errorf("wrote %s", n.out.String())
			}
		})
	}
}

func TestAddRefusesTheHostsNetns(t *testing.T) {
	n := newNode(t)
	called := false
	serve(t, n.socket, func(context.Context, string, *cnirpc.CNIArgs) ([]byte, error) {
		called = true
		return []byte(result), nil
	})
	e := n.env(verbAdd, "")
	e["CNI_NETNS"] = "/proc/self/ns/net"
	mustCode(t, n.run(e), 8)
	if called {
		t.Error("coild was asked nevertheless")
	}
	e["CNI_NETNS_OVERRIDE"] = "1"
	if err := n.run(e); err != nil || !called {
		t.Errorf("with CNI_NETNS_OVERRIDE: %v, called %v", err, called)
	}
}

func TestGCWantsTheList(t *testing.T) {
	n := newNode(t)
	serve(t, n.socket, func(context.Context, string, *cnirpc.CNIArgs) ([]byte, error) {
		t.Error("coild was told to release everything")
		return nil, nil
	})
	mustCode(t, n.do(verbGC, ""), 7)
}

// proxy copies between c and the socket until one side ends.
func proxy(c net.Conn, socket string) {
	defer c.Close()
	d, err := net.Dial("unix", socket)
	if err != nil {
		return
	}
	defer d.Close()
	done := make(chan struct{}, 2)
	for _, p := range [][2]net.Conn{{c, d}, {d, c}} {
		go func() {
			io.Copy(p[0], p[1])
			done <- struct{}{}
		}()
	}
	<-done
}

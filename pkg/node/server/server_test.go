package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// assigner is a struct of functions: a test states only the calls that it expects.
type assigner struct {
	add   func(node.AddRequest) (store.Allocation, error)
	del   func(attachment.ID) error
	check func(attachment.ID, []netip.Addr) error
	gc    func([]attachment.ID) error
}

func (a assigner) Add(_ context.Context, r node.AddRequest) (store.Allocation, error) {
	return a.add(r)
}
func (a assigner) Del(_ context.Context, id attachment.ID) error { return a.del(id) }
func (a assigner) Check(_ context.Context, id attachment.ID, _ string, addrs []netip.Addr) error {
	return a.check(id, addrs)
}
func (a assigner) GC(_ context.Context, valid []attachment.ID, _ time.Time) error { return a.gc(valid) }

// poolOf knows one namespace, "ns", of pool "blue".
func poolOf(_ context.Context, ns string) (string, error) {
	if ns != "ns" {
		return "", fmt.Errorf("read Namespace %s: not found", ns)
	}
	return "blue", nil
}

// egresses records what is done to sandboxes, unless begin or finish is an error.
type egresses struct {
	begin, finish error
	wrong         error
	finished      []node.Sandbox
	checked       []attachment.ID
	forgotten     []attachment.ID
}

func (e *egresses) Begin(context.Context, store.Pod) (func(context.Context, node.Sandbox) error, error) {
	return func(_ context.Context, s node.Sandbox) error {
		e.finished = append(e.finished, s)
		return e.finish
	}, e.begin
}

func (e *egresses) Check(_ context.Context, id attachment.ID) error {
	e.checked = append(e.checked, id)
	return e.wrong
}

func (e *egresses) Forget(_ context.Context, id attachment.ID) error {
	e.forgotten = append(e.forgotten, id)
	return nil
}

func closed() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

func config() Server {
	return Server{
		Ready: func() error { return nil }, Started: closed(), PoolOf: poolOf,
		Netns: func(path string) (store.Netns, error) {
			if path != "/run/netns/pod" {
				return store.Netns{}, fmt.Errorf("open %s: %w", path, fs.ErrNotExist)
			}
			return store.Netns{Path: path, Inode: 42}, nil
		},
	}
}

// newServer completes a server; a nil Assigner gives no addresses.
func newServer(s Server, a Assigner, e Egress) *Server {
	s.Assigner, s.Egress = a, e
	return &s
}

// args are those of an ADD that succeeds, changed by edit.
func args(edit func(*cnirpc.CNIArgs)) *cnirpc.CNIArgs {
	a := &cnirpc.CNIArgs{
		ContainerId: "c1", Ifname: "eth0", Netns: "/run/netns/pod",
		Args: map[string]string{"K8S_POD_NAMESPACE": "ns", "K8S_POD_NAME": "web", "K8S_POD_UID": "u1", "IS_CHAINED": "false"},
	}
	if edit != nil {
		edit(a)
	}
	return a
}

// cniError returns the code that the plugin sees, and all that a person reads.
func cniError(t *testing.T, err error) (cnirpc.ErrorCode, string) {
	t.Helper()
	st, ok := status.FromError(err)
	if !ok || err == nil {
		t.Fatalf("error %v is not a gRPC status", err)
	}
	for _, d := range st.Details() {
		if e, ok := d.(*cnirpc.CNIError); ok {
			return e.Code, e.Msg + ": " + e.Details
		}
	}
	t.Fatalf("error %v has no CNIError", err)
	return 0, ""
}

func TestAddPassesOnWhoAsks(t *testing.T) {
	var got node.AddRequest
	s := newServer(config(), assigner{add: func(r node.AddRequest) (store.Allocation, error) {
		got = r
		return store.Allocation{Wiring: store.Wiring{Result: []byte(`{"cniVersion":"1.1.0"}`)}}, nil
	}}, nil)
	resp, err := s.Add(t.Context(), args(nil))
	if err != nil {
		t.Fatal(err)
	}
	want := node.AddRequest{
		ID: attachment.ID{ContainerID: "c1", IfName: "eth0"}, Pod: store.Pod{Namespace: "ns", Name: "web", UID: "u1"},
		Netns: store.Netns{Path: "/run/netns/pod", Inode: 42}, Pool: "blue",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("request (-want +got):\n%s", d)
	}
	if string(resp.Result) != `{"cniVersion":"1.1.0"}` {
		t.Errorf("result %s", resp.Result)
	}
}

func TestAddErrors(t *testing.T) {
	fails := func(err error) assigner {
		return assigner{add: func(node.AddRequest) (store.Allocation, error) { return store.Allocation{}, err }}
	}
	tests := []struct {
		name   string
		edit   func(*cnirpc.CNIArgs)
		config func(*Server)
		assign assigner
		egress error
		code   cnirpc.ErrorCode
		says   string
	}{
		{name: "not ready", config: func(s *Server) { s.Ready = func() error { return errors.New("record: starting") } },
			code: cnirpc.ErrorCode_TRY_AGAIN_LATER, says: "record: starting"},
		{name: "no container ID", edit: func(a *cnirpc.CNIArgs) { a.ContainerId = "" },
			code: cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, says: "CNI_CONTAINERID"},
		{name: "no pod name", edit: func(a *cnirpc.CNIArgs) { delete(a.Args, "K8S_POD_NAME") },
			code: cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, says: "K8S_POD_NAME"},
		{name: "no CNI_ARGS", edit: func(a *cnirpc.CNIArgs) { a.Args = nil },
			code: cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, says: "K8S_POD_NAMESPACE"},
		{name: "wrong netns", edit: func(a *cnirpc.CNIArgs) { a.Netns = "/run/netns/gone" },
			code: cnirpc.ErrorCode_INVALID_ENVIRONMENT_VARIABLES, says: "/run/netns/gone"},
		{name: "chained though it gives addresses", edit: func(a *cnirpc.CNIArgs) { a.Args["IS_CHAINED"] = "true" },
			code: cnirpc.ErrorCode_INVALID_NETWORK_CONFIG, says: "--enable-ipam=false"},
		{name: "first though it gives none", config: func(s *Server) { s.Assigner = nil },
			code: cnirpc.ErrorCode_INVALID_NETWORK_CONFIG, says: "chain it behind"},
		{name: "unknown namespace", edit: func(a *cnirpc.CNIArgs) { a.Args["K8S_POD_NAMESPACE"] = "nope" },
			code: cnirpc.ErrorCode_TRY_AGAIN_LATER, says: "Namespace nope"},
		{name: "an Egress that isn't there", egress: errors.New("Egress net/gw doesn't exist"),
			code: cnirpc.ErrorCode_INTERNAL, says: "net/gw"},
		{name: "an Egress that can't be looked up", egress: fmt.Errorf("%w: timeout", node.ErrUnavailable),
			code: cnirpc.ErrorCode_TRY_AGAIN_LATER, says: "timeout"},
		{name: "no address", assign: fails(fmt.Errorf("%w: pool is empty", node.ErrUnavailable)),
			code: cnirpc.ErrorCode_TRY_AGAIN_LATER, says: "pool is empty"},
		{name: "deleted meanwhile", assign: fails(node.ErrDeleted), code: cnirpc.ErrorCode_TRY_AGAIN_LATER, says: "deleted"},
		{name: "disk full", assign: fails(fmt.Errorf("reserve: %w", store.ErrReadOnly)), code: cnirpc.ErrorCode_TRY_AGAIN_LATER, says: "written"},
		{name: "anything else", assign: fails(errors.New("netlink: no such device")), code: cnirpc.ErrorCode_INTERNAL, says: "no such device"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(config(), tt.assign, &egresses{begin: tt.egress})
			if tt.config != nil {
				tt.config(s)
			}
			_, err := s.Add(t.Context(), args(tt.edit))
			code, text := cniError(t, err)
			if code != tt.code || !strings.Contains(text, tt.says) {
				t.Errorf("code %v, %q; want %v and a text with %q", code, text, tt.code, tt.says)
			}
		})
	}
}

func TestAddChainedPassesTheResultOn(t *testing.T) {
	resp, err := newServer(config(), nil, nil).Add(t.Context(), args(func(a *cnirpc.CNIArgs) {
		a.Args["IS_CHAINED"] = "true"
		a.StdinData = []byte(`{"cniVersion":"0.4.0","prevResult":{"interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"version":"4","address":"10.0.0.5/24","interface":0}],"dns":{}}}`)
	}))
	if err != nil {
		t.Fatal(err)
	}
	// Always in the newest version: the plugin converts.
	if got := string(resp.Result); !strings.Contains(got, `"cniVersion":"1.1.0"`) || !strings.Contains(got, "10.0.0.5/24") {
		t.Errorf("result %s", got)
	}
}

// Behind another plugin, only Egresses are set up, for the addresses that that one gave.
func TestAddChainedSetsEgressUp(t *testing.T) {
	const prev = `{"cniVersion":"1.0.0","prevResult":{"cniVersion":"1.0.0","interfaces":[{"name":"veth1"},{"name":"eth0","sandbox":"/x"}],"ips":[%s]}}`
	chained := func(ips string) *cnirpc.CNIArgs {
		return args(func(a *cnirpc.CNIArgs) {
			a.Args["IS_CHAINED"] = "true"
			a.StdinData = fmt.Appendf(nil, prev, ips)
		})
	}
	const both = `{"address":"10.0.0.5/24","interface":1},{"address":"10.0.0.6/24","interface":1},{"address":"fd00::5/64","interface":1}`
	e := &egresses{}
	resp, err := newServer(config(), nil, e).Add(t.Context(), chained(both))
	if err != nil || !strings.Contains(string(resp.GetResult()), "10.0.0.6/24") {
		t.Fatalf("%s, %v", resp.GetResult(), err)
	}
	want := node.Sandbox{
		ID: attachment.ID{ContainerID: "c1", IfName: "eth0"}, Pod: store.Pod{Namespace: "ns", Name: "web", UID: "u1"},
		Netns:   store.Netns{Path: "/run/netns/pod", Inode: 42},
		Address: ipam.Address{IPv4: netip.MustParseAddr("10.0.0.5"), IPv6: netip.MustParseAddr("fd00::5")},
	}
	if len(e.finished) != 1 || e.finished[0] != want {
		t.Errorf("set up %+v, want %+v", e.finished, want)
	}
	_, err = newServer(config(), nil, e).Add(t.Context(), chained(""))
	if code, text := cniError(t, err); code != cnirpc.ErrorCode_INVALID_NETWORK_CONFIG || !strings.Contains(text, "no address") {
		t.Errorf("without an address: %v, %s", code, text)
	}
	e.finish = errors.New("netlink: no such device")
	_, err = newServer(config(), nil, e).Add(t.Context(), chained(both))
	if code, text := cniError(t, err); code != cnirpc.ErrorCode_INTERNAL || !strings.Contains(text, "no such device") {
		t.Errorf("when it fails: %v, %s", code, text)
	}
	if _, err := newServer(config(), nil, e).Del(t.Context(), args(nil)); err != nil || len(e.forgotten) != 1 {
		t.Errorf("DEL: %v, %v", e.forgotten, err)
	}
}

// The assigner finishes what Egresses need, so that an error undoes all.
func TestAddFinishesEgress(t *testing.T) {
	e := &egresses{finish: errors.New("no tunnel")}
	s := newServer(config(), assigner{add: func(r node.AddRequest) (store.Allocation, error) {
		return store.Allocation{}, r.Finish(t.Context(), node.Sandbox{ID: r.ID})
	}}, e)
	_, err := s.Add(t.Context(), args(nil))
	if code, text := cniError(t, err); code != cnirpc.ErrorCode_INTERNAL || !strings.Contains(text, "no tunnel") || len(e.finished) != 1 {
		t.Errorf("%v, %s, %v", code, text, e.finished)
	}
}

func TestDelNeedsOnlyTheID(t *testing.T) {
	cfg := config()
	cfg.Ready = func() error { return errors.New("starting") }
	var got attachment.ID
	s := newServer(cfg, assigner{del: func(id attachment.ID) error { got = id; return nil }}, nil)
	if _, err := s.Del(t.Context(), &cnirpc.CNIArgs{ContainerId: "c1", Ifname: "eth0"}); err != nil {
		t.Fatal(err)
	}
	if got != (attachment.ID{ContainerID: "c1", IfName: "eth0"}) {
		t.Errorf("deleted %+v", got)
	}
}

func TestCheckComparesThePreviousResult(t *testing.T) {
	// As Coil 2.x configured runtimes: a version whose results don't say their own.
	const stdin = `{"cniVersion":"0.4.0","prevResult":{"interfaces":[{"name":"veth1"},{"name":"eth0","sandbox":"/x"},{"name":"net1","sandbox":"/x"}],
		"ips":[{"version":"4","address":"10.0.0.5/32","interface":1},{"version":"6","address":"fd00::5/128","interface":1},{"version":"4","address":"192.0.2.1/24","interface":2}]}}`
	var got []netip.Addr
	s := newServer(config(), assigner{check: func(_ attachment.ID, addrs []netip.Addr) error { got = addrs; return store.ErrNotFound }}, nil)
	_, err := s.Check(t.Context(), args(func(a *cnirpc.CNIArgs) { a.StdinData = []byte(stdin) }))
	if code, _ := cniError(t, err); code != cnirpc.ErrorCode_UNKNOWN_CONTAINER {
		t.Errorf("code %v", code)
	}
	want := []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")}
	if !slices.Equal(got, want) {
		t.Errorf("compared %v, want those of eth0: %v", got, want)
	}
}

// The objects of Egresses are part of the pod's network, also behind another plugin.
func TestCheckLooksAtEgress(t *testing.T) {
	right := assigner{check: func(attachment.ID, []netip.Addr) error { return nil }}
	prev := args(func(a *cnirpc.CNIArgs) {
		a.StdinData = []byte(`{"cniVersion":"1.0.0","prevResult":{"cniVersion":"1.0.0"}}`)
	})
	for _, ipam := range []bool{true, false} {
		e := &egresses{}
		s := newServer(config(), right, e)
		if !ipam {
			s.Assigner = nil
		}
		if _, err := s.Check(t.Context(), prev); err != nil || len(e.checked) != 1 || e.checked[0].ContainerID != "c1" {
			t.Errorf("IPAM %t: %v, looked at %v", ipam, err, e.checked)
		}
		e.wrong = errors.New("egress: route 192.0.2.0/24 is missing")
		_, err := s.Check(t.Context(), prev)
		if code, text := cniError(t, err); code != cnirpc.ErrorCode_INTERNAL || !strings.Contains(text, "not as it was set up: egress: route 192.0.2.0/24") {
			t.Errorf("IPAM %t: code %v, %s", ipam, code, text)
		}
		e.wrong = fmt.Errorf("egress: %w", node.ErrUnavailable)
		_, err = s.Check(t.Context(), prev)
		if code, _ := cniError(t, err); code != cnirpc.ErrorCode_TRY_AGAIN_LATER {
			t.Errorf("IPAM %t, not looked at yet: code %v", ipam, code)
		}
	}
}

func TestGCList(t *testing.T) {
	c1 := []attachment.ID{{ContainerID: "c1", IfName: "eth0"}}
	tests := []struct {
		name, stdin string
		want        []attachment.ID
		fails       bool
	}{
		{"as the specification spells it", `{"cni.dev/valid-attachments":[{"containerID":"c1","ifname":"eth0"}]}`, c1, false},
		{"the other spelling", `{"cni.dev/attachments":[{"containerID":"c1","ifname":"eth0"}]}`, c1, false},
		{"an empty list is a list", `{"cni.dev/valid-attachments":[]}`, []attachment.ID{}, false},
		{"no list is not an empty list", `{"name":"k8s-pod-network"}`, nil, true},
		{"garbage", `{"cni.dev/valid-attachments":7}`, nil, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []attachment.ID
			s := newServer(config(), assigner{gc: func(valid []attachment.ID) error { got = valid; return nil }}, nil)
			_, err := s.GC(t.Context(), &cnirpc.CNIArgs{StdinData: []byte(tt.stdin)})
			if (err != nil) != tt.fails {
				t.Fatalf("error %v", err)
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("valid (-want +got):\n%s", d)
			}
		})
	}
}

func TestStatus(t *testing.T) {
	cfg := config()
	reason := error(nil)
	cfg.Ready = func() error { return reason }
	s := newServer(cfg, assigner{}, nil)
	if _, err := s.Status(t.Context(), &cnirpc.CNIArgs{}); err != nil {
		t.Errorf("ready: %v", err)
	}
	for _, c := range []struct {
		reason error
		code   cnirpc.ErrorCode
	}{
		{errors.New("disk: full"), cnirpc.ErrorCode_PLUGIN_NOT_AVAILABLE},
		{errors.Join(errors.New("disk: full"), fmt.Errorf("node: the Node was deleted: %w", node.ErrWithdrawn)), cnirpc.ErrorCode_LIMITED_CONNECTIVITY},
	} {
		reason = c.reason
		_, err := s.Status(t.Context(), &cnirpc.CNIArgs{})
		if code, text := cniError(t, err); code != c.code || !strings.Contains(text, "disk: full") {
			t.Errorf("not ready, %v: code %v, want %v, %q", c.reason, code, c.code, text)
		}
	}
}

// An ADD that comes while coild starts is served as soon as it has started, and refused after a while.
func TestAddWaitsForTheStart(t *testing.T) {
	add := assigner{add: func(node.AddRequest) (store.Allocation, error) { return store.Allocation{}, nil }}
	t.Run("that ends", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			started := make(chan struct{})
			cfg := config()
			reason := errors.New("record: starting")
			cfg.Started, cfg.Ready = started, func() error { return reason }
			go func() {
				time.Sleep(time.Second)
				reason = nil
				close(started)
			}()
			if _, err := newServer(cfg, add, nil).Add(t.Context(), args(nil)); err != nil {
				t.Errorf("ADD before the end of the start: %v, want that it waits", err)
			}
		})
	})
	t.Run("that does not end", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			cfg := config()
			cfg.Started, cfg.Ready = nil, func() error { return errors.New("api: no answer") }
			began := time.Now()
			_, err := newServer(cfg, add, nil).Add(t.Context(), args(nil))
			if code, text := cniError(t, err); code != cnirpc.ErrorCode_TRY_AGAIN_LATER || !strings.Contains(text, "api: no answer") {
				t.Errorf("code %v, %q; want to be told to try again, and why", code, text)
			}
			if took := time.Since(began); took != startWait {
				t.Errorf("refused after %s, want %s", took, startWait)
			}
		})
	})
}

// Over a real socket: for root only, a panic is an error of one call, a stale
// socket is replaced, a living one is not, and the end lets a running call end.
func TestServe(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "coild.sock")
	if err := os.WriteFile(socket, nil, 0o600); err != nil { // left by a dead process
		t.Fatal(err)
	}
	entered, release := make(chan struct{}), make(chan struct{})
	s := newServer(config(), assigner{
		add: func(node.AddRequest) (store.Allocation, error) { panic("boom") },
		del: func(attachment.ID) error { close(entered); <-release; return nil },
	}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, socket, prometheus.NewRegistry()) }()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := cnirpc.NewCNIClient(conn)
	testkit.Eventually(t, 5*time.Second, "the socket is served", func() error {
		_, err := client.Status(t.Context(), &cnirpc.CNIArgs{})
		return err
	})
	if fi, err := os.Stat(socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v; want mode 0600", fi.Mode(), err)
	}
	if err := s.Serve(t.Context(), socket, prometheus.NewRegistry()); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("second server at the socket: %v", err)
	}
	if _, err := client.Add(t.Context(), args(nil)); status.Code(err) != codes.Internal {
		t.Errorf("a call that panics: %v, want Internal", err)
	}
	called := make(chan error, 1)
	go func() {
		_, err := client.Del(t.Context(), args(nil))
		called <- err
	}()
	<-entered
	cancel()
	close(release)
	if err := <-called; err != nil {
		t.Errorf("the call that ran at the end: %v", err)
	}
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
}

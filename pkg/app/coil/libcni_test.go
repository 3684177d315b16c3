package coil_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/generated/cnirpc"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/delqueue"
	"github.com/coil-net/coil/pkg/testkit"
)

// runtime is a container runtime: libcni, with the plugin and a daemon.
type runtime struct {
	cni    *libcni.CNIConfig
	list   *libcni.NetworkConfigList
	conf   *libcni.RuntimeConf
	daemon *daemon
	socket string
	queue  delqueue.Queue
}

func newRuntime(t *testing.T, version string) *runtime {
	t.Helper()
	dir := t.TempDir()
	r := &runtime{daemon: &daemon{answer: result}, socket: filepath.Join(dir, "s"), queue: delqueue.New(filepath.Join(dir, "q"))}
	list, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil,
		`{"cniVersion":%q,"name":"k8s-pod-network","plugins":[{"type":"coil","socket":%q,"delQueueDir":%q}]}`, version, r.socket, filepath.Join(dir, "q")))
	if err != nil {
		t.Fatal(err)
	}
	r.list = list
	r.cni = libcni.NewCNIConfigWithCacheDir([]string{bin}, filepath.Join(dir, "cache"), nil)
	r.conf = &libcni.RuntimeConf{
		ContainerID: "c1", NetNS: "/run/netns/x", IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "ns1"}, {"K8S_POD_NAME", "pod1"}},
	}
	return r
}

func (r *runtime) start(t *testing.T) (stop func()) {
	t.Helper()
	stop, err := r.daemon.serve(r.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return stop
}

// methods returns which methods were called since the last time.
func (r *runtime) methods() []string {
	var out []string
	for _, c := range r.daemon.take() {
		out = append(out, c.method)
	}
	return out
}

func mustCode(t *testing.T, err error, code uint) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("error is %v (%T), want a CNI error of code %d", err, err, code)
	}
}

// The life of a pod through libcni, in each version of the specification.
func TestLifeOfAPod(t *testing.T) {
	for _, version := range spec.Versions() {
		t.Run(version, func(t *testing.T) {
			r := newRuntime(t, version)
			r.start(t)
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout(30*time.Second))
			defer cancel()

			if _, err := r.cni.ValidateNetworkList(ctx, r.list); err != nil {
				t.Fatalf("validate: %v", err)
			}
			added, err := r.cni.AddNetworkList(ctx, r.list, r.conf)
			if err != nil {
				t.Fatalf("ADD: %v", err)
			}
			checkResult(t, added, version)
			if version == "0.3.1" {
				if err := r.cni.CheckNetworkList(ctx, r.list, r.conf); !errors.Is(err, libcni.ErrorCheckNotSupp) {
					t.Errorf("CHECK: %v, want that it isn't supported", err)
				}
			} else if err := r.cni.CheckNetworkList(ctx, r.list, r.conf); err != nil {
				t.Errorf("CHECK: %v", err)
			}
			if err := r.cni.GetStatusNetworkList(ctx, r.list); err != nil {
				t.Errorf("STATUS: %v", err)
			}
			for range 2 {
				if err := r.cni.DelNetworkList(ctx, r.list, r.conf); err != nil {
					t.Errorf("DEL: %v", err)
				}
			}
			args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: "c9", IfName: "eth0"}}}
			if err := r.cni.GCNetworkList(ctx, r.list, args); err != nil {
				t.Errorf("GC: %v", err)
			}

			want := []string{"Add", "Check", "Status", "Del", "Del", "GC"}
			switch version {
			case "0.3.1":
				want = []string{"Add", "Del", "Del"}
			case "0.4.0", "1.0.0":
				want = []string{"Add", "Check", "Del", "Del"} // libcni skips STATUS and GC
			}
			if diff := cmp.Diff(want, r.methods()); diff != "" {
				t.Errorf("calls (-want +got):\n%s", diff)
			}
		})
	}
}

// checkResult compares a result with what the daemon answered, in its own version
// and converted to the newest.
func checkResult(t *testing.T, got types.Result, version string) {
	t.Helper()
	if got.Version() != version {
		t.Errorf("result has version %s, want %s", got.Version(), version)
	}
	newest, err := types100.NewResultFromResult(got)
	if err != nil {
		t.Fatal(err)
	}
	var want types100.Result
	if err := json.Unmarshal([]byte(result), &want); err != nil {
		t.Fatal(err)
	}
	if version < "1.0.0" {
		for _, i := range want.Interfaces {
			i.Mtu = 0 // those versions don't have it
		}
	}
	equalNets := cmp.Comparer(func(a, b net.IPNet) bool { return a.String() == b.String() })
	if diff := cmp.Diff(&want, newest, equalNets); diff != "" {
		t.Errorf("result (-want +got):\n%s", diff)
	}
}

// The list of the runtime's GC reaches coild, empty or not.
func TestGCHandsOnTheValidAttachments(t *testing.T) {
	for name, valid := range map[string][]types.GCAttachment{
		"some": {{ContainerID: "c1", IfName: "eth0"}, {ContainerID: "c2", IfName: "net1"}}, "none": {}, "nil": nil,
	} {
		t.Run(name, func(t *testing.T) {
			r := newRuntime(t, "1.1.0")
			r.start(t)
			if err := r.cni.GCNetworkList(t.Context(), r.list, &libcni.GCArgs{ValidAttachments: valid}); err != nil {
				t.Fatal(err)
			}
			calls := r.daemon.take()
			if len(calls) != 1 {
				t.Fatalf("%d calls, want 1", len(calls))
			}
			got, err := spec.ValidAttachments(calls[0].in.StdinData)
			if err != nil {
				t.Fatal(err)
			}
			want := []attachment.ID{}
			for _, v := range valid {
				want = append(want, attachment.ID(v))
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("attachments (-want +got):\n%s", diff)
			}
		})
	}
}

// libcni itself deletes what is cached and not valid before it asks for GC.
func TestGCOfAnAttachmentThatLostItsDEL(t *testing.T) {
	r := newRuntime(t, "1.1.0")
	r.start(t)
	if _, err := r.cni.AddNetworkList(t.Context(), r.list, r.conf); err != nil {
		t.Fatal(err)
	}
	if err := r.cni.GCNetworkList(t.Context(), r.list, &libcni.GCArgs{}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"Add", "Del", "GC"}, r.methods()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

// coild goes away and comes back: nothing fails for good, and no DEL is lost.
func TestCoildIsUpdated(t *testing.T) {
	r := newRuntime(t, "1.1.0")
	stop := r.start(t)
	ctx := t.Context()
	if _, err := r.cni.AddNetworkList(ctx, r.list, r.conf); err != nil {
		t.Fatal(err)
	}
	stop()

	mustCode(t, r.cni.GetStatusNetworkList(ctx, r.list), 50)
	mustCode(t, r.cni.CheckNetworkList(ctx, r.list, r.conf), 11)
	other := *r.conf
	other.ContainerID = "c2"
	_, err := r.cni.AddNetworkList(ctx, r.list, &other)
	mustCode(t, err, 11)
	if want := "see kubectl -n kube-system get pods"; !strings.Contains(err.Error(), want) {
		t.Errorf("error is %q, want it to contain %q", err, want)
	}
	mustCode(t, r.cni.GCNetworkList(ctx, r.list, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: "c1", IfName: "eth0"}}}), 11)
	if err := r.cni.DelNetworkList(ctx, r.list, r.conf); err != nil {
		t.Fatalf("DEL without coild: %v", err)
	}

	records, _, err := r.queue.List()
	if err != nil {
		t.Fatal(err)
	}
	if len(records) != 1 || records[0].ContainerID != "c1" || records[0].IfName != "eth0" || records[0].PodName != "pod1" {
		t.Errorf("queue is %+v, want the DEL of c1", records)
	}
	r.start(t)
	if err := r.cni.GetStatusNetworkList(ctx, r.list); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	if _, err := r.cni.AddNetworkList(ctx, r.list, &other); err != nil {
		t.Errorf("ADD: %v", err)
	}
}

// The error that coild gives reaches the runtime, which shows it in the pod's events.
func TestErrorReachesTheRuntime(t *testing.T) {
	r := newRuntime(t, "1.1.0")
	r.daemon.fail = cniError(cnirpc.ErrorCode_INVALID_NETWORK_CONFIG, "AddressPool default does not exist", "create it")
	r.start(t)
	_, err := r.cni.AddNetworkList(t.Context(), r.list, r.conf)
	mustCode(t, err, 7)
	if want := `plugin type="coil" failed (add): AddressPool default does not exist; create it`; err == nil || err.Error() != want {
		t.Errorf("error is %v, want %q", err, want)
	}
}

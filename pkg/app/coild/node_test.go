package coild

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	coilfake "github.com/coil-net/coil/generated/clientset/versioned/fake"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node/blocks"
	"github.com/coil-net/coil/pkg/node/view"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

// usage is a record of one block, of which a pod has an address.
type usage struct{}

func (usage) SetBlocks(context.Context, []store.Block) error { return nil }
func (usage) ForgetBlock(context.Context, string) error      { return store.ErrInUse }
func (usage) Usage(context.Context) ([]store.Usage, error) {
	return []store.Usage{{Block: store.Block{Name: "default-0", Pool: "default"}, Allocated: 1}}, nil
}

// announced counts the blocks of the last export.
type announced struct{ atomic.Int32 }

func (a *announced) Export(_ context.Context, held []routes.HeldBlock) error {
	a.Store(int32(len(held)))
	return nil
}

// told has the reasons of Events.
type told struct{ reasons []string }

func (r *told) Eventf(_, _ runtime.Object, _, reason, _, _ string, _ ...any) {
	r.reasons = append(r.reasons, reason)
}

// The Node becomes another machine's while coild runs, and this one's again.
func TestNodeOfAnotherMachine(t *testing.T) {
	var machineID atomic.Value
	machineID.Store("this")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := nodeOf(machineID.Load().(string))
		n.TypeMeta, n.UID = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, "uid"
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(n); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	clients := testkit.Must(kube.NewClients(&rest.Config{Host: server.URL}))(t)
	coil := coilfake.NewSimpleClientset().CoilV2()
	held, requests := kube.AddressBlockInformer(coil, ""), kube.BlockRequestInformer(coil, "")
	exported, events := &announced{}, &told{}
	var watches kube.Watches
	d := &daemon{
		Options: Options{NodeName: "node"}, health: observe.NewHealth(condNode), recorder: events, machine: machine{id: "this"},
		self: &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: "uid"}},
		node: view.WatchNode(&watches, clients, "node"),
	}
	manager := testkit.Must(blocks.New(blocks.Config{NodeName: "node", Warn: d.warn}, coil, held, requests, usage{}, exported, reconcile.NewMetrics(nil)))(t)
	d.parts = []part{(&addresses{daemon: d, blocks: manager}).part()}
	if err := manager.Export(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, step := range []struct {
		machine string
		settled bool
		err     string // of readiness
		later   bool
		blocks  int32
	}{
		{"this", false, "", false, 1},
		{"other", false, "is another machine's", false, 0},
		{"this", false, "was another machine's", true, 0},
		{"other", false, "is another machine's", false, 0},
		{"this", true, "", false, 1},
	} {
		machineID.Store(step.machine)
		if step.settled {
			d.machine.clash = time.Now().Add(-machineSettle)
		}
		err := d.syncNode(t.Context())
		if soon := strings.Contains(err.Error(), "again after 59."); soon != step.later || !soon && !strings.Contains(err.Error(), "again after 5m") {
			t.Errorf("step %d: %v", i, err)
		}
		ready := fmt.Sprint(d.health.Ready())
		if step.err == "" && d.health.Ready() != nil || step.err != "" && !strings.Contains(ready, step.err) {
			t.Errorf("step %d: readiness %s, want %q", i, ready, step.err)
		}
		if got := exported.Load(); got != step.blocks {
			t.Errorf("step %d: %d blocks are announced, want %d", i, got, step.blocks)
		}
	}
	if len(events.reasons) != 1 || events.reasons[0] != "OtherMachine" {
		t.Errorf("Events: %q, want one", events.reasons)
	}
}

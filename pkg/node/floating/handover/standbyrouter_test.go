package handover

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/testkit"
)

// The follower has another router: all connections are copied again at once, also if the follower learns of it last.
func TestFollowerHasAnotherRouter(t *testing.T) {
	other := &table{flows: map[key]conntrack.Flow{}}
	var late atomic.Pointer[v2.AddressBlock] // what the follower knows
	w := newStandbyWorld(t, func(w *world) {
		block, open := w.b.cfg.Block, w.b.cfg.Open
		w.b.cfg.Block = func(name string) *v2.AddressBlock {
			if b := late.Load(); b != nil {
				return b
			}
			return block(name)
		}
		w.b.cfg.Open = func(ctx context.Context, pod types.UID) (Flows, error) {
			if pod == "another pod" {
				return other, nil
			}
			return open(ctx, pod)
		}
	})
	a := w.address("p-0", "a")
	w.a.open(a, 0, 100)
	w.keeps("all flows")
	w.inStep("")
	late.Store(w.a.cfg.Block("p-0"))
	w.standby(func(f *v2.Floating) {
		f.Successors = []v2.FloatingNode{{Node: "b", PodUID: "another pod"}, {Node: "a", PodUID: "pod of a"}}
	})
	w.inStep("the router here is pod pod of b")
	late.Store(nil)
	w.inStep("")
	testkit.Eventually(t, 10*time.Second, "all flows at the other router", func() error {
		if n := len(other.all()); n != 100 {
			return fmt.Errorf("%d flows", n)
		}
		return nil
	})
}

package standby

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating/floatingtest"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/testkit"
)

// The follower has another router: all connections are copied again at once, also if the follower learns of it last.
func TestFollowerHasAnotherRouter(t *testing.T) {
	other := floatingtest.NewTable()
	var late atomic.Pointer[v2.AddressBlock] // what the follower knows
	w := newStandbyWorld(t, func(w *world) {
		block := w.b.cfg.Block
		w.b.cfg.Block = func(name string) *v2.AddressBlock {
			if b := late.Load(); b != nil {
				return b
			}
			return block(name)
		}
		w.b.OpenBy(func(_ context.Context, pod types.UID) (tables.Table, error) {
			if pod == "another pod" {
				return other, nil
			}
			return w.b.Table, nil
		})
	})
	a := w.Address("p-0", "a")
	w.a.Add(a, 0, 100)
	w.Kept("all flows")
	w.inStep("")
	late.Store(w.a.cfg.Block("p-0"))
	w.change(func(f *v2.Floating) {
		f.Successors = []v2.FloatingNode{{Node: "b", PodUID: "another pod"}, {Node: "a", PodUID: "pod of a"}}
	})
	w.inStep("the router here is pod pod of b")
	late.Store(nil)
	w.inStep("")
	testkit.Eventually(t, 10*time.Second, "all flows at the other router", func() error {
		if n := len(other.All()); n != 100 {
			return fmt.Errorf("%d flows", n)
		}
		return nil
	})
}

package view

import (
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan/client"
)

// Routers are listed once until they change, and after a while.
func TestRoutersAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r routers
		name := types.NamespacedName{Namespace: "net", Name: "a"}
		lists, now := 0, 0
		list := func() []client.Router {
			lists++
			return []client.Router{{Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(now)})}}
		}
		want := func(when string, router byte, listed int) {
			t.Helper()
			all := r.get(name, list)
			if len(all) != 1 || all[0].Addr != netip.AddrFrom4([4]byte{10, 1, 0, router}) || lists != listed {
				t.Errorf("%s: %v, listed %d times, want %d", when, all, lists, listed)
			}
		}
		want("at first", 0, 1)
		other := r.get(types.NamespacedName{Name: "many"}, func() []client.Router { return make([]client.Router, 1, 100000) })
		if cap(other) > 100 {
			t.Errorf("of %d router memory for %d is kept", len(other), cap(other))
		}
		now = 1
		want("again", 0, 1)
		r.changed(name)
		want("changed", 1, 2)
		now = 2
		time.Sleep(keepRouters)
		want("later", 2, 3)
		// Routers that change while they are listed are listed again.
		now = 3
		r.changed(name)
		r.get(name, func() []client.Router {
			r.changed(name)
			return nil
		})
		want("changed meanwhile", 3, 4)
	})
}

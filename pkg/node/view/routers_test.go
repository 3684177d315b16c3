package view

import (
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// Routers are listed once until they change, and after a while.
func TestRoutersAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r routers
		name := types.NamespacedName{Namespace: "net", Name: "a"}
		lists, now := 0, 0
		var failure error
		list := func() ([]client.Router, error) {
			lists++
			return []client.Router{{Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(now)})}}, failure
		}
		want := func(when string, router byte, listed int) {
			t.Helper()
			all := testkit.Must(r.get(name, list))(t)
			if len(all) != 1 || all[0].Addr != netip.AddrFrom4([4]byte{10, 1, 0, router}) || lists != listed {
				t.Errorf("%s: %v, listed %d times, want %d", when, all, lists, listed)
			}
		}
		want("at first", 0, 1)
		other := testkit.Must(r.get(types.NamespacedName{Name: "many"}, func() ([]client.Router, error) { return make([]client.Router, 1, 100000), nil }))(t)
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
		r.changed(name)
		failure = errors.New("no list")
		if _, err := r.get(name, list); !errors.Is(err, failure) {
			t.Errorf("a list that fails: %v", err)
		}
		failure = nil
		want("after a failure", 2, 5)
		// What changes while it is listed is listed again.
		now = 3
		r.changed(name)
		_, _ = r.get(name, func() ([]client.Router, error) {
			r.changed(name)
			return nil, nil
		})
		want("changed meanwhile", 3, 6)
	})
}

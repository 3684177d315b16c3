package egress

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/testkit"
)

// Routers and Services that aren't listed any more may still send for a while.
func TestPeersLinger(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("a", "a")
	m := w.manager(false)
	list := func(addrs ...string) {
		w.routers["net/a"] = nil
		for _, a := range addrs {
			w.routers["net/a"] = append(w.routers["net/a"], client.Router{Addr: netip.MustParseAddr(a), State: client.RouterLive})
		}
	}
	peers := func(when, want string) {
		t.Helper()
		testkit.Check(t, m.sync(t.Context(), "a"))
		if got := fmt.Sprint(client.StateOf(w.netns["/a"]).Filter.Peers); got != want {
			t.Errorf("%s: peers are %s, want %s", when, got, want)
		}
	}
	list("10.1.0.1", "10.1.0.2")
	if err := w.add(t, m, "a"); err != nil {
		t.Fatal(err)
	}
	peers("at first", "[10.1.0.1 10.1.0.2 10.96.0.1]")
	list("10.1.0.2", "10.1.0.3")
	peers("a router was replaced", "[10.1.0.1 10.1.0.2 10.1.0.3 10.96.0.1]")
	e := w.egress("a", "10.96.0.2", "192.0.2.0/24")
	peers("another Service", "[10.1.0.1 10.1.0.2 10.1.0.3 10.96.0.1 10.96.0.2]")
	// As if it was long ago.
	for a := range m.departed["net/a"] {
		if left := m.departed["net/a"][a]; !left.IsZero() {
			m.departed["net/a"][a] = left.Add(-lingers)
		}
	}
	peers("they don't send any more", "[10.1.0.2 10.1.0.3 10.96.0.2]")
	list("10.1.0.1", "10.1.0.2")
	peers("one is back", "[10.1.0.1 10.1.0.2 10.1.0.3 10.96.0.2]")
	delete(w.egresses, "net/"+e.Name)
	peers("the Egress is deleted", "[10.1.0.1 10.1.0.2 10.1.0.3 10.96.0.2]")
	if err := m.Sweep(t.Context()); err != nil || len(m.departed) != 1 {
		t.Errorf("known are %v, %v", m.departed, err)
	}
	w.gone["/a"] = true
	for range 2 { // the first forgets the pod
		if err := m.Sweep(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if len(m.departed) != 0 {
		t.Errorf("of an Egress that nobody uses is known %v", m.departed)
	}
}

// EndpointSlices that list other routers again and again make no pod take packets of any number of addresses.
func TestLeftAreBounded(t *testing.T) {
	m := newWorld().manager(false)
	start := time.Now()
	var gone []netip.Addr
	for i := range 40 {
		var listed []netip.Addr
		for j := range 100 {
			listed = append(listed, netip.AddrFrom4([4]byte{10, 1, byte(i), byte(j)}))
		}
		gone = m.left("net/a", listed, start.Add(time.Duration(i)*time.Millisecond))
		if len(gone) > mostLeft || len(m.departed["net/a"]) > mostLeft+len(listed) {
			t.Fatalf("%d addresses linger, %d are known", len(gone), len(m.departed["net/a"]))
		}
	}
	if len(gone) != mostLeft || gone[len(gone)-1] != netip.AddrFrom4([4]byte{10, 1, 38, 99}) || gone[0].Less(netip.AddrFrom4([4]byte{10, 1, 33, 0})) {
		t.Errorf("%d addresses linger, from %s to %s", len(gone), gone[0], gone[len(gone)-1])
	}
}

// A pod that may not use an Egress, or names one that doesn't exist, makes nobody forget what lingers of it.
func TestRefusedPodsLeaveWhatLingers(t *testing.T) {
	w := newWorld()
	w.egress("a", "10.96.0.1", "192.0.2.0/24")
	w.pod("a", "a")
	m := w.manager(false)
	testkit.Check(t, w.add(t, m, "a"))
	w.egresses["net/a"].Spec.AllowedNamespaces = &metav1.LabelSelector{MatchLabels: map[string]string{"team": "red"}}
	w.pod("refused", "a")
	if err := w.add(t, m, "refused"); err == nil {
		t.Fatal("control: the pod may use the Egress")
	}
	if since, known := m.departed["net/a"][netip.MustParseAddr("10.96.0.1")]; !known || !since.IsZero() {
		t.Errorf("the Service's address is known: %t, gone since %v", known, since)
	}
}

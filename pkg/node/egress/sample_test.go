package egress

import (
	"fmt"
	"net/netip"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// One router that dies makes a handful of Events in the cluster, however many nodes have clients.
func TestSpeaks(t *testing.T) {
	for _, clients := range []int{1, 5, spokesmen, 50, 2000} {
		total, silent := 0, 0
		const routers = 200
		for r := range routers {
			router, n := netip.AddrFrom4([4]byte{10, 1, byte(r >> 8), byte(r)}), 0
			for c := range clients {
				if speaks(router, fmt.Sprintf("%064d", c), clients) {
					n++
				}
			}
			if n > 4*spokesmen {
				t.Errorf("%d of %d clients speak of router %s", n, clients, router)
			}
			if n == 0 {
				silent++
			}
			total += n
		}
		mean := float64(total) / routers
		if want := float64(min(clients, spokesmen)); mean < want*0.8 || mean > want*1.2 || silent > 2 {
			t.Errorf("of %d clients %.1f speak in the mean, want %.0f; nobody of %d routers", clients, mean, want, silent)
		}
	}
}

// The number of clients is that of the whole cluster.
func TestNodesThatTellOfARouter(t *testing.T) {
	const nodes = 300
	router, key := netip.MustParseAddr("10.1.1.1"), types.NamespacedName{Namespace: "net", Name: "a"}
	for _, c := range []struct{ clients, least, most int }{{nodes, 1, 4 * spokesmen}, {0, nodes, nodes}} { // 0: not counted yet
		telling := 0
		for n := range nodes {
			w := newWorld()
			w.egress("a", "10.96.0.1", "192.0.2.0/24")
			pod := fmt.Sprint("pod-", n)
			w.pod(pod, "a")
			m := w.manager(false)
			if err := w.add(t, m, pod); err != nil {
				t.Fatal(err)
			}
			if m.tells(router, key, c.clients) {
				telling++
			}
		}
		if telling < c.least || telling > c.most {
			t.Errorf("%d clients: %d of %d nodes tell", c.clients, telling, nodes)
		}
	}
}

// Clients are told of a router on each node, people on some.
func TestTellRouter(t *testing.T) {
	addr := netip.MustParseAddr("10.1.1.1")
	for clients, want := range map[int32]int{1: 2, 1 << 30: 0} {
		w := newWorld()
		w.egress("a", "10.96.0.1", "192.0.2.0/24").Status.Clients = clients
		w.pod("p", "a")
		m := w.manager(false)
		if err := w.add(t, m, "p"); err != nil {
			t.Fatal(err)
		}
		for _, dead := range []bool{true, false} {
			key := routerKey{"net/a", addr}
			m.routers[key] = &router{liveness: liveness{dead: dead}}
			m.tellRouter(t.Context(), key)
		}
		if len(w.events) != want {
			t.Errorf("%d clients: Events %q, want %d", clients, w.events, want)
		}
	}
}

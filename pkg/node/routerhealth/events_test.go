package routerhealth

import (
	"fmt"
	"net/netip"
	"testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
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
	router := routerKey{"net/a", netip.MustParseAddr("10.1.1.1")}
	for _, tt := range []struct{ clients, least, most int }{{nodes, 1, 4 * spokesmen}, {0, nodes, nodes}} { // 0: not counted yet
		telling := 0
		for n := range nodes {
			c := nodeOf(&echoes{})
			c.sends("ns", fmt.Sprint("pod-", n), groupOf(router.egress, router.addr))
			if c.tells(router, tt.clients) {
				telling++
			}
		}
		if telling < tt.least || telling > tt.most {
			t.Errorf("%d clients: %d of %d nodes tell", tt.clients, telling, nodes)
		}
	}
}

// Clients are told of a router on each node, people on some.
func TestTellRouter(t *testing.T) {
	addr := netip.MustParseAddr("10.1.1.1")
	for clients, want := range map[int32]int{1: 2, 1 << 30: 0} {
		api := &cluster{egress: v2.Egress{Status: v2.EgressStatus{Clients: clients}}}
		c := New(&echoes{}, api, api)
		c.sends("ns", "p", groupOf("net/a", addr))
		for _, dead := range []bool{true, false} {
			c.tell(t.Context(), routerKey{"net/a", addr}, dead)
		}
		if len(api.events) != want {
			t.Errorf("%d clients: Events %q, want %d", clients, api.events, want)
		}
	}
}

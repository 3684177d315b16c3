package podnet_test

import (
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/testkit"
)

// manyRanges is a guard of 2,048 ranges.
func manyRanges(i int) dataplane.ClientGuard {
	var g dataplane.ClientGuard
	for j := range 2048 {
		a := netip.AddrFrom4([4]byte{100, byte(i), byte(j >> 8), byte(j) | 1})
		g.Destinations = append(g.Destinations, netipx.IPRangeFrom(a, a))
	}
	return g
}

// Guards that change at the same time cost one change of the node's ruleset, not one each.
func TestGuardsChangeTogether(t *testing.T) {
	const clients = 60
	n := newNode(t)
	change := func(round int) time.Duration {
		start := time.Now()
		var all sync.WaitGroup
		for i := range clients {
			all.Go(func() {
				if err := n.GuardClient(t.Context(), 1000+i, manyRanges(i*2+round)); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		return time.Since(start)
	}
	change(0)
	together := change(1)
	start := time.Now()
	for i := range clients / 6 {
		testkit.Check(t, n.GuardClient(t.Context(), 1000+i, manyRanges(i*2)))
	}
	alone := time.Since(start) * 6
	if together > alone/3 {
		t.Errorf("%d changes at the same time take %v, one after the other %v", clients, together, alone)
	}
	for i := range clients {
		if got := testkit.Must(n.ClientGuard(t.Context(), 1000+i))(t); !got.Equal(manyRanges(i*2+1)) && i >= clients/6 {
			t.Errorf("client %d has another guard", i)
		}
	}
	testkit.Check(t, n.CheckClientGuard(t.Context(), 1000+clients-1, manyRanges(clients*2-1)))
}

// The end of a client's link isn't a loss of its guard, which nobody took away.
func TestEndOfAClientIsNoRepair(t *testing.T) {
	n := newNode(t)
	const gone = 1000 // no link has this index
	testkit.Check(t, n.GuardClient(t.Context(), gone, manyRanges(0)))
	for range 2 {
		res := testkit.Must(n.Guard(t.Context()))(t)
		if res != (dataplane.Result{}) {
			t.Errorf("the guard of a link that is gone counts as %+v", res)
		}
		if g := testkit.Must(n.ClientGuard(t.Context(), gone))(t); len(g.Destinations) > 0 {
			t.Errorf("the guard of a link that is gone stays, for %d destinations", len(g.Destinations))
		}
	}
}

// Destinations that tenants chose for their clients don't keep the node from dropping forged sources.
func TestSourceGuardComesFirst(t *testing.T) {
	n := newNode(t)
	a, b, c := netip.MustParseAddr("192.0.2.0"), netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("192.0.2.255")
	overlap := dataplane.ClientGuard{Destinations: []netipx.IPRange{netipx.IPRangeFrom(a, c), netipx.IPRangeFrom(b, c)}}
	if err := n.GuardClient(t.Context(), 1000, overlap); err == nil {
		t.Fatal("ranges that overlap can be made; the test needs others that can't")
	}
	if rules := testkit.Must(n.host.Run("nft", "list", "table", "inet", dataplane.NftTable))(t); !strings.Contains(rules, "fib saddr . iif") {
		t.Errorf("the node has\n%s", rules)
	}
}

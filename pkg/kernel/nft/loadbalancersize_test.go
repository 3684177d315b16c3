package nft_test

import (
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// 5,000 Services of 20 endpoints are made in seconds, and a change of one endpoint takes no longer than beside 100 Services.
func TestManyServices(t *testing.T) {
	changes := map[int]time.Duration{}
	for _, n := range []int{100, 5000} {
		table, services := open(t, netnstest.New(t).NS, dataplane.NftTableLB), many(n, 20)
		began := time.Now()
		testkit.Must(table.Sync(t.Context(), services.Ruleset()))(t)
		took := time.Since(began)
		if limit := testkit.Limit(10 * time.Second); took > limit {
			t.Errorf("%d Services took %s, want %s at most", n, took, limit)
		}
		changes[n] = medianChange(t, table, &services.Frontends[n/2])
		t.Logf("%d Services: made in %s, a change takes %s", n, took, changes[n])
		testkit.Check(t, table.Check(t.Context(), services.Ruleset()))
	}
	if changes[5000] > 2*changes[100]+testkit.Limit(10*time.Millisecond) {
		t.Errorf("a change takes %s beside 5,000 Services, and %s beside 100", changes[5000], changes[100])
	}
}

// many are Services with an address each.
func many(services, endpoints int) (l ruleset.LoadBalancer) {
	a := netip.MustParseAddr("198.18.0.0")
	for range services {
		a = a.Next()
		at := ruleset.Frontend{Address: a, Port: ruleset.Port{Protocol: unix.IPPROTO_TCP, Port: 80}}
		for i := range endpoints {
			at.Endpoints = append(at.Endpoints, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i), 1}), 8080))
		}
		l.Addresses, l.Frontends, l.LoadBalancerShape = append(l.Addresses, a), append(l.Frontends, at), l.With(at)
	}
	return l
}

// medianChange is how long it takes to take an endpoint away, and to add it again.
func medianChange(t *testing.T, table *nft.Table, at *ruleset.Frontend) time.Duration {
	t.Helper()
	all, fewer := *at, *at
	fewer.Endpoints = at.Endpoints[1:]
	var took []time.Duration
	for range 10 {
		for _, c := range [][2]*ruleset.Frontend{{&all, &fewer}, {&fewer, &all}} {
			began := time.Now()
			testkit.Check(t, table.Change(t.Context(), ruleset.Change(c[0], c[1])...))
			took = append(took, time.Since(began))
		}
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// Endpoints that have come and gone take no memory: a gateway sees new ones for months.
func TestChangesAreForgotten(t *testing.T) {
	table, services := open(t, netnstest.New(t).NS, dataplane.NftTableLB), many(1, 1)
	testkit.Must(table.Sync(t.Context(), services.Ruleset()))(t)
	change := func(round int) {
		other := many(1000, 20)
		var add, remove []dataplane.SetChange
		for i := range other.Frontends {
			other.Frontends[i].Port.Port = uint16(1000 + round)
			add = append(add, ruleset.Change(nil, &other.Frontends[i])...)
			remove = append(remove, ruleset.Change(&other.Frontends[i], nil)...)
		}
		testkit.Check(t, table.Change(t.Context(), add...), table.Change(t.Context(), remove...))
	}
	inUse := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	change(0)
	before := inUse()
	for round := range 5 {
		change(1 + round)
	}
	if after := inUse(); after > before+4<<20 {
		t.Errorf("100,000 endpoints that have gone take %d KiB", (after-before)>>10)
	}
	if did := testkit.Must(table.Sync(t.Context(), services.Ruleset()))(t); did.Changed() {
		t.Errorf("Sync did %+v afterwards", did)
	}
}

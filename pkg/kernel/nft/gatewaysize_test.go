package nft_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
)

// 5,000 clients are one transaction, and a change of one is a few messages.
func TestGatewayWithManyClients(t *testing.T) {
	l := newLab(t)
	for i := range 5000 {
		a := netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)})
		l.rules.Clients = append(l.rules.Clients,
			ruleset.GatewayClient{Addr: a, Link: 100 + i},
			ruleset.GatewayClient{Addr: addr(dataplane.IPv6, 2, i), Link: 10_000 + i})
	}
	start := time.Now()
	l.sync(dataplane.Result{Added: 1})
	t.Logf("10,000 addresses in %s", time.Since(start))
	l.sync(dataplane.Result{})
	l.rules.Clients = slices.Delete(l.rules.Clients, 100, 101)
	start = time.Now()
	l.sync(dataplane.Result{Deleted: 2})
	t.Logf("one fewer in %s", time.Since(start))
	testkit.Check(t, l.clients[0].Ping(addr(dataplane.IPv4, 9, 2), timeout))
}

// More clients than sets have room for get larger ones.
func TestGatewayOutgrowsItsSets(t *testing.T) {
	l := newLab(t)
	l.sync(dataplane.Result{Added: 1})
	few := l.rules.Clients
	for i := range 9000 {
		l.rules.Clients = append(l.rules.Clients, ruleset.GatewayClient{Addr: netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}), Link: 100 + i})
	}
	l.sync(dataplane.Result{Replaced: 1})
	l.sync(dataplane.Result{})
	testkit.Check(t, l.clients[0].Ping(addr(dataplane.IPv4, 9, 2), timeout))
	l.rules.Clients = few
	l.sync(dataplane.Result{Replaced: 1})
	testkit.Check(t, l.clients[0].Ping(addr(dataplane.IPv4, 9, 2), timeout))
}

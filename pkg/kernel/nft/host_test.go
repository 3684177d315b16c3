package nft_test

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func ranged(first, last string) netipx.IPRange {
	return netipx.IPRangeFrom(netip.MustParseAddr(first), netip.MustParseAddr(last))
}

// The whole of a node's ruleset, as nft(8) shows it, and what another agent reads of it.
func TestHostRuleset(t *testing.T) {
	some := dataplane.ClientGuard{Destinations: []netipx.IPRange{ranged("192.0.2.0", "192.0.2.255"), ranged("198.51.100.7", "198.51.100.7"), ranged("2001:db8::", "2001:db8:0:ffff:ffff:ffff:ffff:ffff")}}
	everything := dataplane.ClientGuard{
		Destinations: []netipx.IPRange{ranged("0.0.0.0", "9.255.255.255"), ranged("11.0.0.0", "255.255.255.255"), ranged("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")},
		Replies:      []netipx.IPRange{ranged("0.0.0.0", "255.255.255.255")},
	}
	ns := netnstest.New(t)
	l := lab{t: t}
	table := hostTable(t, ns.NS)
	defer table.Close()
	check := func(r ruleset.Host) {
		t.Helper()
		testkit.Check(t, table.Check(t.Context(), r))
		other := hostTable(t, ns.NS)
		defer other.Close()
		got := ruleset.GuardsOf(testkit.Must(other.Sets(t.Context()))(t))
		if d := cmp.Diff(r.Clients, got, cmp.Comparer(func(a, b netipx.IPRange) bool { return a == b })); d != "" && len(r.Clients)+len(got) > 0 {
			t.Errorf("another agent reads (-want +got):\n%s", d)
		}
	}
	if got := ruleset.GuardsOf(testkit.Must(table.Sets(t.Context()))(t)); len(got) > 0 {
		t.Errorf("without a table there are %v", got)
	}
	r := ruleset.Host{SourceGuard: true, Clients: map[int]dataplane.ClientGuard{7: some, 9: everything, 12: some}}
	testkit.Must(table.Sync(t.Context(), r))(t)
	check(r)
	golden(t, ns, dataplane.NftTable, "host")

	// A client with a guard that there is costs elements, and another guard no rule of the others.
	r.Clients = map[int]dataplane.ClientGuard{7: some, 9: everything, 12: some, 13: everything}
	if got := testkit.Must(table.Sync(t.Context(), r))(t); got != (dataplane.Result{Added: 2}) {
		t.Errorf("one more client changed %+v", got)
	}
	check(r)
	r = ruleset.Host{Clients: map[int]dataplane.ClientGuard{7: some}}
	testkit.Must(table.Sync(t.Context(), r))(t)
	check(r)
	if got := testkit.Must(table.Sync(t.Context(), r))(t); got.Changed() {
		t.Errorf("the second time it changed %+v", got)
	}
	l.run(ns, "nft", "flush", "set", "inet", "coil", "clients")
	if err := table.Check(t.Context(), r); err == nil {
		t.Error("a set without its elements is found right")
	}
	testkit.Must(table.Sync(t.Context(), ruleset.Host{}))(t)
	if out := l.run(ns, "nft", "list", "ruleset"); out != "" {
		t.Errorf("without rules there is\n%s", out)
	}
}

// The guards of clients with as many destinations as there may be are more than one message of netlink takes.
func TestHostManyRanges(t *testing.T) {
	ns := netnstest.New(t)
	table := hostTable(t, ns.NS)
	defer table.Close()
	r := ruleset.Host{SourceGuard: true, Clients: map[int]dataplane.ClientGuard{}}
	for link := range 64 {
		var g dataplane.ClientGuard
		for i := range 2 * client.MostDestinations {
			a := netip.AddrFrom16([16]byte{0x20, 1, 13: byte(link), byte(i >> 8), byte(i)})
			if i%2 == 0 {
				g.Destinations = append(g.Destinations, netipx.IPRangeFrom(a, a))
			}
		}
		g.Replies = g.Destinations
		r.Clients[7+link] = g
	}
	testkit.Must(table.Sync(t.Context(), r))(t)
	testkit.Check(t, table.Check(t.Context(), r))
	// Somebody else changes a table: all is read again, and what is right stays.
	other := testkit.Must(ns.Run("nft", "add", "table", "inet", "other"))(t)
	if got := testkit.Must(table.Sync(t.Context(), r))(t); got.Changed() {
		t.Errorf("%s changed %+v", other, got)
	}
}

package nft_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

func ranged(first, last string) dataplane.Range {
	return dataplane.Range{First: netip.MustParseAddr(first), Last: netip.MustParseAddr(last)}
}

// The whole of a node's ruleset, as nft(8) shows it, and what another agent reads of it.
func TestHostRuleset(t *testing.T) {
	some := dataplane.ClientGuard{Destinations: []dataplane.Range{ranged("192.0.2.0", "192.0.2.255"), ranged("198.51.100.7", "198.51.100.7"), ranged("2001:db8::", "2001:db8:0:ffff:ffff:ffff:ffff:ffff")}}
	everything := dataplane.ClientGuard{
		Destinations: []dataplane.Range{ranged("0.0.0.0", "9.255.255.255"), ranged("11.0.0.0", "255.255.255.255"), ranged("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")},
		Replies:      []dataplane.Range{ranged("0.0.0.0", "255.255.255.255")},
	}
	ns := netnstest.New(t)
	l := lab{t: t}
	table := testkit.Must(nft.NewHost(ns.NS))(t)
	defer table.Close()
	check := func(r dataplane.HostRules) {
		t.Helper()
		testkit.Check(t, table.Check(t.Context(), r))
		other := testkit.Must(nft.NewHost(ns.NS))(t)
		defer other.Close()
		got := testkit.Must(other.Clients(t.Context()))(t)
		if d := cmp.Diff(r.Clients, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" && len(r.Clients)+len(got) > 0 {
			t.Errorf("another agent reads (-want +got):\n%s", d)
		}
	}
	if got := testkit.Must(table.Clients(t.Context()))(t); len(got) > 0 {
		t.Errorf("without a table there are %v", got)
	}
	r := dataplane.HostRules{SourceGuard: true, Clients: map[int]dataplane.ClientGuard{7: some, 9: everything, 12: some}}
	testkit.Must(table.Sync(t.Context(), r))(t)
	check(r)
	got := sum.ReplaceAllString(l.run(ns, "nft", "list", "table", "inet", dataplane.NftTable), `"`) + "\n"
	path := filepath.Join("testdata", "host.nft")
	if *update {
		testkit.Check(t, os.WriteFile(path, []byte(got), 0o644))
	}
	if d := cmp.Diff(string(testkit.Must(os.ReadFile(path))(t)), got); d != "" {
		t.Errorf("%s (-want +got), go test -update writes it:\n%s", path, d)
	}

	// A client with a guard that there is costs elements, and another guard no rule of the others.
	r.Clients = map[int]dataplane.ClientGuard{7: some, 9: everything, 12: some, 13: everything}
	if got := testkit.Must(table.Sync(t.Context(), r))(t); got != (dataplane.Result{Added: 2}) {
		t.Errorf("one more client changed %+v", got)
	}
	check(r)
	r = dataplane.HostRules{Clients: map[int]dataplane.ClientGuard{7: some}}
	testkit.Must(table.Sync(t.Context(), r))(t)
	check(r)
	if got := testkit.Must(table.Sync(t.Context(), r))(t); got.Changed() {
		t.Errorf("the second time it changed %+v", got)
	}
	l.run(ns, "nft", "flush", "set", "inet", "coil", "clients")
	if err := table.Check(t.Context(), r); err == nil {
		t.Error("a set without its elements is found right")
	}
	testkit.Must(table.Sync(t.Context(), dataplane.HostRules{}))(t)
	if out := l.run(ns, "nft", "list", "ruleset"); out != "" {
		t.Errorf("without rules there is\n%s", out)
	}
}

// The guards of clients with as many destinations as there may be are more than one message of netlink takes.
func TestHostManyRanges(t *testing.T) {
	ns := netnstest.New(t)
	table := testkit.Must(nft.NewHost(ns.NS))(t)
	defer table.Close()
	r := dataplane.HostRules{SourceGuard: true, Clients: map[int]dataplane.ClientGuard{}}
	for link := range 64 {
		var g dataplane.ClientGuard
		for i := range 2 * plan.MostDestinations {
			a := netip.AddrFrom16([16]byte{0x20, 1, 13: byte(link), byte(i >> 8), byte(i)})
			if i%2 == 0 {
				g.Destinations = append(g.Destinations, dataplane.Range{First: a, Last: a})
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

// What tenants chose for their clients doesn't keep the node from dropping forged sources.
func TestHostSourceGuardFirst(t *testing.T) {
	ns := netnstest.New(t)
	table := testkit.Must(nft.NewHost(ns.NS))(t)
	defer table.Close()
	overlap := dataplane.ClientGuard{Destinations: []dataplane.Range{ranged("192.0.2.0", "192.0.2.255"), ranged("192.0.2.7", "192.0.3.255")}}
	r := dataplane.HostRules{SourceGuard: true, Clients: map[int]dataplane.ClientGuard{7: overlap}}
	if _, err := table.Sync(t.Context(), r); err == nil {
		t.Fatal("ranges that overlap can be made; the test needs others that can't")
	}
	testkit.Check(t, table.Check(t.Context(), dataplane.HostRules{SourceGuard: true}))
}

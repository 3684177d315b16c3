package nft_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

// golden compares what nft(8) shows of a table of the family inet with a file of testdata.
func golden(t *testing.T, ns *netnstest.NS, table, name string) {
	t.Helper()
	goldenOf(t, ns, "inet", table, name)
}

// goldenOf is like golden, for a table of a family.
func goldenOf(t *testing.T, ns *netnstest.NS, family, table, name string) {
	t.Helper()
	got := sum.ReplaceAllString(testkit.Must(ns.Run("nft", "list", "table", family, table))(t), `"`) + "\n"
	path := filepath.Join("testdata", name+".nft")
	if *update {
		testkit.Check(t, os.MkdirAll("testdata", 0o755), os.WriteFile(path, []byte(got), 0o644))
	}
	if d := cmp.Diff(string(testkit.Must(os.ReadFile(path))(t)), got); d != "" {
		t.Errorf("%s (-want +got), go test -update writes it:\n%s", path, d)
	}
}

func open(t *testing.T, ns *netns.NS, name string) *nft.Table {
	t.Helper()
	table := testkit.Must(nft.New(ns, name))(t)
	t.Cleanup(table.Close)
	return table
}

// key is the key of an address.
func key(a string) string { return dataplane.KeyOf(netip.MustParseAddr(a)) }

// pair is the range of two fields, each from a first to a last address, whose value is an address.
func pair(client, destinations, last, value string) dataplane.Element {
	return dataplane.Element{Key: key(client) + key(destinations), Last: key(client) + key(last), Value: key(value)}
}

// Sets and maps of all kinds are made, read back, and changed element by element, without a rule being made anew.
func TestSetsAndMaps(t *testing.T) {
	ns := netnstest.New(t)
	r := dataplane.Ruleset{
		Counters: []string{"seen"},
		Sets: []dataplane.Set{
			{Name: "sources", Key: "ipv4_addr", Interval: true, Ranges: []netipx.IPRange{ranged("10.0.0.0", "10.0.0.255"), ranged("10.0.1.0", "10.0.1.7"), ranged("255.0.0.0", "255.255.255.255")}},
			{Name: "places", Key: "ipv4_addr", Value: "verdict", Elements: []dataplane.Element{{Key: key("192.0.2.1"), Value: "goto one"}, {Key: key("192.0.2.2"), Value: "drop"}}},
			{Name: "addresses", Key: "ipv4_addr . ipv4_addr", Value: "ipv4_addr", Interval: true, Elements: []dataplane.Element{
				pair("10.0.0.1", "0.0.0.0", "127.255.255.255", "198.51.100.1"), pair("10.0.0.1", "128.0.0.0", "255.255.255.255", "198.51.100.2"),
			}},
			{Name: "gateways", Key: "iface_index", Value: "ipv4_addr", Elements: []dataplane.Element{{Key: dataplane.KeyOfLink(1), Value: key("192.0.2.9")}}},
		},
		Chains: []dataplane.Chain{
			{Name: "one", Rules: []dataplane.ChainRule{{Comment: "seen", Text: "counter name seen accept"}}},
			{Name: "entry", Hook: &dataplane.Hook{Type: "filter", Name: "prerouting", Priority: dataplane.HookMangle}, Rules: []dataplane.ChainRule{
				{Comment: "to a place", Text: "meta nfproto ipv4 ip saddr @sources ip daddr vmap @places"},
			}},
			{Name: "nat", Hook: &dataplane.Hook{Type: "nat", Name: "postrouting", Priority: dataplane.HookSourceNAT}, Rules: []dataplane.ChainRule{
				{Comment: "gets its address", Text: "meta nfproto ipv4 snat ip to ip saddr . ip daddr map @addresses fully-random"},
			}},
		},
	}
	table := open(t, ns.NS, "first")
	sync := func(want dataplane.Result) {
		t.Helper()
		if got := testkit.Must(table.Sync(t.Context(), r))(t); got != want {
			t.Errorf("Sync did %+v, want %+v", got, want)
		}
		testkit.Check(t, table.Check(t.Context(), r))
		other := open(t, ns.NS, "first") // knows nothing yet
		testkit.Check(t, other.Check(t.Context(), r))
		if got := testkit.Must(other.Sync(t.Context(), r))(t); got.Changed() {
			t.Errorf("another agent changed %+v", got)
		}
	}
	sync(dataplane.Result{Added: 1})
	golden(t, ns, "first", "sets")

	r.Sets[0].Ranges = []netipx.IPRange{ranged("10.0.0.0", "10.0.0.127"), ranged("10.0.1.0", "10.0.1.7"), ranged("10.0.1.8", "10.0.1.9"), ranged("255.0.0.0", "255.255.255.255")}
	sync(dataplane.Result{Added: 2, Deleted: 1})
	r.Sets[1].Elements = []dataplane.Element{{Key: key("192.0.2.1"), Value: "goto one"}, {Key: key("192.0.2.2"), Value: "accept"}}
	sync(dataplane.Result{Added: 1, Deleted: 1})
	r.Sets[2].Elements = []dataplane.Element{r.Sets[2].Elements[0], pair("10.0.0.1", "128.0.0.0", "255.255.255.255", "198.51.100.3")}
	sync(dataplane.Result{Added: 1, Deleted: 1})
	r.Sets[3].Elements = nil
	sync(dataplane.Result{Deleted: 1})

	// Somebody else changes elements of each kind.
	for _, damage := range []string{
		"delete element inet first sources { 10.0.0.0/25 }", "add element inet first sources { 172.16.0.0/12 }",
		"delete element inet first places { 192.0.2.1 }", "delete element inet first addresses { 10.0.0.1 . 0.0.0.0/1 }",
		"add element inet first gateways { \"lo\" : 192.0.2.7 }",
	} {
		testkit.Must(ns.Run("nft", damage))(t)
		if err := table.Check(t.Context(), r); err == nil || !strings.Contains(err.Error(), "has other elements") {
			t.Errorf("%s: CHECK says %v", damage, err)
		}
		if got := testkit.Must(table.Sync(t.Context(), r))(t); got.Replaced > 0 || !got.Changed() {
			t.Errorf("%s: Sync did %+v", damage, got)
		}
		testkit.Check(t, table.Check(t.Context(), r))
	}
}

// Owners of different tables leave each other's alone.
func TestTablesOfOthersStay(t *testing.T) {
	ns := netnstest.New(t)
	r := dataplane.Ruleset{Chains: []dataplane.Chain{{Name: "mine", Rules: []dataplane.ChainRule{{Comment: "all", Text: "accept"}}}}}
	one, two := open(t, ns.NS, "one"), open(t, ns.NS, "two")
	testkit.Must(one.Sync(t.Context(), r))(t)
	testkit.Must(two.Sync(t.Context(), r))(t)
	if got := testkit.Must(one.Sync(t.Context(), r))(t); got.Changed() {
		t.Errorf("beside another table Sync did %+v", got)
	}
	for _, want := range []dataplane.Result{{Deleted: 1}, {}} {
		if got := testkit.Must(two.Sync(t.Context(), dataplane.Ruleset{}))(t); got != want {
			t.Errorf("without chains Sync did %+v, want %+v", got, want)
		}
	}
	testkit.Check(t, one.Check(t.Context(), r))
	if exists := testkit.Must(two.Exists(t.Context()))(t); exists {
		t.Error("a table without chains is left")
	}
}

package nft_test

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

var update = flag.Bool("update", false, "write what the tests see to testdata")

// sum is the hash that a rule's comment ends with.
var sum = regexp.MustCompile(` [0-9a-f]{8}"`)

// The whole of a client's ruleset, as nft(8) shows it.
func TestClientRuleset(t *testing.T) {
	both := ipam.Address{IPv4: netip.MustParseAddr("10.1.0.5"), IPv6: netip.MustParseAddr("fd01::5")}
	some := plan.ClientEgress{
		Name: "net/some", Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")},
		Peers:   ipam.Address{IPv4: netip.MustParseAddr("10.96.0.1"), IPv6: netip.MustParseAddr("fd96::1")},
		Routers: []plan.ClientRouter{{Addr: netip.MustParseAddr("10.1.0.9"), State: plan.RouterLive}, {Addr: netip.MustParseAddr("fd01::9"), State: plan.RouterDraining}},
	}
	everything := plan.ClientEgress{
		Name: "net/all", Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		InCluster: []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}, Direct: true, Routers: some.Routers,
	}
	marked := some
	marked.OriginatingOnly = true
	for _, c := range []struct {
		name    string
		address ipam.Address
		egress  plan.ClientEgress
	}{
		{"some", both, some},
		{"everything", both, everything},
		{"closed", ipam.Address{IPv4: both.IPv4}, plan.ClientEgress{Name: some.Name, Destinations: some.Destinations}},
		{"originating", both, marked},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := netnstest.New(t)
			ns.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "peer")
			l := lab{t: t}
			state := plan.ClientStateOf(plan.Client{
				Address: c.address, Link: "eth0", Index: l.index(ns, "eth0"), Port: dataplane.FouPort, Egresses: []plan.ClientEgress{c.egress},
			})
			table := testkit.Must(nft.NewClient(ns.NS))(t)
			defer table.Close()
			testkit.Must(table.Sync(t.Context(), *state.Filter))(t)
			testkit.Check(t, table.Check(t.Context(), *state.Filter))
			got := sum.ReplaceAllString(l.run(ns, "nft", "list", "table", "inet", dataplane.NftTable), `"`) + "\n"
			path := filepath.Join("testdata", "client_"+c.name+".nft")
			if *update {
				testkit.Check(t, os.MkdirAll("testdata", 0o755), os.WriteFile(path, []byte(got), 0o644))
			}
			if d := cmp.Diff(string(testkit.Must(os.ReadFile(path))(t)), got); d != "" {
				t.Errorf("%s (-want +got), go test -update writes it:\n%s", path, d)
			}
		})
	}
}

package nft_test

import (
	"flag"
	"net/netip"
	"regexp"
	"testing"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/netnstest"
)

var update = flag.Bool("update", false, "write what the tests see to testdata")

// sum is the hash that a rule's comment ends with.
var sum = regexp.MustCompile(` [0-9a-f]{8}"`)

// The whole of a client's ruleset, as nft(8) shows it.
func TestClientRuleset(t *testing.T) {
	both := ipam.Address{IPv4: netip.MustParseAddr("10.1.0.5"), IPv6: netip.MustParseAddr("fd01::5")}
	some := client.Egress{
		Name: "net/some", Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")},
		Peers:   ipam.Address{IPv4: netip.MustParseAddr("10.96.0.1"), IPv6: netip.MustParseAddr("fd96::1")},
		Routers: []client.Router{{Addr: netip.MustParseAddr("10.1.0.9"), State: client.RouterLive}, {Addr: netip.MustParseAddr("fd01::9"), State: client.RouterDraining}},
	}
	everything := client.Egress{
		Name: "net/all", Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		InCluster: []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16")}, Direct: true, Routers: some.Routers,
	}
	marked := some
	marked.OriginatingOnly = true
	for _, c := range []struct {
		name    string
		address ipam.Address
		egress  client.Egress
	}{
		{"some", both, some},
		{"everything", both, everything},
		{"closed", ipam.Address{IPv4: both.IPv4}, client.Egress{Name: some.Name, Destinations: some.Destinations}},
		{"originating", both, marked},
	} {
		t.Run(c.name, func(t *testing.T) {
			ns := netnstest.New(t)
			ns.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "peer")
			l := lab{t: t}
			state := client.StateOf(client.Client{
				Address: c.address, Link: "eth0", Index: l.index(ns, "eth0"), Port: dataplane.FouPort, Egresses: []client.Egress{c.egress},
			})
			table := clientTable(t, ns.NS)
			defer table.Close()
			testkit.Must(table.Sync(t.Context(), *state.Filter))(t)
			testkit.Check(t, table.Check(t.Context(), *state.Filter))
			golden(t, ns, dataplane.NftTable, "client_"+c.name)
		})
	}
}

// The whole of a router's ruleset.
func TestGatewayRuleset(t *testing.T) {
	few := ruleset.Gateway{
		MTU: 1500, Port: dataplane.FouPort, HealthPort: 9387, Ports: []uint16{9386, 9387},
		Addresses:    []netip.Addr{netip.MustParseAddr("198.51.100.5"), netip.MustParseAddr("2001:db8:100::5")},
		Probers:      []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("fd00:2::10")},
		Askers:       []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fc00::/7")},
		Destinations: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("2001:db8::/32")},
		Clients:      []ruleset.GatewayClient{{Addr: netip.MustParseAddr("10.1.0.5"), Link: 7}, {Addr: netip.MustParseAddr("fd01::5"), Link: 8}},
	}
	limited := few
	limited.MaxPerClient, limited.Over = 1000, []netip.Addr{netip.MustParseAddr("10.1.0.5")}
	fewer := limited
	fewer.MaxPerClient = 100
	fewer.Addresses = few.Addresses[:1]
	floating := few
	floating.Floating = &ruleset.GatewayFloating{Addresses: []netip.Addr{netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("2001:db8:113::1")}}
	for i, c := range few.Clients {
		all := ruleset.GatewaySource{Client: c.Addr, Address: floating.Floating.Addresses[i]}
		towards := all
		towards.Destinations = netipx.RangeOfPrefix([]netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8:2::/48")}[i])
		floating.Floating.Sources = append(floating.Floating.Sources, all, towards)
	}
	transit := few
	transit.Transits = []netip.Addr{dataplane.TransitAddr(dataplane.IPv4, 7), dataplane.TransitAddr(dataplane.IPv6, 7)}
	transit.Floating = &ruleset.GatewayFloating{Addresses: transit.Transits}
	for i, c := range few.Clients {
		transit.Floating.Sources = append(transit.Floating.Sources, ruleset.GatewaySource{Client: c.Addr, Address: transit.Floating.Addresses[i]})
	}
	for name, g := range map[string]ruleset.Gateway{"unlimited": few, "limited": limited, "ipv4": fewer, "floating": floating, "transit": transit} {
		t.Run(name, func(t *testing.T) {
			ns := netnstest.New(t)
			ns.IP(t, "link", "add", "eth0", "type", "veth", "peer", "name", "peer")
			g.Uplink = (&lab{t: t}).index(ns, "eth0")
			table := gatewayTable(t, ns.NS)
			defer table.Close()
			testkit.Must(table.Sync(t.Context(), g))(t)
			golden(t, ns, dataplane.NftTable, "gateway_"+name)
		})
	}
}

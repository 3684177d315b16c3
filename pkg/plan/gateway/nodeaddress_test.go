package gateway

import (
	"net/netip"
	"slices"
	"testing"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
)

// All clients leave by the addresses that the node translates, each family by its own, and by none before there are some: neither by the
// router's, nor by floating ones that a policy had before.
func TestClientsLeaveByTransitAddresses(t *testing.T) {
	ipv4, ipv6 := dataplane.TransitAddr(dataplane.IPv4, 7), dataplane.TransitAddr(dataplane.IPv6, 7)
	e := withAddresses("0.0.0.0/0", "::/0")
	e.Spec.Addresses = &v2.EgressAddresses{Use: v2.EgressAddressOfNode}
	for _, c := range []struct {
		name     string
		own      []netip.Addr
		transits []netip.Addr
		lacking  []dataplane.Family
		sources  int
	}{
		{"before the node is ready", dualGateway.Addresses, nil, []dataplane.Family{dataplane.IPv4, dataplane.IPv6}, 0},
		{"one family", dualGateway.Addresses, []netip.Addr{ipv6}, []dataplane.Family{dataplane.IPv4}, 200},
		{"both families", dualGateway.Addresses, []netip.Addr{ipv4, ipv6}, nil, 400},
		{"a router of IPv4", dualGateway.Addresses[:1], []netip.Addr{ipv4, ipv6}, nil, 200},
	} {
		cfg := dualGateway
		cfg.Addresses, cfg.Transits = c.own, c.transits
		if got := Untranslated(cfg, e); !slices.Equal(got, c.lacking) {
			t.Errorf("%s: %v lack an address, want %v", c.name, got, c.lacking)
		}
		g, skipped := StateOf(cfg, e, manyClients())
		if len(skipped) > 0 || g.Floating == nil || len(g.Floating.Sources) != c.sources {
			t.Fatalf("%s: skipped %q, clients leave by %+v, want %d sources", c.name, skipped, g.Floating, c.sources)
		}
		for _, s := range g.Floating.Sources {
			want := map[bool]netip.Addr{true: ipv4, false: ipv6}[s.Client.Is4()]
			if s.Address != want || s.Destinations.IsValid() {
				t.Errorf("%s: %s leaves by %+v, want %s", c.name, s.Client, s, want)
			}
		}
		before, _ := StateOf(dualGateway, e, manyClients())
		if change, ok := g.Since(before); len(c.own) == 2 && (ok != (c.sources > 0) || len(change.Came)+len(change.Left) > 0) {
			t.Errorf("%s: the change is %+v, %t", c.name, change, ok)
		}
	}
	e.Spec.Addresses = nil
	if got := Untranslated(dualGateway, e); len(got) > 0 {
		t.Errorf("without addresses %v lack one", got)
	}
	if g, _ := StateOf(dualGateway, e, manyClients()); g.Floating != nil {
		t.Errorf("without addresses clients leave by %+v", *g.Floating)
	}
}

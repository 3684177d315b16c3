package client

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

func TestPins(t *testing.T) {
	// Links are 10 to 13, and 14 of b/b.
	s := StateOf(clientOfFamilies("4",
		direct("a/a", "10.1.1.1 live, 10.1.1.2 draining, 10.1.1.3 dead, 10.1.1.4 live", "0.0.0.0/0", "10.9.0.0/16"),
		direct("b/b", "10.1.1.5 live", "198.51.100.0/24"),
		Egress{Name: "c/c", Destinations: prefixes.Valid([]string{"203.0.113.0/24"})},
	))
	links := linksOf(s)
	flow := func(link int, dst string) Flow {
		to := netip.MustParseAddrPort(dst)
		return Flow{Transport: 6, Remote: to.Addr(), SourcePort: 40000, DestinationPort: to.Port(), Link: link}
	}
	for _, c := range []struct {
		name string
		flow Flow
		want string // empty is none
		left int
	}{
		{"by a member", flow(10, "192.0.2.1:443"), "1850: from all to 192.0.2.1/32 iif lo ipproto 6 sport 40000 dport 443 lookup 1660944394 proto 30 (IPv4)", 0},
		{"by a router that ends", flow(11, "192.0.2.1:443"), "1850: from all to 192.0.2.1/32 iif lo ipproto 6 sport 40000 dport 443 lookup 1660944395 proto 30 (IPv4)", 0},
		{"by a dead one", flow(12, "192.0.2.1:443"), "", 0},
		{"by none", flow(2, "192.0.2.1:443"), "", 0},
		{"by a router of another Egress than has the destination", flow(10, "198.51.100.1:443"), "", 0},
		{"to where no router leads any more", flow(10, "203.0.113.1:443"), "", 0},
		{"in the cluster", flow(10, "10.1.1.4:443"), "", 0},
		{"private, but for the wide destination", flow(10, "10.8.0.1:443"), "", 0},
		{"private, and a destination", flow(10, "10.9.0.1:443"), "1850: from all to 10.9.0.1/32 iif lo ipproto 6 sport 40000 dport 443 lookup 1660944394 proto 30 (IPv4)", 0},
		{"a port that no rule is about", flow(10, "192.0.2.1:65535"), "", 1},
	} {
		pins, left := s.Pins([]Flow{c.flow, c.flow}, nil, links)
		got := ""
		for _, p := range pins {
			got += p.String()
			if f, ok := PinnedFlow(p); !ok || f != c.flow {
				t.Errorf("%s: %s keeps %+v, %t", c.name, p, f, ok)
			}
			// As a program in the pod may make it.
			for what, other := range map[string]func(*dataplane.Rule){
				"a source": func(r *dataplane.Rule) { r.From = r.To }, "an output": func(r *dataplane.Rule) { r.Output = "eth0" },
				"a mark": func(r *dataplane.Rule) { r.Mark, r.Mask = 1, 1 }, "no input": func(r *dataplane.Rule) { r.Input = "" },
				"no destination": func(r *dataplane.Rule) { r.To = netip.Prefix{} }, "a network": func(r *dataplane.Rule) { r.To = netip.PrefixFrom(r.To.Addr(), 24) },
			} {
				crafted := p
				other(&crafted)
				if f, ok := PinnedFlow(crafted); ok {
					t.Errorf("%s: with %s, %s keeps %+v", c.name, what, crafted, f)
				}
			}
		}
		if got != c.want || left != 2*c.left {
			t.Errorf("%s: %q, %d left; want %q", c.name, got, left, c.want)
		}
	}
}

// Of too many flows those that have a pin keep it, and those of TCP come before UDP's.
func TestPinsAreBounded(t *testing.T) {
	s := StateOf(clientOfFamilies("4", direct("a/a", "10.1.1.1 live", "0.0.0.0/0")))
	links := linksOf(s)
	var flows []Flow
	for i := range uint16(MaxPins) {
		flows = append(flows, Flow{17, netip.MustParseAddr("192.0.2.1"), 1024 + i, 53, 10}, Flow{6, netip.MustParseAddr("192.0.2.2"), 1024 + i, 443, 10})
	}
	pins, left := s.Pins(flows, nil, links)
	if len(pins) != MaxPins || left != MaxPins || slices.ContainsFunc(pins, func(r dataplane.Rule) bool { return r.Transport != 6 }) {
		t.Fatalf("%d pins, %d flows left", len(pins), left)
	}
	have := []dataplane.Rule{flows[0].rule(30), flows[2].rule(30)}
	pins, left = s.Pins(flows, have, links)
	if len(pins) != MaxPins || left != MaxPins || !slices.Contains(pins, have[0]) || !slices.Contains(pins, have[1]) {
		t.Errorf("%d pins, %d flows left, without what there was", len(pins), left)
	}
}

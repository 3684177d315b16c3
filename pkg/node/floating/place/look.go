package place

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Look compares, for people who ask, what takes packets for an address of Services with what there is: the route to the node itself, and the ports in the table of nftables.
// It is safe while the Place works.
func (p *Place) Look(ctx context.Context, a netip.Addr, ports []floating.Port) []inspection.Comparison {
	h := held{Order: floating.Order{Address: floating.Address{OfServices: true}, Ports: ports}}
	return []inspection.Comparison{p.lookAtRoute(ctx, h, a), p.lookAtPorts(ctx, h, a)}
}

func (p *Place) lookAtRoute(ctx context.Context, h held, a netip.Addr) inspection.Comparison {
	want, _ := p.inward(h, a)
	c := inspection.Comparison{Topic: inspection.Floating, Object: "route to floating address " + a.String(), Want: want.String()}
	routes, err := p.cfg.Handle.Routes(ctx, dataplane.FamilyOf(a), want.Table, want.Protocol)
	if err != nil {
		c.Unknown = err.Error()
		return c
	}
	for _, r := range routes {
		if r.Dst == want.Dst {
			c.Have, c.OK = r.Route.String(), r.Route == want
		}
	}
	return c
}

func (p *Place) lookAtPorts(ctx context.Context, h held, a netip.Addr) inspection.Comparison {
	var want []ruleset.Port
	for _, port := range h.Ports {
		want = append(want, ruleset.Port{Protocol: port.Protocol, Port: port.Port})
	}
	c := inspection.Comparison{Topic: inspection.Floating, Object: "ports of floating address " + a.String() + " in the table " + dataplane.NftTableFloating, Want: portTexts(want)}
	all, err := p.cfg.Tables.services(ctx, map[netip.Addr]bool{a: true})
	if err != nil {
		c.Unknown = err.Error()
		return c
	}
	for _, s := range all {
		c.Have = portTexts(s.Ports)
	}
	c.OK = c.Have == c.Want
	return c
}

// portTexts are ports as protocol numbers and numbers, sorted, each once.
func portTexts(ports []ruleset.Port) string {
	var texts []string
	for _, p := range ports {
		texts = append(texts, fmt.Sprintf("%d/%d", p.Port, p.Protocol))
	}
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), ", ")
}

package client

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// MaxPins bounds the rules that keep the flows of one client where they are: each packet that
// looks a route up passes them all.
const MaxPins = 1000

// Flow is the flow of one of a client's sockets, and the link by which it goes.
type Flow struct {
	// Transport is the protocol on top of IP.
	Transport uint8
	Remote    netip.Addr
	// SourcePort and DestinationPort are the ports of its packets.
	SourcePort, DestinationPort uint16
	Link                        int
}

// maxRulePort is the last port that a rule can be about.
const maxRulePort = 1<<16 - 2

// rule is the pin of a flow.
func (f Flow) rule(protocol int) dataplane.Rule {
	return dataplane.Rule{
		Family: dataplane.FamilyOf(f.Remote), Priority: dataplane.PriorityPinned, To: netip.PrefixFrom(f.Remote, f.Remote.BitLen()),
		Input: dataplane.Loopback, Transport: f.Transport, SourcePort: f.SourcePort, DestinationPort: f.DestinationPort,
		Table: dataplane.TableOf(f.Link), Protocol: protocol,
	}
}

// PinnedFlow returns the flow that a pin keeps; ok is false of a rule that is no pin, as it applies to other packets.
func PinnedFlow(r dataplane.Rule) (f Flow, ok bool) {
	f = Flow{r.Transport, r.To.Addr(), r.SourcePort, r.DestinationPort, dataplane.LinkOf(r.Table)}
	return f, f.Remote.IsValid() && f.rule(r.Protocol) == r
}

// Pins returns the rules, sorted, that keep each flow with the router by whose tunnel it goes, whatever becomes of the
// group. links are the links of the tunnels that exist. A flow has no pin if its router is dead and another one lives,
// or if its destination isn't one of the router's Egress. If there are more than MaxPins, rules of have come first. left
// is the number of flows without the pin that they should have.
func (s State) Pins(flows []Flow, have []dataplane.Rule, links map[netip.Addr]int) (pins []dataplane.Rule, left int) {
	routers := s.keepers(links)
	pinned := make(map[dataplane.Rule]bool, len(have))
	for _, h := range have {
		pinned[h] = true
	}
	for _, f := range flows {
		g, ok := routers[f.Link]
		switch {
		case !ok || s.groupTo(f.Remote) != g.ID:
		case f.SourcePort > maxRulePort || f.DestinationPort > maxRulePort:
			left++
		default:
			pins = append(pins, f.rule(g.Protocol))
		}
	}
	slices.SortFunc(pins, func(a, b dataplane.Rule) int {
		return cmp.Or(plan.TrueFirst(pinned[a], pinned[b]), cmp.Compare(a.Transport, b.Transport), a.To.Addr().Compare(b.To.Addr()),
			cmp.Compare(a.SourcePort, b.SourcePort), cmp.Compare(a.DestinationPort, b.DestinationPort), cmp.Compare(a.Table, b.Table))
	})
	pins = slices.Compact(pins)
	if n := len(pins) - MaxPins; n > 0 {
		pins, left = pins[:MaxPins], left+n
	}
	return pins, left
}

// groupTo returns the group to which a destination leads, 0 for none: as the rules have it, a private
// destination isn't looked up among the others.
func (s State) groupTo(dst netip.Addr) uint32 {
	table := dataplane.TableWide
	if prefixes.Within(netip.PrefixFrom(dst, dst.BitLen()), dataplane.PrivateRanges) {
		table = dataplane.TableNarrow
	}
	var best Route
	for _, r := range s.Routes {
		// Routes are sorted: of several to one destination the first is the best.
		if r.Table == table && r.Dst.Contains(dst) && r.Dst.Bits() > best.Dst.Bits() {
			best = r
		}
	}
	return best.Nexthop
}

package ruleset

import (
	"fmt"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/holding"
)

// Floating is what the table of a node does with floating addresses. It is a table of its own: the elements of its sets come and go all
// the time.
type Floating struct {
	// Addresses are those that have routes to pods of the node.
	Addresses []netip.Addr
	// OfEgresses are those of Addresses that belong to Egresses. Only routers translate their packets, and know their connections: the node
	// tracks none, so that the next node needs none. With Tracked it does, for rules of others that need it, and keeps the source.
	OfEgresses []netip.Addr
	Tracked    bool
}

// NotHeld is the counter of packets from and to floating addresses for which the node doesn't answer.
const NotHeld = "not_held"

// Counters of probes (see Probe) that the node was about to forward, and that no rule of others has dropped.
const (
	ProbeForwarded = "probe_forwarded"
	ProbeLeft      = "probe_left"
)

// Probe is the content of UDP datagrams from floating addresses that show whether the node forwards packets. None leaves the node.
const Probe = "coilprob"

// ProbeTo are where they go: addresses of documentation (RFC 5737, RFC 3849), which a node reaches by its default route.
var ProbeTo = map[dataplane.Family]netip.Addr{
	dataplane.IPv4: netip.MustParseAddr("192.0.2.1"), dataplane.IPv6: netip.MustParseAddr("2001:db8::1"),
}

// Sets that count packets from and to each address, where the rules have looked the address up anyway.
const (
	Sent     = "sent"
	Received = "received"
)

// Names of sets.
const (
	floatingSet  = "floating"
	answeringSet = "answering"
	egressSet    = "of_egresses"
)

// Answering is the set of addresses of a family for which the node answers. Its elements end by themselves, so that the node stops also if
// coild doesn't run any more. A former holder would otherwise send and take packets of connections that the next one has.
func Answering(f dataplane.Family) dataplane.Set {
	for _, known := range families {
		if known.Family == f {
			return known.answering()
		}
	}
	return dataplane.Set{}
}

func (f family) answering() dataplane.Set {
	return dataplane.Set{Name: f.Named(answeringSet), Key: f.addr, Timeout: holding.Lease}
}

// Ruleset returns the table of the family inet. Hosts that ask for an address of IPv6 get no answer either (RFC 4861, section 4.3: the
// target is behind the first 8 bytes).
//
//	prerouting   before connections are tracked: drops what isn't for this node any more
//	forward      before rules of others: counts probes
//	postrouting  after rules of others: counts probes, and drops them
//	keep         before others translate sources: those of Egresses stay as they are
func (h Floating) Ruleset() dataplane.Ruleset {
	var r dataplane.Ruleset
	if len(h.Addresses) == 0 {
		return r
	}
	entry := base("prerouting", "filter", "prerouting", dataplane.HookRaw)
	forward := base("forward", "filter", "forward", dataplane.HookFirst)
	last := base("postrouting", "filter", "postrouting", dataplane.HookLast)
	keep := base("keep", "nat", "postrouting", dataplane.HookSourceNAT-10)
	for _, f := range families {
		r.Counters = append(r.Counters, f.Named(NotHeld), f.Named(ProbeForwarded), f.Named(ProbeLeft))
		r.Sets = append(r.Sets, f.set(floatingSet, h.Addresses), f.answering())
		for _, side := range []struct{ field, counted string }{{"daddr", Received}, {"saddr", Sent}} {
			counted := f.set(side.counted, h.Addresses)
			counted.Counted = true
			r.Sets = append(r.Sets, counted)
			f.rule(&entry, "a floating address for which the node doesn't answer", "meta nfproto $f $ip %s @%s $ip %s != @%s_$f counter name %s_$f drop",
				side.field, counted.Name, side.field, answeringSet, NotHeld)
		}
		if f.Family == dataplane.IPv6 {
			f.rule(&entry, "a host asks for a floating address for which the node doesn't answer", "meta l4proto $ping $icmp type nd-neighbor-solicit @th,64,128 @%s_$f @th,64,128 != @%s_$f drop",
				floatingSet, answeringSet)
		}
		probe := fmt.Sprintf("meta nfproto $f $ip daddr %s $ip saddr @%s_$f meta l4proto udp @th,64,64 %#x", ProbeTo[f.Family], floatingSet, Probe)
		f.rule(&forward, "a probe", probe+" counter name %s_$f", ProbeForwarded)
		f.rule(&last, "a probe", probe+" counter name %s_$f drop", ProbeLeft)
		r.Sets = append(r.Sets, f.set(egressSet, h.OfEgresses)) // also without elements: other chains would lose those that end by themselves
		if h.Tracked {
			f.rule(&keep, "an Egress's address stays the source", "meta nfproto $f $ip saddr @%s_$f snat $ip to $ip saddr", egressSet)
			continue
		}
		// The host's own connections are tracked in both directions: what the host sends doesn't come by here.
		f.rule(&entry, "from an Egress's address", "meta nfproto $f $ip saddr @%s_$f fib daddr type != local notrack", egressSet)
		f.rule(&entry, "to an Egress's address", "meta nfproto $f $ip daddr @%s_$f notrack", egressSet)
	}
	r.Chains = append(r.Chains, entry, forward, last)
	if len(keep.Rules) > 0 {
		r.Chains = append(r.Chains, keep)
	}
	return r
}

// ARP returns the table of the family arp: hosts that ask for an address for which the node doesn't answer get no answer. A holder
// that announces one isn't asking.
func (h Floating) ARP() dataplane.Ruleset {
	f := families[0]
	asked := f.set(floatingSet, h.Addresses)
	if len(asked.Elements) == 0 {
		return dataplane.Ruleset{}
	}
	entry := base("input", "filter", "arp input", dataplane.HookFilter)
	f.rule(&entry, "a host asks for a floating address for which the node doesn't answer", "arp daddr ip @%[1]s_$f arp daddr ip != @%[2]s_$f arp saddr ip != @%[1]s_$f drop",
		floatingSet, answeringSet)
	return dataplane.Ruleset{Sets: []dataplane.Set{asked, f.answering()}, Chains: []dataplane.Chain{entry}}
}

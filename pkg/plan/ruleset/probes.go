package ruleset

import (
	"fmt"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Probes is what the table of a node does while it looks whether the node forwards packets of floating addresses. It is there no longer, and costs
// other packets nothing then.
type Probes struct {
	// Addresses are those from which probes are sent. OfEgresses are those of them that belong to Egresses; see Floating.
	Addresses, OfEgresses []netip.Addr
	// Tracked lets the node track probes from addresses of Egresses.
	Tracked bool
}

// Probe is the content of UDP datagrams from floating addresses that show whether the node forwards packets. None leaves the node.
const Probe = "coilprob"

// ProbeTo are where they go: addresses of documentation (RFC 5737, RFC 3849), which a node reaches by its default route.
var ProbeTo = map[dataplane.Family]netip.Addr{
	dataplane.IPv4: netip.MustParseAddr("192.0.2.1"), dataplane.IPv6: netip.MustParseAddr("2001:db8::1"),
}

// Counters of probes: that came from the pod, that the node was about to forward, and that no rule of others has dropped.
const (
	ProbeArrived   = "probe_arrived"
	ProbeForwarded = "probe_forwarded"
	ProbeLeft      = "probe_left"
)

// probedSet is the set of addresses from which probes are sent.
const probedSet = "probed"

// Ruleset returns the table of the family inet.
//
//	prerouting   counts probes that come from a pod and, if there is a route for them, that the node is about to forward
//	keep         before others translate sources: those of Egresses stay as they are
//	postrouting  after rules of others: counts probes, and drops them
//	output       drops errors (ICMP) about probes
func (p Probes) Ruleset() dataplane.Ruleset {
	if len(p.Addresses) == 0 {
		return dataplane.Ruleset{}
	}
	// Behind the rules for which a packet is forged, or not for this node.
	entry := base("prerouting", "filter", "prerouting", dataplane.HookRaw+1)
	keep := base("keep", "nat", "postrouting", dataplane.HookSourceNAT-10)
	last := base("postrouting", "filter", "postrouting", dataplane.HookLast)
	own := base("output", "filter", "output", dataplane.HookRaw)
	var r dataplane.Ruleset
	for _, f := range families {
		r.Counters = append(r.Counters, f.Named(ProbeArrived), f.Named(ProbeForwarded), f.Named(ProbeLeft))
		r.Sets = append(r.Sets, f.set(probedSet, p.Addresses), f.set(egressSet, p.OfEgresses))
		probe := "meta nfproto $f " + f.probe()
		from := fmt.Sprintf("%s $ip saddr @%s_$f", probe, probedSet)
		f.rule(&entry, "a probe", "%s counter name %s_$f", from, ProbeArrived)
		f.rule(&entry, "a probe, and a route for it", "%s fib daddr oif exists counter name %s_$f", from, ProbeForwarded)
		ofEgress := fmt.Sprintf("%s $ip saddr @%s_$f", probe, egressSet)
		if p.Tracked {
			f.rule(&keep, "an Egress's address stays the source", "%s snat $ip to $ip saddr", ofEgress)
		} else {
			f.rule(&entry, "not tracked", "%s notrack", ofEgress)
		}
		f.rule(&last, "a probe", "%s counter name %s_$f drop", from, ProbeLeft)
		f.rule(&last, "a probe whose source was changed", "%s drop", probe)
		f.rule(&own, "an error about a probe", "meta nfproto $f meta l4proto $ping @th,%d,64 %#x $ip daddr @%s_$f drop", f.quoted(), Probe, probedSet)
	}
	r.Chains = append(r.Chains, entry, last, own)
	if p.Tracked {
		r.Chains = append(r.Chains, keep)
	}
	return r
}

// probe is the condition of a datagram that is a probe.
func (f family) probe() string {
	return fmt.Sprintf("$ip daddr %s meta l4proto udp @th,64,64 %#x", ProbeTo[f.Family], Probe)
}

// quoted is where the content of a datagram is in an error about it, in bits: behind the headers of the error, of the packet and of UDP
// (RFC 792, RFC 4443).
func (f family) quoted() int {
	const icmp, udp = 8, 8
	return 8*(icmp+udp) + f.destination + f.bits // the destination is the last field of the header
}

package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

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
	// Probed are addresses of Egresses that are at other nodes: only probes come from them here. Rules of others meet these as they meet
	// those of Addresses.
	Probed []netip.Addr
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

// Names of sets.
const (
	floatingSet  = "floating"
	answeringSet = "answering"
	egressSet    = "of_egresses"
	probedSet    = "probed"
	// Those of the last four bytes of addresses.
	toSet   = "to_ends"
	fromSet = "from_ends"
)

// Answering is the set of addresses of a family for which the node answers. Its elements end by themselves, so that the node stops also if
// coild doesn't run any more. A former holder would otherwise send and take packets of connections that the next one has.
func Answering(f dataplane.Family) dataplane.Set { return familyOf(f).answering() }

func (f family) answering() dataplane.Set {
	return dataplane.Set{Name: f.Named(answeringSet), Key: f.addr, Timeout: holding.Lease}
}

// Ruleset returns the table of the family ip, or ip6. The node's other packets pass it, too, so that most of them meet two sets only, of the last
// four bytes of addresses: those of IPv6 would be looked for twice as long. Hosts that ask for an address of IPv6 get no answer either (RFC 4861,
// section 4.3: the target is behind the first 8 bytes).
//
//	prerouting   before connections are tracked
//	  to, from   drop what isn't for this node any more, and count probes that it is about to forward
//	postrouting  after rules of others
//	  left       counts probes, and drops them
//	output       drops errors (ICMP) about probes
//	keep         before others translate sources: those of Egresses stay as they are
func (h Floating) Ruleset(of dataplane.Family) dataplane.Ruleset {
	f := familyOf(of)
	here, probed := f.of(h.Addresses), f.of(h.Probed)
	if len(here)+len(probed) == 0 {
		return dataplane.Ruleset{}
	}
	sources := slices.Concat(here, probed)
	slices.SortFunc(sources, netip.Addr.Compare)
	sources = slices.Compact(sources)
	r := dataplane.Ruleset{
		Counters: []string{f.Named(NotHeld), f.Named(ProbeForwarded), f.Named(ProbeLeft)},
		// Also without elements: a set that comes makes the table anew, which loses the elements that end by themselves.
		Sets: []dataplane.Set{
			f.set(floatingSet, here), f.answering(), f.set(egressSet, h.OfEgresses), f.set(probedSet, sources), f.ends(toSet, here), f.ends(fromSet, sources),
		},
	}
	entry := base("prerouting", "filter", "prerouting", dataplane.HookRaw)
	last := base("postrouting", "filter", "postrouting", dataplane.HookLast)
	own := base("output", "filter", "output", dataplane.HookRaw)
	keep := base("keep", "nat", "postrouting", dataplane.HookSourceNAT-10)
	to, from, left := dataplane.Chain{Name: "to"}, dataplane.Chain{Name: "from"}, dataplane.Chain{Name: "left"}

	f.rule(&entry, "maybe to a floating address", "@nh,%d,32 @%s_$f jump to", f.end(f.destination), toSet)
	f.rule(&entry, "maybe from a floating address", "@nh,%d,32 @%s_$f jump from", f.end(f.source), fromSet)
	if f.Family == dataplane.IPv6 {
		f.rule(&entry, "a host asks for a floating address for which the node doesn't answer", "meta l4proto $ping $icmp type nd-neighbor-solicit @th,64,128 @%s_$f @th,64,128 != @%s_$f drop",
			floatingSet, answeringSet)
	}
	const notHeld = "a floating address for which the node doesn't answer"
	f.rule(&to, notHeld, "$ip daddr @%s_$f $ip daddr != @%s_$f counter name %s_$f drop", floatingSet, answeringSet, NotHeld)
	f.rule(&from, notHeld, "$ip saddr @%s_$f $ip saddr != @%s_$f counter name %s_$f drop", floatingSet, answeringSet, NotHeld)
	content := f.probe()
	probe := fmt.Sprintf("%s $ip saddr @%s_$f", content, probedSet)
	f.rule(&from, "a probe, and a route for it", probe+" fib daddr oif exists counter name %s_$f", ProbeForwarded)
	// Most packets have another destination. The first four bytes of an address are compared faster than all.
	f.rule(&last, "maybe a probe", "@nh,%d,32 %s $ip daddr %s goto left", f.destination, f.start(ProbeTo[of]), ProbeTo[of])
	f.rule(&left, "a probe", probe+" counter name %s_$f drop", ProbeLeft)
	f.rule(&left, "a probe whose source was changed", "%s drop", content)
	f.rule(&own, "an error about a probe", "meta l4proto $ping @th,%d,64 %#x $ip daddr @%s_$f drop", f.quoted(), Probe, probedSet)
	alone := fmt.Sprintf("%s $ip saddr != @%s_$f", probe, floatingSet)
	r.Chains = []dataplane.Chain{entry, last, own}
	if h.Tracked {
		f.rule(&keep, "a probe from an Egress's address", "%s snat $ip to $ip saddr", alone)
		f.rule(&keep, "an Egress's address stays the source", "$ip saddr @%s_$f snat $ip to $ip saddr", egressSet)
		r.Chains = append(r.Chains, keep)
	} else {
		f.rule(&from, "a probe from an Egress's address", "%s notrack", alone)
		// The host's own connections are tracked in both directions: what the host sends doesn't come by here.
		f.rule(&from, "from an Egress's address", "$ip saddr @%s_$f fib daddr type != local notrack", egressSet)
		f.rule(&to, "to an Egress's address", "$ip daddr @%s_$f notrack", egressSet)
	}
	r.Chains = append(r.Chains, to, from, left)
	return r
}

// ends is a set of the last four bytes of addresses of the family.
func (f family) ends(name string, addrs []netip.Addr) dataplane.Set {
	s := dataplane.Set{Name: f.Named(name), Key: "ipv4_addr", Size: sizeFor(len(addrs), 1024)}
	for _, a := range addrs {
		bytes := a.AsSlice()
		s.Elements = append(s.Elements, dataplane.Element{Key: string(bytes[len(bytes)-4:])})
	}
	slices.SortFunc(s.Elements, func(a, b dataplane.Element) int { return strings.Compare(a.Key, b.Key) })
	s.Elements = slices.Compact(s.Elements)
	return s
}

// end is where the last four bytes of an address are, whose place in the header is given; both in bits.
func (f family) end(address int) int { return address + f.bits - 32 }

// start has the first four bytes of an address, as a number.
func (f family) start(a netip.Addr) string { return fmt.Sprintf("%#x", a.AsSlice()[:4]) }

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

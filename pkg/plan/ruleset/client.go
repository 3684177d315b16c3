package ruleset

import (
	"fmt"
	"net/netip"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Client is the table of a client. Packets in tunnels are taken from routers alone, with sources in the destinations.
// No packet leaves to a destination but by a tunnel.
type Client struct {
	// Uplink is the index of the link to the node.
	Uplink int
	// Addresses are the client's own.
	Addresses []netip.Addr
	// Port is the UDP port of FoU, at which nobody is heard but Peers: Services and routers.
	Port  uint16
	Peers []netip.Addr
	// Destinations are sorted, and don't overlap.
	Destinations []netipx.IPRange
	// Sources are those of connections that are answered by the way they came: packets of connections that came in by
	// the uplink from there get MarkOriginating. They are sorted, and don't overlap. Without any, all of the client's
	// packets take the tunnels.
	Sources []netipx.IPRange
}

// Counters of a client beside ForgedSource, of each family.
const (
	// NonRouter are packets with FoU, or with a tunnel's packet without UDP, from an address of no router, dropped.
	NonRouter = "non_router"
	// PastTunnel are packets to a destination that would have left past the tunnels, dropped.
	PastTunnel = "past_tunnel"
)

// Ruleset returns the table. A packet that a tunnel carries passes it twice in each direction, once with its outer
// header. Only with originatingOnly connections are tracked; those that are marked already stay so.
//
//	entry      what comes in
//	  carried    out of a tunnel: from a destination, to the client
//	  carries    into one: from a router
//	leave      what leaves by the uplink: not to a destination
//	  past
//	opened     connections from outside are marked
//	exit       and so are their answers
//
// ICMP about the tunnels' own packets is neither: it comes in by the uplink and reaches the tunnels.
func (c Client) Ruleset() dataplane.Ruleset {
	var r dataplane.Ruleset
	carried, carries, past := dataplane.Chain{Name: "carried"}, dataplane.Chain{Name: "carries"}, dataplane.Chain{Name: "past"}
	entry := base("entry", "filter", "prerouting", dataplane.HookRaw)
	// Behind the output, where what another route was chosen for has its link, and what is forwarded.
	leave := base("leave", "filter", "postrouting", dataplane.HookFilter)

	for _, prefix := range carriers {
		entry.Add("out of a tunnel", fmt.Sprintf("iifname %q goto carried", prefix+"*"))
	}
	entry.Add("FoU", fmt.Sprintf("th dport %d meta l4proto udp goto carries", c.Port))
	entry.Add("IPv4 in IP", "meta l4proto ipencap goto carries")
	entry.Add("IPv6 in IP", "meta l4proto ipv6 goto carries")
	leave.Add("not by the uplink", fmt.Sprintf("oif != %d accept", c.Uplink))
	if len(c.Sources) > 0 {
		past.Add("an answer by the way the connection came", fmt.Sprintf("ct direction reply ct mark & %#08x != 0 accept", dataplane.MarkOriginating))
	}
	for _, f := range families {
		r.Counters = append(r.Counters, f.Named(NonRouter), f.Named(ForgedSource), f.Named(PastTunnel))
		destinations := f.hashed("destinations", c.Destinations)
		r.Sets = append(r.Sets, f.set("peers", c.Peers), destinations, f.errors())
		for _, addr := range f.of(c.Addresses) {
			f.rule(&carried, "from a destination", "meta nfproto $f $ip saddr @%s $ip daddr %s accept", destinations.Name, addr)
			// Any host on the way to a destination may report an error. The packet inside the message says whose it was.
			f.rule(&carried, "an error", "meta nfproto $f $ip daddr %s meta l4proto $ping $icmp type @errors_$f accept", addr)
			f.rule(&carried, "a router lives", "meta nfproto $f $ip saddr @peers_$f $ip daddr %s meta l4proto $ping $icmp type echo-reply accept", addr)
		}
		f.rule(&carries, "of a router", "meta nfproto $f $ip saddr @peers_$f accept")
		f.rule(&leave, "to a destination", "meta nfproto $f $ip daddr @%s goto past", destinations.Name)
		if f.Family == dataplane.IPv6 {
			r.Sets = append(r.Sets, numbers("neighbours", "icmpv6_type", 133, 134, 135, 136, 137))
			f.rule(&past, "neighbour discovery", "meta nfproto $f meta l4proto $ping $icmp type @neighbours accept")
		}
	}
	for _, f := range families {
		f.rule(&carried, "from elsewhere", "meta nfproto $f counter name %s_$f drop", ForgedSource)
		f.rule(&carries, "of anybody else", "meta nfproto $f counter name %s_$f drop", NonRouter)
		f.rule(&past, "past the tunnel", "meta nfproto $f counter name %s_$f drop", PastTunnel)
	}
	r.Chains = []dataplane.Chain{carried, carries, past, entry, leave}
	if len(c.Sources) > 0 {
		c.answer(&r)
	}
	return r
}

// answer adds what answers connections from outside by the way they came: a mark on their packets, which a routing
// policy rule looks at.
func (c Client) answer(r *dataplane.Ruleset) {
	opened := base("opened", "filter", "prerouting", dataplane.HookMangle)
	// The type makes the kernel look for a route again when the mark has changed.
	exit := base("exit", "route", "output", dataplane.HookMangle)
	const mark = uint32(dataplane.MarkOriginating)
	set := func(key string) string {
		return fmt.Sprintf("%s mark set %s mark & %#08x | %#08x", key, key, ^mark, mark)
	}
	for _, f := range families {
		sources := f.hashed("sources", c.Sources)
		r.Sets = append(r.Sets, sources)
		f.rule(&opened, "opened from outside", "iif %d meta nfproto $f ct state new $ip saddr @%s %s", c.Uplink, sources.Name, set("ct"))
	}
	exit.Add("answers go by the way the connection came", fmt.Sprintf("ct direction reply ct mark & %#08x != 0 %s", mark, set("meta")))
	r.Chains = append(r.Chains, opened, exit)
}

// carriers are what the names of links begin with out of which comes what tunnels carry.
var carriers = []string{"fou4_", "fou6_", "coil_ipip"}

// errors are the ICMP messages that say why a packet isn't sent on: destination unreachable, time exceeded and
// parameter problem, and in IPv6 packet too big (RFC 792, RFC 4443).
func (f family) errors() dataplane.Set {
	if f.Family == dataplane.IPv6 {
		return numbers(f.Named("errors"), "icmpv6_type", 1, 2, 3, 4)
	}
	return numbers(f.Named("errors"), "icmp_type", 3, 11, 12)
}

// numbers is a set of numbers of one byte.
func numbers(name, key string, values ...byte) dataplane.Set {
	s := dataplane.Set{Name: name, Key: key}
	for _, v := range values {
		s.Elements = append(s.Elements, dataplane.Element{Key: string([]byte{v})})
	}
	return s
}

package nft

import (
	"context"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// What a Client counts beside ForgedSource, for each family of addresses.
const (
	// NonRouter is what asked to be taken out of FoU, or out of a tunnel without UDP, and came from
	// who is no router, dropped.
	NonRouter = "non_router"
	// PastTunnel is what would have left to a destination past the tunnels, dropped.
	PastTunnel = "past_tunnel"
)

var countedInClients = []string{NonRouter, ForgedSource, PastTunnel}

// Client is the ruleset of a client in its network namespace.
type Client struct{ *table }

// NewClient returns the ruleset of a namespace, which must stay open as long as the Client is used.
func NewClient(ns *netns.NS) (*Client, error) {
	t, err := open(ns)
	if err != nil {
		return nil, err
	}
	t.most = maxElementsOfPod
	t.handle.Bound(maxMessagesOfPod)
	return &Client{t}, nil
}

// Sync makes the table as the rules say; connections that are marked already stay so. A change of
// peers or destinations alone changes nothing but sets.
func (c *Client) Sync(ctx context.Context, r dataplane.ClientRules) (dataplane.Result, error) {
	return c.sync(ctx, client(r))
}

// Check says what of the ruleset isn't as Sync makes it. Nothing is changed.
func (c *Client) Check(ctx context.Context, r dataplane.ClientRules) error {
	return c.check(ctx, client(r))
}

// Remove removes the table; none is no error.
func (c *Client) Remove(context.Context) error { return c.remove() }

// client defines the table of a client. A packet that a tunnel carries passes it twice in each
// direction, once with its outer header. Only with originatingOnly connections are tracked.
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
func client(r dataplane.ClientRules) definition {
	var d definition
	carried, carries, past := chain{name: "carried"}, chain{name: "carries"}, chain{name: "past"}
	entry := chain{name: "entry", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityRaw}
	// Behind the output, where what another route was chosen for has its link, and what is forwarded.
	leave := chain{name: "leave", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPostrouting, priority: nftables.ChainPriorityFilter}

	for _, prefix := range carriers {
		entry.add("out of a tunnel", iifnamePrefix(prefix), goTo(carried))
	}
	entry.add("FoU", udpDport(r.Port), goTo(carries))
	entry.add("IPv4 in IP", l4proto(unix.IPPROTO_IPIP), goTo(carries))
	entry.add("IPv6 in IP", l4proto(unix.IPPROTO_IPV6), goTo(carries))
	leave.add("not by the uplink", oif(expr.CmpOpNeq, r.Uplink), accept())
	if r.Originating != nil {
		past.add("an answer by the way the connection came", ctReply(), ctMark(r.Originating.Mark), accept())
	}
	for _, p := range protocols {
		for _, name := range countedInClients {
			d.counters = append(d.counters, name+p.suffix)
		}
		peers := set{name: "peers" + p.suffix, key: p.address, elements: p.addresses(r.Peers)}
		destinations := p.named("destinations", r.Destinations)
		errors := p.errors()
		d.sets = append(d.sets, peers, destinations, errors)
		for _, addr := range p.only(r.Addresses) {
			carried.add("from a destination", p.of(), p.in(p.src, destinations, true), p.is(p.dst, addr), accept())
			// Any host on the way to a destination may say that a packet can't be sent on. Whose it was
			// is said inside.
			carried.add("an error", p.of(), p.is(p.dst, addr), p.icmp(errors), accept())
			carried.add("a router lives", p.of(), p.in(p.src, peers, true), p.is(p.dst, addr), p.echoReply(), accept())
		}
		carries.add("of a router", p.of(), p.in(p.src, peers, true), accept())
		leave.add("to a destination", p.of(), p.in(p.dst, destinations, true), goTo(past))
		if p.family == dataplane.IPv6 {
			neighbours := set{name: "neighbours", key: nftables.TypeICMP6Type, elements: bytesOf(133, 134, 135, 136, 137)}
			d.sets = append(d.sets, neighbours)
			past.add("neighbour discovery", p.of(), p.icmp(neighbours), accept())
		}
	}
	for _, p := range protocols {
		carried.add("from elsewhere", p.of(), count(ForgedSource+p.suffix), drop())
		carries.add("of anybody else", p.of(), count(NonRouter+p.suffix), drop())
		past.add("past the tunnel", p.of(), count(PastTunnel+p.suffix), drop())
	}
	// A chain comes before those that lead to it.
	d.chains = []chain{carried, carries, past, entry, leave}
	if r.Originating != nil {
		d.answer(r.Uplink, *r.Originating)
	}
	return d
}

// answer adds what answers connections from outside by the way they came: a mark on their packets,
// which a routing policy rule looks at.
func (d *definition) answer(uplink int, r dataplane.OriginatingRules) {
	opened := chain{name: "opened", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityMangle}
	// The type makes the kernel look for a route again when the mark has changed.
	exit := chain{name: "exit", kind: nftables.ChainTypeRoute, hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityMangle}
	for _, p := range protocols {
		sources := p.named("sources", r.Sources)
		d.sets = append(d.sets, sources)
		opened.add("opened from outside", iif(expr.CmpOpEq, uplink), p.of(), ctState(expr.CtStateBitNEW),
			p.in(p.src, sources, true), ctMarkSet(r.Mark, r.Mask))
	}
	exit.add("answers go by the way the connection came", ctReply(), ctMark(r.Mark), metaMarkSet(r.Mark, r.Mask))
	d.chains = append(d.chains, opened, exit)
}

// carriers are what the names of links begin with out of which comes what tunnels carry.
var carriers = []string{"fou4_", "fou6_", "coil_ipip"}

// errors are the ICMP messages that say why a packet isn't sent on: destination unreachable, time
// exceeded and parameter problem, and in IPv6 packet too big (RFC 792, RFC 4443).
func (p protocol) errors() set {
	s := set{name: "errors" + p.suffix, key: nftables.TypeICMPType, elements: bytesOf(3, 11, 12)}
	if p.family == dataplane.IPv6 {
		s.key, s.elements = nftables.TypeICMP6Type, bytesOf(1, 2, 3, 4)
	}
	return s
}

func bytesOf(values ...byte) []nftables.SetElement {
	var out []nftables.SetElement
	for _, v := range values {
		out = append(out, nftables.SetElement{Key: []byte{v}})
	}
	return out
}

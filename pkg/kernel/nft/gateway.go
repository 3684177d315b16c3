package nft

import (
	"context"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/netns"
)

// What a Gateway counts, for each family of addresses.
const (
	// Masqueraded is what clients sent that went on by the uplink, where it has the router's address.
	Masqueraded = "masqueraded"
	// Invalid is what belongs to no connection, and was dropped.
	Invalid = "invalid"
	// NonClient is FoU from who isn't a client, dropped.
	NonClient = "non_client"
	// ForgedSource is what came out of a tunnel with a source other than its client's, dropped.
	ForgedSource = "forged_source"
	// NotADestination is what a client sent to where the router doesn't lead, dropped.
	NotADestination = "not_a_destination"
	// ForeignSource is what would have left by the uplink with a source that isn't the router's,
	// dropped.
	ForeignSource = "foreign_source"
	// Unsolicited is what would have reached a client, or gone anywhere else, without a
	// connection that a client opened, and UDP to the router itself, dropped.
	Unsolicited = "unsolicited"
	// ConnectionLimit is what would have opened a connection of a client that has as many as one
	// may have, dropped.
	ConnectionLimit = "connection_limit"
	// Stranger is TCP to a port at which the router tells of itself, from who may not ask, dropped.
	Stranger = "stranger"
)

var counted = []string{Masqueraded, Invalid, NonClient, ForgedSource, NotADestination, ForeignSource, Unsolicited, ConnectionLimit, Stranger}

// Gateway is the ruleset of a router in its network namespace.
type Gateway struct{ *table }

// NewGateway returns the ruleset of a namespace, nil for the one that the process was started
// in; the namespace must stay open as long as the Gateway is used.
func NewGateway(ns *netns.NS) (*Gateway, error) {
	t, err := open(ns)
	if err != nil {
		return nil, err
	}
	return &Gateway{t}, nil
}

// Sync makes the table as the rules say; a change of addresses, destinations or clients
// alone changes nothing but sets.
func (g *Gateway) Sync(ctx context.Context, r dataplane.GatewayRules) (dataplane.Result, error) {
	return g.sync(ctx, gateway(r))
}

// loopback is the index of lo, the same in every namespace.
const loopback = 1

// gateway defines the table of a router. Tunnels are all links but lo and the uplink. Each
// packet meets few rules: most are decided by the first ones of a chain, and what is dropped
// is told apart by the rules after them.
//
//	entry      what comes in
//	  sent       out of a tunnel: from its client, to a destination, or asks for an echo; what
//	             may be forwarded gets a mark, without which it has no route
//	  fou        into one: it isn't tracked if a client sent it
//	  probed     nor is a probe of kubelet
//	exit       what the router sends: FoU isn't tracked
//	  answered   nor is the answer to a probe or to a client's echo
//	leave      nothing that the router sends leaves by the uplink with another's address
//	  own
//	input      FoU from nobody else; errors about FoU, by which the kernel learns the way's MTU; no other
//	           datagram that opens a connection, whose entry would keep a client from that port for 30 s
//	  asked      how the router is, by the cluster alone
//	forward    nothing leaves but by a connection that is translated, or opens
//	  opened     new connections of TCP get segments that fit the tunnel and the way on
//	  opens      a client has so many connections at once, and no more; see limit.go
//	  answer     to clients only what they asked for
//	nat        what opens a connection: clients get the router's address
//	others     what nat hasn't translated: nobody else opens any
//	  own
//
// What leaves by the uplink is what the router sends, or what it forwards, which nobody but this
// table translates. A chain behind the translation would see both, but every packet once more.
func gateway(r dataplane.GatewayRules) definition {
	var d definition
	sent, opened, answer := chain{name: "sent"}, chain{name: "opened"}, chain{name: "answer"}
	fou, probed, answered := chain{name: "fou"}, chain{name: "probed"}, chain{name: "answered"}
	own, asked := chain{name: "own"}, chain{name: "asked"}
	entry := chain{name: "entry", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityRaw}
	exit := chain{name: "exit", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityRaw}
	leave := chain{name: "leave", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookOutput, priority: nftables.ChainPriorityFilter}
	input := chain{name: "input", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookInput, priority: nftables.ChainPriorityFilter}
	opens := map[dataplane.Family]*chain{}
	forward := chain{name: "forward", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward, priority: nftables.ChainPriorityFilter}
	nat := chain{name: "nat", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, priority: nftables.ChainPriorityNATSource}
	// The kernel asks it only if nat, which comes before, has said nothing.
	others := chain{name: "others", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting, priority: nftables.ChainPriorityRef(*nftables.ChainPriorityNATSource + 1)}

	entry.add("from a client", iif(expr.CmpOpNeq, r.Uplink), goTo(sent))
	entry.add("FoU", udpDport(r.Port), goTo(fou))
	entry.add("a probe", tcpPort(dport, r.HealthPort), goTo(probed))
	entry.add("an answer may be forwarded", mark(dataplane.MarkFiltered))
	exit.add("FoU", udpDport(r.Port), notrack(), accept())
	exit.add("an answer to a probe", tcpPort(sport, r.HealthPort), goTo(answered))
	leave.add("by the uplink", oif(expr.CmpOpEq, r.Uplink), goTo(own))
	input.add("untracked", ctState(expr.CtStateBitUNTRACKED), accept())
	forward.add("TCP is opened", tcpOpens(), jump(opened))
	forward.add("not from a client", iif(expr.CmpOpEq, r.Uplink), goTo(answer))
	answer.add("to a client", oif(expr.CmpOpNeq, r.Uplink), ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept())
	// IPv6 first: to load its addresses costs more than to pass its rules.
	for _, p := range slices.Backward(protocols) {
		for _, name := range counted {
			d.counters = append(d.counters, name+p.suffix)
		}
		clients := set{name: "clients" + p.suffix, key: p.address, size: sizeFor(len(r.Clients))}
		peers := set{name: "peers" + p.suffix, key: nftables.MustConcatSetType(nftables.TypeIFIndex, p.address), size: clients.size}
		destinations := p.named("destinations", p.joined(r.Destinations, p.only(r.Addresses)))
		clients.elements = make([]nftables.SetElement, 0, len(r.Clients))
		peers.elements = make([]nftables.SetElement, 0, len(r.Clients))
		for _, c := range r.Clients {
			if dataplane.FamilyOf(c.Addr) == p.family {
				clients.elements = append(clients.elements, nftables.SetElement{Key: c.Addr.AsSlice()})
				peers.elements = append(peers.elements, nftables.SetElement{Key: append(ifIndex(c.Link), c.Addr.AsSlice()...)})
			}
		}
		probers := set{name: "probers" + p.suffix, key: p.address, elements: p.addresses(r.Probers)}
		askers := p.named("askers", p.joined(r.Askers, nil))
		d.sets = append(d.sets, clients, peers, destinations, probers, askers)

		dropped := func(name string) []expr.Any { return match(count(name+p.suffix), drop()) }
		// Connections of the tunnels themselves are of no interest, and cost a lookup each. An
		// answer to a client's connection that was given FoU's port isn't from a client.
		fou.add("of a client", p.of(), p.in(p.src, clients, true), notrack(), accept())
		// A router that is overloaded isn't one that is to be started again, nor dead to its clients:
		// a full table would drop the answer, too, which is no connection's.
		for _, addr := range p.only(r.Addresses) {
			exit.add("to a client: it lives", p.of(), p.in(p.dst, clients, true), p.is(p.src, addr), p.echoReply(), notrack(), accept())
			probed.add("by a node", p.of(), p.in(p.src, probers, true), p.is(p.dst, addr), notrack(), accept())
			answered.add("to a node", p.of(), p.in(p.dst, probers, true), p.is(p.src, addr), notrack(), accept())
			own.add("the router's address", p.of(), p.is(p.src, addr), accept())
			nat.add("clients get the router's address", oif(expr.CmpOpEq, r.Uplink), p.of(), p.in(p.src, clients, true), p.translate(addr))
		}
		sent.add("to a destination", p.of(), p.from(peers, true), p.in(p.dst, destinations, true), mark(dataplane.MarkFiltered), accept())
		input.add("not from a client", p.of(), udpDport(r.Port), p.in(p.src, clients, false), dropped(NonClient))
		// FoU isn't tracked, hence what is said about it belongs to no connection.
		for _, addr := range p.only(r.Addresses) {
			input.add("FoU to a client is too large", p.of(), p.is(p.dst, addr), p.tooLarge(clients), accept())
		}
		// A reset in answer to a packet that isn't translated back would end a living connection.
		input.add("of no connection", p.of(), ctState(expr.CtStateBitINVALID), dropped(Invalid))
		asked.add("by the cluster", p.of(), p.in(p.src, askers, true), accept())
		// The way back, by which the kernel would know, isn't that of the tunnel.
		opened.add("from a client", p.of(), iif(expr.CmpOpNeq, r.Uplink), clampMSS(p.segment(dataplane.TunnelMTU(p.family, r.MTU))))
		forward.add("from a client", oif(expr.CmpOpEq, r.Uplink), p.of(), ctTranslated(), count(Masqueraded+p.suffix), accept())
		opens[p.family] = d.limit(p, r, clients.size)
		answer.add("of no connection", p.of(), ctState(expr.CtStateBitINVALID), dropped(Invalid))
		answer.add("nobody asked for it", p.of(), dropped(Unsolicited))
	}
	for _, p := range slices.Backward(protocols) {
		input.add("a datagram that no one asked for", iif(expr.CmpOpEq, r.Uplink), p.of(), l4proto(unix.IPPROTO_UDP), ctState(expr.CtStateBitNEW), count(Unsolicited+p.suffix), drop())
	}
	for _, port := range r.Ports {
		input.add("how is it", tcpPort(dport, port), goTo(asked))
	}
	others.add("by the uplink", oif(expr.CmpOpEq, r.Uplink), goTo(own))
	for _, p := range slices.Backward(protocols) {
		forward.add("a client opens a connection", oif(expr.CmpOpEq, r.Uplink), p.of(), ctOpens(), goTo(*opens[p.family]))
		forward.add("of no connection", p.of(), ctState(expr.CtStateBitINVALID), count(Invalid+p.suffix), drop())
		forward.add("with a client's address", oif(expr.CmpOpEq, r.Uplink), p.of(), ctState(tracked), count(ForeignSource+p.suffix), drop())
		forward.add("nobody asked for it", p.of(), count(Unsolicited+p.suffix), drop())
		if p.family == dataplane.IPv6 {
			// Neighbour discovery (RFC 4861).
			own.add("link-local", p.of(), p.within(netip.MustParsePrefix("fe80::/10")), accept())
			own.add("no address yet", p.of(), p.within(netip.MustParsePrefix("::/128")), accept())
		}
		// An error about an answer to a client is about to be translated (RFC 5508): until then its
		// source is whichever of the uplink's addresses the kernel prefers.
		own.add("an error", p.of(), ctState(expr.CtStateBitRELATED), ctTranslated(), accept())
		asked.add("by another", p.of(), iif(expr.CmpOpNeq, loopback), count(Stranger+p.suffix), drop())
		own.add("another's address", p.of(), count(ForeignSource+p.suffix), drop())
	}
	// An answer to a client may be for the port of FoU, or of probes.
	fou.add("an answer may be forwarded", mark(dataplane.MarkFiltered))
	probed.add("an answer may be forwarded", mark(dataplane.MarkFiltered))
	opened.add("fits the way", routeMSS())
	sent.add("local", iif(expr.CmpOpEq, loopback), accept())
	for _, p := range slices.Backward(protocols) {
		peers := set{name: "peers" + p.suffix}
		// The answer takes the tunnel, too.
		for _, addr := range p.only(r.Addresses) {
			sent.add("to the router: does it live", p.of(), p.from(peers, true), p.is(p.dst, addr), p.echoRequest(), notrack(), accept())
		}
		sent.add("a client sends as another", p.of(), p.from(peers, false), count(ForgedSource+p.suffix), drop())
		sent.add("a client sends elsewhere", p.of(), count(NotADestination+p.suffix), drop())
	}
	// A chain comes before those that lead to it.
	for _, p := range slices.Backward(protocols) {
		d.chains = append(d.chains, *opens[p.family])
	}
	d.chains = append(d.chains, sent, opened, answer, fou, probed, answered, own, asked, entry, exit, leave, input, forward, nat, others)
	return d
}

func (c *chain) add(comment string, parts ...[]expr.Any) {
	c.rules = append(c.rules, rule{comment, match(parts...)})
}

// tracked are the states of packets that belong to a connection, or open one.
const tracked = expr.CtStateBitNEW | expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED

func notrack() []expr.Any { return []expr.Any{&expr.Notrack{}} }

// sizeFor is the size of sets of so many clients. It seldom changes, as the table is replaced then.
func sizeFor(clients int) uint32 {
	size := 8192
	for size < clients {
		size *= 2
	}
	return uint32(size)
}

// only are the addresses of the family.
func (p protocol) only(all []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { return dataplane.FamilyOf(a) != p.family })
}

// addresses are the elements for the addresses of the family.
func (p protocol) addresses(all []netip.Addr) []nftables.SetElement {
	var out []nftables.SetElement
	for _, a := range p.only(all) {
		out = append(out, nftables.SetElement{Key: a.AsSlice()})
	}
	return out
}

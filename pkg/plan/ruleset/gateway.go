package ruleset

import (
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Gateway is what the table of a router does: it lets only registered clients in, only to destinations, and nothing
// out that doesn't have the router's own address.
type Gateway struct {
	// Uplink is the index of the link to the outside, and MTU is its.
	Uplink int
	MTU    int
	// Addresses are the router's own, from which it sends by the uplink.
	Addresses []netip.Addr
	// Port is the UDP port of FoU.
	Port uint16
	// Probers ask the router at the TCP port HealthPort how it is, and are answered though no more connections can be
	// tracked.
	Probers    []netip.Addr
	HealthPort uint16
	// Ports are those of TCP at which the router tells of itself, to Askers and nobody else.
	Ports  []uint16
	Askers []netip.Prefix
	// Destinations are what clients may reach.
	Destinations []netip.Prefix
	// Clients may send.
	Clients []GatewayClient
	// MaxPerClient is how many connections one address of a client may have at once, 0 any number.
	MaxPerClient int
	// Over are those that have more, and open none until they have fewer.
	Over []netip.Addr
	// Floating are the addresses by which clients leave, each by those that Sources say, and none by the router's own. Nil
	// without such addresses: clients leave by the router's.
	Floating *GatewayFloating
	// Transits are the addresses that the router's node translates to its own: packets from them may take no other hop than that.
	Transits []netip.Addr
}

// GatewayFloating is how clients leave by floating addresses, or by one that the router's node translates.
type GatewayFloating struct {
	// Addresses are answered for when they are asked for an echo.
	Addresses []netip.Addr
	// Sources say by which address a client leaves. A connection that no Source is for isn't opened. Those of one client
	// don't overlap, but for one with any destination, which is for what is left; they are sorted.
	Sources []GatewaySource
}

// Equal says whether two are the same.
func (f *GatewayFloating) Equal(o *GatewayFloating) bool {
	if f == nil || o == nil {
		return f == o
	}
	return slices.Equal(f.Addresses, o.Addresses) && slices.Equal(f.Sources, o.Sources)
}

// GatewaySource is the address by which connections of a client leave.
type GatewaySource struct {
	// Client is an address of a client.
	Client netip.Addr
	// Destinations are those of the connections; invalid for any.
	Destinations netipx.IPRange
	// Address is the source address that destinations see.
	Address netip.Addr
}

// GatewayClient is an address of a client, which sends by a link.
type GatewayClient struct {
	Addr netip.Addr
	// Link is the index of the client's tunnel.
	Link int
}

// Counters of a router, of each family.
const (
	// Masqueraded are packets of clients that went on by the uplink, where they have the router's address.
	Masqueraded = "masqueraded"
	// Invalid are packets of no connection, dropped.
	Invalid = "invalid"
	// NonClient are packets with FoU from other addresses than clients', dropped.
	NonClient = "non_client"
	// ForgedSource are packets out of a tunnel with a source other than its client's, dropped.
	ForgedSource = "forged_source"
	// NotADestination are packets of clients to where the router doesn't lead, dropped.
	NotADestination = "not_a_destination"
	// ForeignSource are packets that would have left by the uplink with a source other than the router's, dropped.
	ForeignSource = "foreign_source"
	// Unsolicited are packets that would have reached a client, or gone anywhere else, without a connection that a
	// client opened, and UDP to the router itself, dropped.
	Unsolicited = "unsolicited"
	// ConnectionLimit are packets that would have opened a connection of a client with as many as one may have,
	// dropped.
	ConnectionLimit = "connection_limit"
	// Stranger are packets of TCP to a port at which the router tells of itself, from outside of the cluster, dropped.
	Stranger = "stranger"
)

var counted = []string{Masqueraded, Invalid, NonClient, ForgedSource, NotADestination, ForeignSource, Unsolicited, ConnectionLimit, Stranger}

// Ruleset returns the table of a router. Tunnels are all links but lo and the uplink. Each packet meets few rules:
// most are decided by the first ones of a chain, and what is dropped is told apart by the rules after them. Clients and
// addresses that come and go change nothing but sets.
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
//	nat        the first packet of a connection: clients get the router's address, or their floating one
//	arrive     with floating addresses: the router answers an echo request to one of them
//	transit    from an address that the node translates: the node doesn't forward the packet unless it does. Open connections
//	           may have it though clients leave by another one now
//	others     connections that nat hasn't translated: none may be opened
//	  own
//
// Packets that leave by the uplink are the router's own, or forwarded and translated by this table
// alone. A chain behind the translation would see both kinds, but every packet once more.
func (g Gateway) Ruleset() dataplane.Ruleset {
	t := newGateway(g)
	t.entry.Add("from a client", fmt.Sprintf("iif != %d goto sent", g.Uplink))
	t.entry.Add("FoU", t.fouPort+" goto fou")
	t.entry.Add("a probe", fmt.Sprintf("th dport %d meta l4proto tcp goto probed", g.HealthPort))
	t.entry.Add("an answer may be forwarded", filtered)
	t.exit.Add("FoU", t.fouPort+" notrack accept")
	t.exit.Add("an answer to a probe", fmt.Sprintf("th sport %d meta l4proto tcp goto answered", g.HealthPort))
	t.leave.Add("by the uplink", t.out+" goto own")
	t.input.Add("untracked", "ct state untracked accept")
	t.forward.Add("TCP is opened", "tcp flags syn / syn,rst meta l4proto tcp jump opened")
	t.forward.Add("not from a client", t.in+" goto answer")
	t.answer.Add("to a client", fmt.Sprintf("oif != %d ct state established,related accept", g.Uplink))
	for _, f := range slices.Backward(families) {
		t.accepts(f)
	}
	for _, f := range slices.Backward(families) {
		f.rule(&t.input, "a datagram that no one asked for", "%s meta nfproto $f meta l4proto udp ct state new counter name %s_$f drop", t.in, Unsolicited)
	}
	for _, port := range g.Ports {
		t.input.Add("how is it", fmt.Sprintf("th dport %d meta l4proto tcp goto asked", port))
	}
	t.others.Add("by the uplink", t.out+" goto own")
	for _, f := range slices.Backward(families) {
		t.drops(f)
	}
	// An answer to a client may be for the port of FoU, or of probes.
	t.fou.Add("an answer may be forwarded", filtered)
	t.probed.Add("an answer may be forwarded", filtered)
	t.opened.Add("fits the way", "tcp option maxseg size set rt mtu")
	t.sent.Add("local", fmt.Sprintf("iif %d accept", loopback))
	for _, f := range slices.Backward(families) {
		t.unsent(f)
	}
	// A chain comes before those that lead to it.
	for _, f := range slices.Backward(families) {
		t.Chains = append(t.Chains, t.opens[f.Family])
	}
	t.Chains = append(t.Chains, t.sent, t.opened, t.answer, t.fou, t.probed, t.answered, t.own, t.asked, t.entry, t.exit, t.leave, t.input, t.forward, t.nat, t.others)
	if t.Floating != nil {
		t.Chains = append(t.Chains, t.arrive)
	}
	if len(t.Transits) > 0 {
		t.Chains = append(t.Chains, t.transit)
	}
	return t.Ruleset
}

// Before is the table of a router that doesn't know its clients yet. With a rule that asks for connections the kernel begins to track them: what
// the router opens until then, to the API server, would belong to none, and be dropped, where nf_conntrack_tcp_loose is 0.
func Before() dataplane.Ruleset {
	before := base("before", "filter", "input", dataplane.HookFilter)
	before.Add("untracked", "ct state untracked accept")
	return dataplane.Ruleset{Chains: []dataplane.Chain{before}}
}

// gateway is the table of a router in the making.
type gateway struct {
	dataplane.Ruleset
	Gateway
	// in and out match what comes in, and leaves, by the uplink; fouPort matches FoU.
	in, out, fouPort string

	entry, exit, leave, input, forward, nat, others         dataplane.Chain
	arrive, transit                                         dataplane.Chain
	sent, opened, answer, fou, probed, answered, own, asked dataplane.Chain
	opens                                                   map[dataplane.Family]dataplane.Chain
}

// loopback is the index of lo, the same in every namespace.
const loopback = 1

// filtered lets a packet be forwarded: by the mark it has a route.
var filtered = fmt.Sprintf("meta mark set %#08x", dataplane.MarkFiltered)

func newGateway(g Gateway) *gateway {
	named := func(name string) dataplane.Chain { return dataplane.Chain{Name: name} }
	return &gateway{
		Gateway: g,
		in:      fmt.Sprintf("iif %d", g.Uplink), out: fmt.Sprintf("oif %d", g.Uplink), fouPort: fmt.Sprintf("th dport %d meta l4proto udp", g.Port),
		entry: base("entry", "filter", "prerouting", dataplane.HookRaw), exit: base("exit", "filter", "output", dataplane.HookRaw),
		leave: base("leave", "filter", "output", dataplane.HookFilter), input: base("input", "filter", "input", dataplane.HookFilter),
		forward: base("forward", "filter", "forward", dataplane.HookFilter), nat: base("nat", "nat", "postrouting", dataplane.HookSourceNAT),
		// The kernel asks it only if nat, which comes before, has said nothing.
		others:  base("others", "nat", "postrouting", dataplane.HookSourceNAT+1),
		arrive:  base("arrive", "nat", "prerouting", dataplane.HookDestinationNAT),
		transit: base("transit", "filter", "postrouting", dataplane.HookLast),
		sent:    named("sent"), opened: named("opened"), answer: named("answer"), fou: named("fou"), probed: named("probed"),
		answered: named("answered"), own: named("own"), asked: named("asked"), opens: map[dataplane.Family]dataplane.Chain{},
	}
}

// accepts adds the sets of a family, and the rules that most packets meet.
func (t *gateway) accepts(f family) {
	for _, name := range counted {
		t.Counters = append(t.Counters, f.Named(name))
	}
	clients, peers := t.clients(f)
	own := f.of(t.Addresses)
	destinations := f.hashed("destinations", f.joined(t.Destinations, own))
	askers := f.hashed("askers", f.joined(t.Askers, nil))
	t.Sets = append(t.Sets, clients, peers, destinations, f.set("probers", t.Probers), askers)
	if t.Floating != nil {
		t.floating(f, clients.Size)
	}
	if len(t.Transits) > 0 {
		transits := f.set("transits", t.Transits)
		t.Sets = append(t.Sets, transits)
		f.rule(&t.transit, "no other hop than the node", "%s meta nfproto $f $ip saddr @%s $hops set %d", t.out, transits.Name, dataplane.TransitHops)
	}

	// Connections of the tunnels themselves are of no interest, and cost a lookup each. An answer to a client's
	// connection that was given FoU's port isn't from a client.
	f.rule(&t.fou, "of a client", "meta nfproto $f $ip saddr @clients_$f notrack accept")
	// A router that is overloaded isn't one that is to be started again, nor dead to its clients: a full table would
	// drop the answer, too, which is no connection's.
	for _, addr := range own {
		f.rule(&t.exit, "to a client: it lives", "meta nfproto $f $ip daddr @clients_$f $ip saddr %s meta l4proto $ping $icmp type echo-reply notrack accept", addr)
		f.rule(&t.probed, "by a node", "meta nfproto $f $ip saddr @probers_$f $ip daddr %s notrack accept", addr)
		f.rule(&t.answered, "to a node", "meta nfproto $f $ip daddr @probers_$f $ip saddr %s notrack accept", addr)
		f.rule(&t.own, "the router's address", "meta nfproto $f $ip saddr %s accept", addr)
		if t.Floating == nil {
			f.rule(&t.nat, "clients get the router's address", "%s meta nfproto $f $ip saddr @clients_$f snat $ip to %s fully-random", t.out, addr)
		}
	}
	f.rule(&t.sent, "to a destination", "meta nfproto $f iif . $ip saddr @peers_$f $ip daddr @%s %s accept", destinations.Name, filtered)
	f.rule(&t.input, "not from a client", "meta nfproto $f %s $ip saddr != @clients_$f counter name %s_$f drop", t.fouPort, NonClient)
	// FoU isn't tracked, hence what is said about it belongs to no connection.
	for _, addr := range own {
		f.rule(&t.input, "FoU to a client is too large", "meta nfproto $f $ip daddr %s meta l4proto $ping %s accept", addr, f.tooLarge(clients))
	}
	// A reset in answer to a packet that isn't translated back would end a living connection.
	f.rule(&t.input, "of no connection", "meta nfproto $f ct state invalid counter name %s_$f drop", Invalid)
	f.rule(&t.asked, "by the cluster", "meta nfproto $f $ip saddr @%s accept", askers.Name)
	// The way back, by which the kernel would know, isn't that of the tunnel.
	f.rule(&t.opened, "from a client", "meta nfproto $f iif != %d tcp option maxseg size set %d", t.Uplink, f.segment(dataplane.TunnelMTU(f.Family, t.MTU)))
	f.rule(&t.forward, "from a client", "%s meta nfproto $f ct status snat counter name %s_$f accept", t.out, Masqueraded)
	t.opens[f.Family] = t.limit(f, clients.Size)
	f.rule(&t.answer, "of no connection", "meta nfproto $f ct state invalid counter name %s_$f drop", Invalid)
	f.rule(&t.answer, "nobody asked for it", "meta nfproto $f counter name %s_$f drop", Unsolicited)
}

// floating adds the maps and rules of a family by which clients leave by floating addresses. A port stays the client's as long as it
// is free: a router that takes over an address by itself translates a connection as before. More clients than size need a map of
// another size.
func (t *gateway) floating(f family, size uint32) {
	all, towards := f.sources(t.Floating.Sources, size)
	addresses := f.set("floating", t.Floating.Addresses)
	t.Sets = append(t.Sets, addresses, all, towards)
	f.rule(&t.nat, "a client's address towards a destination", "%s meta nfproto $f snat $ip to $ip saddr . $ip daddr map @%s", t.out, towards.Name)
	f.rule(&t.nat, "a client's address", "%s meta nfproto $f snat $ip to $ip saddr map @%s", t.out, all.Name)
	for _, own := range f.of(t.Addresses) {
		f.rule(&t.arrive, "to a floating address: does it live", "%s meta nfproto $f $ip daddr @%s meta l4proto $ping $icmp type echo-request dnat $ip to %s", t.in, addresses.Name, own)
	}
}

// sources returns the maps from clients to their addresses: for any destination, which are found in a time that doesn't grow with their
// number, and for some.
func (f family) sources(sources []GatewaySource, size uint32) (all, towards dataplane.Set) {
	all = dataplane.Set{Name: f.Named("sources"), Key: f.addr, Value: f.addr, Size: size}
	towards = dataplane.Set{Name: f.Named("sources_towards"), Key: f.addr + " . " + f.addr, Value: f.addr, Interval: true}
	for _, s := range sources {
		if dataplane.FamilyOf(s.Client) != f.Family {
			continue
		}
		client, address := dataplane.KeyOf(s.Client), dataplane.KeyOf(s.Address)
		if !s.Destinations.IsValid() {
			all.Elements = append(all.Elements, dataplane.Element{Key: client, Value: address})
			continue
		}
		towards.Elements = append(towards.Elements, dataplane.Element{
			Key: client + dataplane.KeyOf(s.Destinations.From()), Last: client + dataplane.KeyOf(s.Destinations.To()), Value: address,
		})
	}
	return all, towards
}

// drops adds the rules that tell apart what is dropped.
func (t *gateway) drops(f family) {
	f.rule(&t.forward, "a client opens a connection", "%s meta nfproto $f ct status ! confirmed goto opens_$f", t.out)
	f.rule(&t.forward, "of no connection", "meta nfproto $f ct state invalid counter name %s_$f drop", Invalid)
	f.rule(&t.forward, "with a client's address", "%s meta nfproto $f ct state established,related,new counter name %s_$f drop", t.out, ForeignSource)
	f.rule(&t.forward, "nobody asked for it", "meta nfproto $f counter name %s_$f drop", Unsolicited)
	if f.Family == dataplane.IPv6 {
		// Neighbour discovery (RFC 4861).
		f.rule(&t.own, "link-local", "meta nfproto $f ip6 saddr fe80::/10 accept")
		f.rule(&t.own, "no address yet", "meta nfproto $f ip6 saddr ::/128 accept")
	}
	// An error about an answer to a client is about to be translated (RFC 5508): until then its source is whichever of
	// the uplink's addresses the kernel prefers.
	f.rule(&t.own, "an error", "meta nfproto $f ct state related ct status snat accept")
	f.rule(&t.asked, "by another", "meta nfproto $f iif != %d counter name %s_$f drop", loopback, Stranger)
	f.rule(&t.own, "another's address", "meta nfproto $f counter name %s_$f drop", ForeignSource)
}

// unsent adds the rules for what clients send and the router doesn't forward.
func (t *gateway) unsent(f family) {
	// The answer takes the tunnel, too.
	for _, addr := range f.of(t.Addresses) {
		f.rule(&t.sent, "to the router: does it live", "meta nfproto $f iif . $ip saddr @peers_$f $ip daddr %s meta l4proto $ping $icmp type echo-request notrack accept", addr)
	}
	f.rule(&t.sent, "a client sends as another", "meta nfproto $f iif . $ip saddr != @peers_$f counter name %s_$f drop", ForgedSource)
	f.rule(&t.sent, "a client sends elsewhere", "meta nfproto $f counter name %s_$f drop", NotADestination)
}

// clients returns the sets of the clients' addresses, alone and by their links.
func (t *gateway) clients(f family) (clients, peers dataplane.Set) {
	size := sizeFor(len(t.Clients), 8192)
	clients = dataplane.Set{Name: f.Named("clients"), Key: f.addr, Size: size, Elements: make([]dataplane.Element, 0, len(t.Clients))}
	peers = dataplane.Set{Name: f.Named("peers"), Key: "iface_index . " + f.addr, Size: size, Elements: make([]dataplane.Element, 0, len(t.Clients))}
	for _, c := range t.Clients {
		if dataplane.FamilyOf(c.Addr) == f.Family {
			key := dataplane.KeyOf(c.Addr)
			clients.Elements = append(clients.Elements, dataplane.Element{Key: key})
			peers.Elements = append(peers.Elements, dataplane.Element{Key: dataplane.KeyOfLink(c.Link) + key})
		}
	}
	return clients, peers
}

// sizeFor is the size of sets of so many elements, at least the least. It seldom changes, as the table is replaced then.
func sizeFor(elements, least int) uint32 {
	size := least
	for size < elements {
		size *= 2
	}
	return uint32(size)
}

// tooLarge matches ICMP messages by which a packet to an address in a set doesn't fit the way there (RFC 1191,
// RFC 8201): type and code, and the destination in the header that they quote. The kernel then asks its tunnels
// whether they sent it.
func (f family) tooLarge(s dataplane.Set) string {
	if f.Family == dataplane.IPv6 {
		return "@th,0,16 0x0200 @th,256,128 @" + s.Name
	}
	return "@th,0,16 0x0304 @th,192,32 @" + s.Name
}

// segment is the maximum segment size of TCP in packets of a link's MTU (RFC 6691).
func (f family) segment(mtu int) int {
	const tcp = 20
	header := 20
	if f.Family == dataplane.IPv6 {
		header = 40
	}
	return max(0, mtu-header-tcp)
}

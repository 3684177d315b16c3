package ruleset

import (
	"encoding/binary"
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
	// Services are at some of Addresses. Packets go to the node itself, where a Service proxy translates those for their ports: nothing that runs on the node is
	// reached by these addresses.
	Services []Service
	// Local are the node's own addresses. Connections of routers with the host are tracked in both directions: what the host sends doesn't come by
	// here. To look an address up in a set takes a third of the time that the routing table takes (fib daddr type local).
	Local []netip.Addr
}

// Service is an address by which clients reach Services.
type Service struct {
	Address netip.Addr
	Ports   []Port
}

// Port is a port of a Service.
type Port struct {
	// Protocol is the protocol of IP, such as unix.IPPROTO_TCP.
	Protocol uint8
	Port     uint16
}

// NotHeld is the counter of packets from and to floating addresses for which the node doesn't answer.
const NotHeld = "not_held"

// NoService is the counter of packets to addresses of Services, for ports at which there is none.
const NoService = "no_service"

// Sets that count packets from and to each address, where the rules have looked the address up anyway, and to each address of Services packets that nobody has
// translated.
const (
	Sent     = "sent"
	Received = "received"
	NoProxy  = "no_proxy"
)

// Names of sets.
const (
	floatingSet  = "floating"
	answeringSet = "answering"
	egressSet    = "of_egresses"
	localSet     = "local"
	portsSet     = "ports"
	toNodeSet    = "to_node"
	// endsSet has the last four bytes of addresses.
	endsSet = "ends"
)

// Kinds of addresses.
const (
	ofEgress   = "egress"
	ofServices = "services"
	ofOther    = "other"
)

// Answering is the set of addresses of a family for which the node answers. Its elements end by themselves, so that the node stops also if
// coild doesn't run any more. A former holder would otherwise send and take packets of connections that the next one has.
func Answering(f dataplane.Family) dataplane.Set { return familyOf(f).answering() }

func (f family) answering() dataplane.Set {
	return dataplane.Set{Name: f.Named(answeringSet), Key: f.addr, Timeout: holding.Lease}
}

// Ruleset returns the table of the family ip, or ip6. The node's other packets pass it, too, so that most of them only meet, twice, the set of the
// last four bytes of addresses: whole addresses of IPv6 would be looked for twice as long. Hosts that ask for an address of IPv6 get no answer either (RFC 4861,
// section 4.3: the target is behind the first 8 bytes).
//
//	prerouting   before connections are tracked
//	  to, from   drop what isn't for this node any more, and count packets of each address
//	input        after others have translated or refused packets to Services, also IPVS, which takes them there: what still goes to the node itself
//	keep         before others translate sources: those of Egresses stay as they are
func (h Floating) Ruleset(of dataplane.Family) dataplane.Ruleset {
	f := familyOf(of)
	here := f.of(h.Addresses)
	if len(here) == 0 {
		return dataplane.Ruleset{}
	}
	r := dataplane.Ruleset{
		Counters: []string{f.Named(NotHeld), f.Named(NoService)},
		// Also without elements: a set that comes makes the table anew, which loses the elements that end by themselves.
		Sets: []dataplane.Set{
			f.ends(endsSet, here), h.counted(f, Received, "to"), h.counted(f, Sent, "from"), f.answering(),
			f.set(floatingSet, here), f.set(egressSet, h.OfEgresses), f.sized(localSet, h.Local, 256), f.ports(h.Services), f.toNode(),
			h.noProxy(f),
		},
	}
	chain := func(name string) dataplane.Chain { return dataplane.Chain{Name: name} }
	entry := base("prerouting", "filter", "prerouting", dataplane.HookRaw)
	f.rule(&entry, "maybe from a floating address", "@nh,%d,32 @%s_$f jump from", f.end(f.source), endsSet)
	f.rule(&entry, "maybe to a floating address", "@nh,%d,32 @%s_$f jump to", f.end(f.destination), endsSet)
	if f.Family == dataplane.IPv6 {
		f.rule(&entry, "a host asks for a floating address for which the node doesn't answer", "meta l4proto $ping $icmp type nd-neighbor-solicit @th,64,128 @%s_$f @th,64,128 != @%s_$f drop",
			floatingSet, answeringSet)
	}
	to, from := chain("to"), chain("from")
	f.rule(&to, "of a kind", "$ip daddr vmap @%s_$f", Received)
	f.rule(&from, "of a kind", "$ip saddr vmap @%s_$f", Sent)
	r.Chains = []dataplane.Chain{entry, to, from}
	for _, kind := range []string{ofEgress, ofServices, ofOther} {
		to, from := chain("to_"+kind), chain("from_"+kind)
		const notHeld = "the node doesn't answer for it"
		f.rule(&to, notHeld, "$ip daddr != @%s_$f counter name %s_$f drop", answeringSet, NotHeld)
		f.rule(&from, notHeld, "$ip saddr != @%s_$f counter name %s_$f drop", answeringSet, NotHeld)
		if kind == ofEgress && !h.Tracked {
			f.rule(&to, "not tracked", "notrack accept")
			f.rule(&from, "not tracked, but with the host", "$ip daddr != @%s_$f notrack", localSet)
		}
		if kind == ofServices {
			f.rule(&to, "a Service", "$ip daddr . meta l4proto . th dport @%s_$f accept", portsSet)
			f.rule(&to, "a ping, an error, or a neighbour", "meta l4proto $ping $icmp type @%s_$f accept", toNodeSet)
			f.rule(&to, "no Service", "counter name %s_$f drop", NoService)
		}
		r.Chains = append(r.Chains, to, from)
	}
	if proxied := h.noProxy(f); len(proxied.Elements) > 0 { // else no rule needs the kernel to track connections
		input := base("input", "filter", "input", dataplane.HookSourceNAT+10)
		f.rule(&input, "of no connection: nobody translates it, and the node would reset the connection", "ct state invalid $ip daddr @%s_$f drop", floatingSet)
		f.rule(&input, "nobody has translated it", "meta l4proto != $ping $ip daddr @%s_$f drop", NoProxy)
		r.Chains = append(r.Chains, input)
	}
	if h.Tracked {
		keep := base("keep", "nat", "postrouting", dataplane.HookSourceNAT-10)
		f.rule(&keep, "an Egress's address stays the source", "$ip saddr @%s_$f snat $ip to $ip saddr", egressSet)
		r.Chains = append(r.Chains, keep)
	}
	return r
}

// counted is a map of addresses that counts their packets, to the chains of their kinds, whose names begin with a direction.
func (h Floating) counted(f family, name, direction string) dataplane.Set {
	s := f.set(name, h.Addresses)
	s.Value, s.Counted, s.Size = "verdict", true, sizeFor(len(s.Elements), 1024)
	for i, a := range f.of(h.Addresses) {
		kind := ofOther
		switch {
		case slices.Contains(h.OfEgresses, a):
			kind = ofEgress
		case slices.ContainsFunc(h.Services, func(s Service) bool { return s.Address == a }):
			kind = ofServices
		}
		s.Elements[i].Value = "goto " + direction + "_" + kind
	}
	return s
}

// noProxy is the set of the Services' addresses.
func (h Floating) noProxy(f family) dataplane.Set {
	var addrs []netip.Addr
	for _, s := range h.Services {
		addrs = append(addrs, s.Address)
	}
	s := f.sized(NoProxy, addrs, 1024)
	s.Counted = true
	return s
}

// sized is a set of addresses of the family that is found fast, of a size of at least the least.
func (f family) sized(name string, addrs []netip.Addr, least int) dataplane.Set {
	s := f.set(name, addrs)
	s.Size = sizeFor(len(s.Elements), least)
	return s
}

// ports is the set of the Services' addresses, protocols and ports.
func (f family) ports(services []Service) dataplane.Set {
	s := dataplane.Set{Name: f.Named(portsSet), Key: f.addr + " . inet_proto . inet_service"}
	for _, at := range services {
		if dataplane.FamilyOf(at.Address) != f.Family {
			continue
		}
		for _, p := range at.Ports {
			key := append(at.Address.AsSlice(), p.Protocol, 0, 0, 0)
			key = append(binary.BigEndian.AppendUint16(key, p.Port), 0, 0)
			s.Elements = append(s.Elements, dataplane.Element{Key: string(key)})
		}
	}
	slices.SortFunc(s.Elements, func(a, b dataplane.Element) int { return strings.Compare(a.Key, b.Key) })
	s.Size = sizeFor(len(s.Elements), 1024)
	return s
}

// Ports is the name of the set of the Services' addresses, protocols and ports in the table of a family.
func Ports(f dataplane.Family) string { return f.Named(portsSet) }

// ServicesOf returns the Services whose elements a set of Ports has, by their keys.
func ServicesOf(f dataplane.Family, keys []string) map[netip.Addr][]Port {
	all := map[netip.Addr][]Port{}
	size := map[dataplane.Family]int{dataplane.IPv4: 4, dataplane.IPv6: 16}[f]
	for _, k := range keys {
		if len(k) != size+8 {
			continue
		}
		if a, ok := netip.AddrFromSlice([]byte(k[:size])); ok {
			all[a] = append(all[a], Port{Protocol: k[size], Port: binary.BigEndian.Uint16([]byte(k[size+4:]))})
		}
	}
	return all
}

// toNode is the set of the ICMP messages that an address of Services takes: a ping, errors about packets that were sent from it, and hosts of the link that
// know where it is and ask whether it still is there (RFC 4861, section 7.3: Neighbor Unreachability Detection).
func (f family) toNode() dataplane.Set {
	more := numbers("", "", 8)
	if f.Family == dataplane.IPv6 {
		more = numbers("", "", 128, 135, 136)
	}
	s := f.errors()
	s.Name, s.Elements = f.Named(toNodeSet), append(s.Elements, more.Elements...)
	return s
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

package ruleset

import (
	"fmt"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Masquerade is what the table of a node does for routers whose clients leave by the node's address. It translates sources that routers
// have given the packets of clients, and nothing else: the router's own packets, which have its own address, stay as they are.
type Masquerade struct {
	// Transits have an address for each router, and family. They are sorted.
	Transits []Transit
}

// Transit is the address from which a router sends its clients' packets to the node, by a link.
type Transit struct {
	// Link is the index of the node's end of the router's link.
	Link int
	Addr netip.Addr
}

// Untranslated is the counter of packets from a transit address that would have left with it, dropped.
const Untranslated = "untranslated"

// Ruleset returns the table. A packet from a transit address that hasn't passed all of it is dropped: by a routing policy rule if there is
// no table (see dataplane.PriorityTransit).
//
//	entry       before the route is looked up: the packet gets the mark without which it has none
//	arrive      for the node itself: the mark goes
//	forward     for others: the mark goes, before rules of others see it
//	nat         before others translate sources: it gets the address of the link by which it leaves
//	last        after all others: what still has the transit address, as a packet of no connection, is dropped
func (m Masquerade) Ruleset() dataplane.Ruleset {
	var r dataplane.Ruleset
	if len(m.Transits) == 0 {
		return r
	}
	entry := base("entry", "filter", "prerouting", dataplane.HookLast)
	arrive := base("arrive", "filter", "input", dataplane.HookFirst)
	forward := base("forward", "filter", "forward", dataplane.HookFirst)
	nat := base("nat", "nat", "postrouting", dataplane.HookSourceNAT-10)
	last := base("last", "filter", "postrouting", dataplane.HookLast)
	// Other bits of the mark are others'.
	marked := func(bits uint32) string {
		return fmt.Sprintf("meta mark set meta mark & %#08x | %#08x", ^uint32(dataplane.MarkTransit), bits)
	}
	for _, f := range families {
		routers := dataplane.Set{Name: f.Named("routers"), Key: "iface_index . " + f.addr}
		var addrs []netip.Addr
		for _, t := range m.Transits {
			if dataplane.FamilyOf(t.Addr) == f.Family {
				routers.Elements = append(routers.Elements, dataplane.Element{Key: dataplane.KeyOfLink(t.Link) + dataplane.KeyOf(t.Addr)})
				addrs = append(addrs, t.Addr)
			}
		}
		transits := f.set("transits", addrs)
		r.Counters = append(r.Counters, f.Named(Untranslated))
		r.Sets = append(r.Sets, routers, transits)
		from := fmt.Sprintf("meta nfproto $f iif . $ip saddr @%s ", routers.Name)
		f.rule(&entry, "from a client, by its router", "%s", from+marked(dataplane.MarkTransit))
		f.rule(&arrive, "from a client, by its router", "%s", from+marked(0))
		f.rule(&forward, "from a client, by its router", "%s", from+marked(0))
		f.rule(&nat, "clients get the node's address", "%s", from+"masquerade fully-random")
		f.rule(&last, "not translated", "meta nfproto $f $ip saddr @%s counter name %s_$f drop", transits.Name, Untranslated)
	}
	r.Chains = []dataplane.Chain{entry, arrive, forward, nat, last}
	return r
}

package ruleset

import (
	"fmt"
	"net/netip"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Masquerade is what the table of a node does for routers whose clients leave by the node's address. It translates sources that routers
// have given the packets of clients, and nothing else: the router's own packets, which have its own address, stay as they are.
type Masquerade struct {
	// Transits have an address for each router and family. They are sorted.
	Transits []Transit
}

// Transit is the address from which a router sends its clients' packets to the node, and the link by which they come.
type Transit struct {
	// Link is the index of the node's end of the router's link.
	Link int
	Addr netip.Addr
}

// Untranslated is the counter of packets that were dropped because they would have left with a transit address.
const Untranslated = "untranslated"

// Ruleset returns the table. Without it the kernel doesn't forward packets from a transit address, since they have one hop left.
//
//	entry       before the packet is forwarded: it may take more hops
//	nat         before others translate sources: it gets the address of the link by which it leaves
//	last        after all others: a packet that still has the transit address is dropped, such as one of no connection
func (m Masquerade) Ruleset() dataplane.Ruleset {
	var r dataplane.Ruleset
	if len(m.Transits) == 0 {
		return r
	}
	entry := base("entry", "filter", "prerouting", dataplane.HookMangle)
	nat := base("nat", "nat", "postrouting", dataplane.HookSourceNAT-10)
	last := base("last", "filter", "postrouting", dataplane.HookLast)
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
		f.rule(&entry, "from a client, by its router", "%s$hops set %d", from, dataplane.ForwardHops)
		f.rule(&nat, "clients get the node's address", "%s", from+"masquerade fully-random")
		f.rule(&last, "not translated", "meta nfproto $f $ip saddr @%s counter name %s_$f drop", transits.Name, Untranslated)
	}
	r.Chains = []dataplane.Chain{entry, nat, last}
	return r
}

package ruleset

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Host is what the table of a node does.
type Host struct {
	// SourceGuard drops packets that come in by links of dataplane.LinkGroup from addresses that aren't routed
	// back by the same link.
	SourceGuard bool
	// Tracked lets connections of stragglers be tracked; see Floating.
	Tracked bool
	// Clients are the guards of pods that use Egresses, by the index of the node's end of their links.
	Clients map[int]dataplane.ClientGuard
}

// Forged is the counter of packets with a foreign source, and the name of the chain that drops them. Dropped packets
// of clients are counted as PastTunnel.
const Forged = "forged"

// Straggling is for how long a router may send from a floating address that has moved to another node, for clients that don't know that yet.
const Straggling = 10 * time.Second

// StragglingSet is the set of a family with the links of routers, and addresses that have moved away from them.
func StragglingSet(f dataplane.Family) dataplane.Set { return elsewhere(f, "straggling", Straggling) }

// Probing is for how long a router may send probes (see Probe) from a floating address that is at another node.
const Probing = time.Second

// ProbingSet is the set of a family with the links of routers, and such addresses.
func ProbingSet(f dataplane.Family) dataplane.Set { return elsewhere(f, "probing", Probing) }

// elsewhere is a set of links with addresses that aren't routed there.
func elsewhere(f dataplane.Family, name string, timeout time.Duration) dataplane.Set {
	s := dataplane.Set{Name: f.Named(name), Key: "iface_index . ipv4_addr", Timeout: timeout}
	if f == dataplane.IPv6 {
		s.Key = "iface_index . ipv6_addr"
	}
	return s
}

// Names of sets. Clients with the same guard share its sets, whose names have its ID.
const (
	clientsSet      = "clients"
	destinationsSet = "destinations"
	repliesSet      = "replies"
)

// Ruleset returns the table. Packets that aren't dropped go on, to chains of other tables, too.
func (h Host) Ruleset() dataplane.Ruleset {
	var r dataplane.Ruleset
	if h.SourceGuard {
		guardSources(&r, h.Tracked)
	}
	if len(h.Clients) > 0 {
		guardClients(&r, h.Clients)
	}
	return r
}

// guardSources drops packets with foreign sources. The hook comes before connections are tracked, so that a forged
// packet makes none.
//
//	prerouting   what comes in by the links of pods from a source that isn't routed back
//	  forged     drops it, unless it is a straggler's
//	keep         before others translate sources: those of stragglers stay as they are
func guardSources(r *dataplane.Ruleset, tracked bool) {
	drops, keep := dataplane.Chain{Name: Forged}, base("keep", "nat", "postrouting", dataplane.HookSourceNAT-10)
	for _, f := range families {
		r.Counters = append(r.Counters, f.Named(Forged))
		unspecified := "0.0.0.0"
		if f.Family == dataplane.IPv6 {
			unspecified = "::"
			f.rule(&drops, "link-local, which is never forwarded", "meta nfproto $f ip6 saddr fe80::/10 return")
		}
		straggling, probing := StragglingSet(f.Family), ProbingSet(f.Family)
		r.Sets = append(r.Sets, straggling, probing)
		leave := "notrack return" // as on the node that has the address now
		if tracked {
			leave = "return"
			f.rule(&keep, "an address that has moved stays the source", "meta nfproto $f iif . $ip saddr @%s snat $ip to $ip saddr", straggling.Name)
		}
		f.rule(&drops, "of a router, from an address that has moved", "meta nfproto $f iif . $ip saddr @%s %s", straggling.Name, leave)
		f.rule(&drops, "a probe of a router, from an address that is elsewhere", "meta nfproto $f iif . $ip saddr @%s %s return", probing.Name, f.probe())
		// Duplicate address detection, multicast listener reports and DHCP; never forwarded either.
		f.rule(&drops, "no address yet", "meta nfproto $f $ip saddr %s return", unspecified)
		f.rule(&drops, "forged", "meta nfproto $f counter name %s_$f drop", Forged)
	}
	entry := base("prerouting", "filter", "prerouting", dataplane.HookRaw)
	entry.Add("from a pod, of a source that isn't routed to its link", fmt.Sprintf("iifgroup %#x fib saddr . iif oif missing jump %s", dataplane.LinkGroup, Forged))
	r.Chains = append(r.Chains, drops, entry)
	if tracked {
		r.Chains = append(r.Chains, keep)
	}
}

// guardClients drops packets of clients to destinations past their tunnels. Connections are tracked then, for the sake
// of replies; and Services aren't translated yet, just as in the client.
//
//	clients         what comes in by the links of clients
//	  guarded       each by the guard that it has
//	    client_ID   not to a destination
//	      past
func guardClients(r *dataplane.Ruleset, clients map[int]dataplane.ClientGuard) {
	guards, links := map[string]dataplane.ClientGuard{}, map[string][]int{}
	sorted := slices.Sorted(maps.Keys(clients))
	for _, link := range sorted {
		id := guardID(clients[link])
		guards[id] = clients[link]
		links[id] = append(links[id], link)
	}
	r.Sets = append(r.Sets, linkSet(clientsSet, sorted))
	entry := base("clients", "filter", "prerouting", dataplane.HookMangle)
	guarded, past := dataplane.Chain{Name: "guarded"}, dataplane.Chain{Name: "past"}
	for _, f := range families {
		r.Counters = append(r.Counters, f.Named(PastTunnel))
		f.rule(&past, "past the tunnel", "meta nfproto $f counter name %s_$f drop", PastTunnel)
	}
	r.Chains = append(r.Chains, past)
	for _, id := range slices.Sorted(maps.Keys(guards)) {
		of := dataplane.Chain{Name: "client_" + id}
		members := linkSet(clientsSet+"_"+id, links[id])
		r.Sets = append(r.Sets, members)
		for _, f := range families {
			destinations := f.ranged(f.Named(destinationsSet+"_"+id), guards[id].Destinations)
			replies := f.ranged(f.Named(repliesSet+"_"+id), guards[id].Replies)
			if len(replies.Ranges) > 0 {
				r.Sets = append(r.Sets, replies)
				f.rule(&of, "an answer by the way the connection came", "meta nfproto $f ct direction reply $ip daddr @%s accept", replies.Name)
			}
			r.Sets = append(r.Sets, destinations)
			f.rule(&of, "to a destination", "meta nfproto $f $ip daddr @%s goto past", destinations.Name)
		}
		guarded.Add("by a guard", fmt.Sprintf("iif @%s goto %s", members.Name, of.Name))
		r.Chains = append(r.Chains, of)
	}
	entry.Add("from a client", fmt.Sprintf("iif @%s goto guarded", clientsSet))
	r.Chains = append(r.Chains, guarded, entry)
}

// guardID is short for what a guard does, in the names of sets and chains. Tenants choose destinations: two guards with
// the same ID must be hard to find.
func guardID(g dataplane.ClientGuard) string {
	h := sha256.New()
	hashRanges(h, g.Destinations)
	h.Write([]byte("replies"))
	hashRanges(h, g.Replies)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func linkSet(name string, links []int) dataplane.Set {
	s := dataplane.Set{Name: name, Key: "iface_index"}
	for _, l := range links {
		s.Elements = append(s.Elements, dataplane.Element{Key: dataplane.KeyOfLink(l)})
	}
	return s
}

// GuardsOf returns the guards of clients that the sets of a node's table say. An agent that has started knows by them
// what its predecessor wanted.
func GuardsOf(sets []dataplane.Set) map[int]dataplane.ClientGuard {
	guards, links := map[string]dataplane.ClientGuard{}, map[int]string{}
	for _, s := range sets {
		kind, id, ok := strings.Cut(s.Name, "_")
		if !ok {
			continue
		}
		id, _, _ = strings.Cut(id, "_")
		g := guards[id]
		switch kind {
		case clientsSet:
			for _, e := range s.Elements {
				if link, ok := dataplane.LinkOfKey(e.Key); ok {
					links[link] = id
				}
			}
		case destinationsSet:
			g.Destinations = append(g.Destinations, s.Ranges...)
		case repliesSet:
			g.Replies = append(g.Replies, s.Ranges...)
		}
		guards[id] = g
	}
	clients := map[int]dataplane.ClientGuard{}
	for link, id := range links {
		g := guards[id]
		for _, ranges := range [][]netipx.IPRange{g.Destinations, g.Replies} {
			slices.SortFunc(ranges, func(a, b netipx.IPRange) int { return a.From().Compare(b.From()) })
		}
		clients[link] = g
	}
	return clients
}

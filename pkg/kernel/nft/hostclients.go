package nft

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Names of a Host's sets. Clients with the same guard share its sets, whose names have its ID.
const (
	clientsSet      = "clients"
	destinationsSet = "destinations"
	repliesSet      = "replies"
)

// guardClients drops packets of clients to destinations past their tunnels. Connections are tracked
// then, for the sake of replies; and Services aren't translated yet, just as in the client.
//
//	clients         what comes in by the links of clients
//	  guarded       each by the guard that it has
//	    client_ID   not to a destination
//	      past
func (d *definition) guardClients(clients map[int]dataplane.ClientGuard) {
	guards, links := map[string]dataplane.ClientGuard{}, map[string][]int{}
	for _, link := range slices.Sorted(maps.Keys(clients)) {
		id := guardID(clients[link])
		guards[id] = clients[link]
		links[id] = append(links[id], link)
	}
	all := set{name: clientsSet, key: nftables.TypeIFIndex, elements: linkElements(slices.Sorted(maps.Keys(clients)))}
	d.sets = append(d.sets, all)
	entry := chain{name: "clients", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting, priority: nftables.ChainPriorityMangle}
	guarded, past := chain{name: "guarded"}, chain{name: "past"}
	for _, p := range protocols {
		d.counters = append(d.counters, PastTunnel+p.suffix)
		past.add("past the tunnel", p.of(), count(PastTunnel+p.suffix), drop())
	}
	d.chains = append(d.chains, past)
	for _, id := range slices.Sorted(maps.Keys(guards)) {
		of := chain{name: "client_" + id}
		members := set{name: clientsSet + "_" + id, key: nftables.TypeIFIndex, elements: linkElements(links[id])}
		d.sets = append(d.sets, members)
		for _, p := range protocols {
			destinations := p.ranged(destinationsSet+"_"+id+p.suffix, guards[id].Destinations)
			replies := p.ranged(repliesSet+"_"+id+p.suffix, guards[id].Replies)
			if len(replies.ranges) > 0 {
				d.sets = append(d.sets, replies)
				of.add("an answer by the way the connection came", p.of(), ctReply(), p.in(p.dst, replies, true), accept())
			}
			d.sets = append(d.sets, destinations)
			of.add("to a destination", p.of(), p.in(p.dst, destinations, true), goTo(past))
		}
		guarded.add("by a guard", iifIn(members), goTo(of))
		d.chains = append(d.chains, of)
	}
	entry.add("from a client", iifIn(all), goTo(guarded))
	d.chains = append(d.chains, guarded, entry)
}

// guardID is short for what a guard does, in the names of sets and chains. Tenants choose destinations:
// it must be hard to find others with the same ID.
func guardID(g dataplane.ClientGuard) string {
	h := sha256.New()
	hashRanges(h, g.Destinations)
	h.Write([]byte("replies"))
	hashRanges(h, g.Replies)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func linkElements(links []int) []nftables.SetElement {
	var out []nftables.SetElement
	for _, l := range links {
		out = append(out, nftables.SetElement{Key: ifIndex(l)})
	}
	return out
}

// Clients reads from the kernel the guards that there are, by the index of the clients' links. An agent
// that has started knows by them what its predecessor wanted.
func (h *Host) Clients(ctx context.Context) (map[int]dataplane.ClientGuard, error) {
	exists, err := h.Exists()
	if err != nil || !exists {
		return nil, err
	}
	sets, err := h.readSets(ctx)
	if err != nil {
		return nil, err
	}
	guards, links := map[string]dataplane.ClientGuard{}, map[int]string{}
	for _, s := range sets {
		kind, id, ok := strings.Cut(s.Name, "_")
		if !ok {
			continue
		}
		elements, err := h.readElements(ctx, s.Name)
		if err != nil {
			return nil, err
		}
		id, _, _ = strings.Cut(id, "_")
		g := guards[id]
		switch kind {
		case clientsSet:
			for _, e := range elements {
				links[int(binaryutil.NativeEndian.Uint32(e.Key))] = id
			}
		case destinationsSet:
			g.Destinations = append(g.Destinations, rangesOf(elements)...)
		case repliesSet:
			g.Replies = append(g.Replies, rangesOf(elements)...)
		}
		guards[id] = g
	}
	clients := map[int]dataplane.ClientGuard{}
	for link, id := range links {
		g := guards[id]
		for _, ranges := range [][]dataplane.Range{g.Destinations, g.Replies} {
			slices.SortFunc(ranges, func(a, b dataplane.Range) int { return a.First.Compare(b.First) })
		}
		clients[link] = g
	}
	return clients, nil
}

package nft

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// The kernel counts connections by a list for each client, and looks up all that the list has when one
// is added (nf_conncount_add): with thousands of them each new one would cost milliseconds. So only one
// in several new connections, drawn at random, is in the list, and stands for the others.
const (
	// mostCounted is how many connections a list may have: one deviates by a sixteenth from
	// what it stands for, seldom by more than three.
	mostCounted = 256
	// fullFor is for how long a client is held to have too many connections after it was
	// refused the last one, unless one that is drawn finds fewer.
	fullFor = time.Hour
	// refusedFor is for how long all connections are refused without a look: lists grow by each
	// look, and shrink by a few entries.
	refusedFor = 100 * time.Millisecond
)

// sample returns how many connections of a client are counted at most, each of which stands for
// so many.
func sample(most int) (counted, each uint32) {
	each = uint32((most + mostCounted - 1) / mostCounted)
	return uint32(most) / each, each
}

// Names of the sets of a limit, less what counted connections and families add.
const (
	countedSet = "counted"
	fullSet    = "full"
	refusedSet = "refused"
	overSet    = "over"
)

// limit defines the chain that packets go to which open a connection of a client, who may have so many
// of them at once, and as many clients the sets have room for. Samples can be told from the others by
// a client that tries for long enough: those that are over the limit by a count of all are refused anyway.
//
//	over                          full, dropped
//	refused a moment ago          dropped
//	not drawn, and not full       accepted
//	counted, and too many         full, dropped
//	counted                       not full any more, accepted
//
// Of a client that is full each connection is counted: the first that is accepted was drawn in place
// of one that has ended.
func (d *definition) limit(p protocol, r dataplane.GatewayRules, size uint32) *chain {
	c := &chain{name: "opens" + p.suffix}
	if most := r.MaxPerClient; most > 0 {
		connections, each := sample(most)
		// The limit is in each element: another one needs another set.
		counted := set{name: fmt.Sprintf("%s_%d%s", countedSet, connections, p.suffix), key: p.address, size: size, counting: true}
		full := set{name: fullSet + p.suffix, key: p.address, size: size, timeout: fullFor}
		refused := set{name: refusedSet + p.suffix, key: p.address, size: size, timeout: refusedFor}
		over := set{name: overSet + p.suffix, key: p.address, elements: p.addresses(r.Over)}
		d.sets = append(d.sets, counted, full, refused, over)
		dropped := match(count(ConnectionLimit+p.suffix), drop())
		c.add("over the limit", p.in(p.src, over, true), p.note(unix.NFT_DYNSET_OP_UPDATE, full), dropped)
		c.add("refused a moment ago", p.in(p.src, refused, true), dropped)
		if each > 1 {
			c.add("not drawn", notDrawn(each), p.in(p.src, full, false), count(Masqueraded+p.suffix), accept())
		}
		c.add("too many connections", p.note(unix.NFT_DYNSET_OP_ADD, counted, &expr.Connlimit{Count: connections, Flags: expr.NFT_CONNLIMIT_F_INV}),
			p.note(unix.NFT_DYNSET_OP_UPDATE, full), p.note(unix.NFT_DYNSET_OP_UPDATE, refused), dropped)
		c.add("fewer connections", p.in(p.src, full, true), p.note(deleteElement, full))
	}
	c.add("from a client", count(Masqueraded+p.suffix), accept())
	return c
}

// deleteElement is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h.
const deleteElement = 2

// note adds, updates or deletes the element of a set that is the packet's source, and goes on if the
// state of the element says so.
func (p protocol) note(operation uint32, s set, state ...expr.Any) []expr.Any {
	return []expr.Any{
		p.load(p.src, register),
		&expr.Dynset{SrcRegKey: register, SetName: s.name, Operation: operation, Exprs: state},
	}
}

// notDrawn matches all packets but one in so many, at random.
func notDrawn(each uint32) []expr.Any {
	return []expr.Any{
		&expr.Numgen{Register: register, Modulus: each, Type: unix.NFT_NG_RANDOM},
		compare(expr.CmpOpNeq, make([]byte, 4)),
	}
}

// AtLimit returns the clients, sorted, that were refused a connection within a time, less than an hour.
func (g *Gateway) AtLimit(ctx context.Context, within time.Duration) ([]netip.Addr, error) {
	sets, err := g.readSets(ctx)
	if err != nil {
		return nil, err
	}
	var clients []netip.Addr
	for _, s := range sets {
		if !slices.ContainsFunc(protocols, func(p protocol) bool { return s.Name == fullSet+p.suffix }) {
			continue
		}
		elements, err := g.readElements(ctx, s.Name)
		if err != nil {
			return nil, err
		}
		for _, e := range elements {
			if a, ok := netip.AddrFromSlice(e.Key); ok && fullFor-e.Expires < within {
				clients = append(clients, a)
			}
		}
	}
	slices.SortFunc(clients, netip.Addr.Compare)
	return clients, nil
}

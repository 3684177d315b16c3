package ruleset

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
)

// LoadBalancer is what the table of a gateway machine does with addresses of Services: it sends each new connection to one of the endpoints. The kernel does the rest of
// the connection by itself.
type LoadBalancer struct {
	// Addresses are those of Services. Nothing else that runs on the machine is reached by them.
	Addresses []netip.Addr
	Frontends []Frontend
	LoadBalancerShape
}

// Frontend is a port at an address of a Service.
type Frontend struct {
	Address netip.Addr
	Port
	// Endpoints are of the family of the address. Where there are none, clients are refused.
	Endpoints []netip.AddrPort
	// Sources are the clients that are let in, sorted and without overlaps; nil is all.
	Sources []netipx.IPRange
	// Affinity is for how long after its last connection a client gets the same endpoint again, if that is there still; 0 if any will do.
	Affinity time.Duration
}

// LoadBalancerShape is what the rules of a LoadBalancer depend on. As long as it stays, only elements of sets change.
type LoadBalancerShape struct {
	// Most is the number of endpoints that a frontend may have, at least that of each one. Affinities are the times of all that have one, sorted.
	Most       int
	Affinities []time.Duration
	// Masquerade translates the source of connections to one of the machine's own addresses, so that answers come by it. Otherwise the endpoints' routes must do so.
	Masquerade bool
	// Refuse refuses clients at ports that no Service has, instead of dropping their packets.
	Refuse bool
}

// leastShape is the smallest LoadBalancerShape.Most: it seldom changes.
const leastShape = 32

// With returns the shape that a frontend needs, too.
func (s LoadBalancerShape) With(f Frontend) LoadBalancerShape {
	for s.Most = max(s.Most, leastShape); s.Most < len(f.Endpoints); {
		s.Most *= 2
	}
	if i, ok := slices.BinarySearch(s.Affinities, f.Affinity); f.Affinity > 0 && !ok {
		s.Affinities = slices.Insert(slices.Clone(s.Affinities), i, f.Affinity)
	}
	return s
}

// Equal says whether two shapes have the same rules.
func (s LoadBalancerShape) Equal(o LoadBalancerShape) bool {
	return s.Most == o.Most && slices.Equal(s.Affinities, o.Affinities) && s.Masquerade == o.Masquerade && s.Refuse == o.Refuse
}

// Counters of the table of a gateway machine, beside NoService.
const (
	// NotAllowed counts packets of clients that a Service doesn't let in.
	NotAllowed = "not_allowed"
	// NoEndpoint counts packets to Services without endpoints.
	NoEndpoint = "no_endpoint"
)

// Names of the sets and maps of a gateway machine.
const (
	addressesSet = "addresses"
	frontendsMap = "frontends" // to what becomes of a packet that begins a connection
	chooseMap    = "choose"    // to the chain that chooses among so many endpoints
	endpointsMap = "endpoints" // of a frontend, by their places or numbers
	numbersMap   = "numbers"   // of endpoints, by their places, where clients get the same one again
	stickyMap    = "sticky"    // to the number of the endpoint that a client of a frontend gets again
	sourcesSet   = "sources"
)

// mostSticky is how many clients of a family the machine remembers, in up to 40 MiB. What comes beyond is served, and forgotten.
const mostSticky = 1 << 18

// frontend is the key of a frontend in words of rules.
const frontend = "$ip daddr . meta l4proto . th dport"

// Ruleset returns the table, of the family inet.
//
//	guard        when connections are known, and before addresses are translated: only ports of Services let clients in
//	  to         a packet to an address of a Service that doesn't belong to a connection
//	  from       the client must be one that the Service lets in
//	  refuse     no endpoint is there
//	balance      sends a connection on; local does so with those of the machine itself
//	  one_of_N   to one of N endpoints
//	  again_T_N  to the endpoint that the client had within the last T, else to one of N
//	leave        before others translate sources
//
// The number of a client's endpoint goes from rule to rule in the packet's priority (SO_PRIORITY): of all that belongs to a packet it is what others need least. nft(8) of
// Debian 12 aborts where a rule finds the number and uses it at once.
func (l LoadBalancer) Ruleset() dataplane.Ruleset {
	guard := base("guard", "filter", "prerouting", dataplane.HookDestinationNAT-10)
	guard.Add("a connection that is known", "ct state established,related accept")
	balance, local := base("balance", "nat", "prerouting", dataplane.HookDestinationNAT), base("local", "nat", "output", dataplane.HookDestinationNAT)
	refuse := dataplane.Chain{Name: "refuse"}
	refuse.Add("TCP", "meta l4proto tcp reject with tcp reset")
	refuse.Add("others", "reject")
	var r dataplane.Ruleset
	for _, f := range families {
		r.Counters = append(r.Counters, f.Named(NoService), f.Named(NotAllowed), f.Named(NoEndpoint))
		r.Sets = append(r.Sets, l.sets(f)...)
		r.Chains = append(r.Chains, l.guard(f)...)
		r.Chains = append(r.Chains, l.choices(f)...)
		f.rule(&guard, "$f", "meta nfproto $f goto to_$f")
		for _, c := range []*dataplane.Chain{&balance, &local} {
			f.rule(c, "a connection to a Service", "meta nfproto $f "+frontend+" vmap @%s_$f", chooseMap)
		}
	}
	r.Chains = append(r.Chains, guard, refuse, balance, local)
	leave := base("leave", "nat", "postrouting", dataplane.HookSourceNAT-1)
	of := fmt.Sprintf("ct mark & %#x %#[1]x ", dataplane.MarkBalanced)
	if len(l.Affinities) > 0 {
		leave.Add("the number of an endpoint", of+"meta priority set 0")
	}
	if l.Masquerade {
		leave.Add("a connection to a Service", of+"masquerade")
	}
	r.Chains = append(r.Chains, leave)
	return r
}

// sets are those of a family.
func (l LoadBalancer) sets(f family) []dataplane.Set {
	key, endpoint := f.addr+" . inet_proto . inet_service", f.addr+" . inet_service"
	all := []dataplane.Set{
		f.set(addressesSet, l.Addresses), f.toNode(),
		{Name: f.Named(frontendsMap), Key: key, Value: "verdict"},
		{Name: f.Named(chooseMap), Key: key, Value: "verdict"},
		{Name: f.Named(endpointsMap), Key: key + " . mark", Value: endpoint},
		{Name: f.Named(sourcesSet), Key: key + " . " + f.addr, Interval: true},
	}
	if len(l.Affinities) > 0 {
		all = append(all, dataplane.Set{Name: f.Named(numbersMap), Key: key + " . mark", Value: "mark"},
			dataplane.Set{Name: f.Named(stickyMap), Key: f.addr + " . " + key, Value: "mark", Timeout: l.Affinities[len(l.Affinities)-1], Size: mostSticky})
	}
	place := map[string]int{}
	for i, s := range all {
		place[s.Name] = i
	}
	for _, at := range l.Frontends {
		if dataplane.FamilyOf(at.Address) == f.Family {
			for _, c := range at.elements() {
				s := &all[place[c.Set]]
				s.Elements = append(s.Elements, c.Add...)
			}
		}
	}
	return all
}

// guard are the chains that packets pass before they are translated.
func (l LoadBalancer) guard(f family) []dataplane.Chain {
	to, from, refuse := dataplane.Chain{Name: f.Named("to")}, dataplane.Chain{Name: f.Named("from")}, dataplane.Chain{Name: f.Named("refuse")}
	f.rule(&to, "to another address", "$ip daddr != @%s_$f accept", addressesSet)
	f.rule(&to, "of no connection: the machine would reset it", "ct state invalid drop")
	f.rule(&to, "a port of a Service", frontend+" vmap @%s_$f", frontendsMap)
	f.rule(&to, "a ping, an error, or a neighbour", "meta l4proto $ping $icmp type @%s_$f accept", toNodeSet)
	f.rule(&to, "no Service", "counter name %s_$f", NoService)
	if l.Refuse {
		to.Add("no Service", "goto refuse")
	} else {
		to.Add("no Service", "drop")
	}
	f.rule(&from, "a client that is let in", frontend+" . $ip saddr @%s_$f accept", sourcesSet)
	f.rule(&from, "another client", "counter name %s_$f drop", NotAllowed)
	f.rule(&refuse, "no endpoint", "counter name %s_$f goto refuse", NoEndpoint)
	return []dataplane.Chain{to, from, refuse}
}

// choices are the chains that choose an endpoint.
func (l LoadBalancer) choices(f family) (all []dataplane.Chain) {
	balanced := fmt.Sprintf("ct mark set ct mark & %#x | %#x", ^uint32(dataplane.MarkBalanced), dataplane.MarkBalanced)
	const client, numbered = "$ip saddr . " + frontend, frontend + " . meta priority"
	for n := 1; n <= l.Most; n++ {
		place := fmt.Sprintf("%s . numgen random mod %d", frontend, n)
		one := dataplane.Chain{Name: f.choice(n, 0)}
		one.Add("a connection to a Service", balanced)
		f.rule(&one, "an endpoint", "dnat $ip addr . port to %s map @%s_$f", place, endpointsMap)
		all = append(all, one)
		for _, a := range l.Affinities {
			again := dataplane.Chain{Name: f.choice(n, a)}
			again.Add("a connection to a Service", balanced)
			again.Add("no number", "meta priority set 0")
			f.rule(&again, "a client that was here before", "meta priority set %s map @%s_$f", client, stickyMap)
			f.rule(&again, "its time begins anew", "meta priority != 0 update @%s_$f { %s timeout %s : meta priority }", stickyMap, client, a)
			f.rule(&again, "its endpoint is there still", "dnat $ip addr . port to %s map @%s_$f", numbered, endpointsMap)
			f.rule(&again, "its endpoint has gone", "delete @%s_$f { %s : meta priority }", stickyMap, client)
			f.rule(&again, "another endpoint", "meta priority set %s map @%s_$f", place, numbersMap)
			f.rule(&again, "the client is remembered", "add @%s_$f { %s timeout %s : meta priority }", stickyMap, client, a)
			f.rule(&again, "an endpoint", "dnat $ip addr . port to %s map @%s_$f", numbered, endpointsMap)
			all = append(all, again)
		}
	}
	return all
}

// choice is the name of the chain that chooses one of n endpoints, the same one again for a client with the affinity.
func (f family) choice(n int, affinity time.Duration) string {
	if affinity == 0 {
		return f.Named(fmt.Sprint("one_of_", n))
	}
	return f.Named(fmt.Sprint("again_", affinity, "_", n))
}

// key is the frontend in sets.
func (at Frontend) key() []byte {
	key := append(at.Address.AsSlice(), at.Protocol, 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(key, at.Port.Port), 0, 0)
}

// elements are those of a frontend, in the sets of the table.
func (at Frontend) elements() []dataplane.SetChange {
	f := familyOf(dataplane.FamilyOf(at.Address))
	key := string(at.key())
	verdict := "accept"
	switch {
	case len(at.Endpoints) == 0:
		verdict = "goto " + f.Named("refuse")
	case at.Sources != nil:
		verdict = "goto " + f.Named("from")
	}
	changes := []dataplane.SetChange{{Set: f.Named(frontendsMap), Add: []dataplane.Element{{Key: key, Value: verdict}}}}
	if len(at.Endpoints) == 0 {
		return changes
	}
	endpoints, numbers := dataplane.SetChange{Set: f.Named(endpointsMap)}, dataplane.SetChange{Set: f.Named(numbersMap)}
	number := at.numbers()
	for i, e := range at.Endpoints {
		place := native(uint32(i))
		if at.Affinity > 0 {
			numbers.Add = append(numbers.Add, dataplane.Element{Key: key + place, Value: native(number[i])})
			place = native(number[i])
		}
		value := append(binary.BigEndian.AppendUint16(e.Addr().AsSlice(), e.Port()), 0, 0)
		endpoints.Add = append(endpoints.Add, dataplane.Element{Key: key + place, Value: string(value)})
	}
	sources := dataplane.SetChange{Set: f.Named(sourcesSet)}
	for _, r := range f.ranges(at.Sources) {
		sources.Add = append(sources.Add, dataplane.Element{Key: key + dataplane.KeyOf(r.From()), Last: key + dataplane.KeyOf(r.To())})
	}
	return append(changes, dataplane.SetChange{
		Set: f.Named(chooseMap), Add: []dataplane.Element{{Key: key, Value: "goto " + f.choice(len(at.Endpoints), at.Affinity)}},
	}, endpoints, numbers, sources)
}

// numbers are those of the endpoints, which stay the same while others come and go, and aren't zero.
func (at Frontend) numbers() []uint32 {
	all := make([]uint32, len(at.Endpoints))
	for i, e := range at.Endpoints {
		h := fnv.New32a()
		_, _ = h.Write(e.Addr().AsSlice())
		_, _ = h.Write(binary.BigEndian.AppendUint16(nil, e.Port()))
		all[i] = max(1, h.Sum32())
		for slices.Contains(all[:i], all[i]) { // once in 100,000 Services of 300 endpoints
			all[i]++
		}
	}
	return all
}

func native(n uint32) string { return string(binary.NativeEndian.AppendUint32(nil, n)) }

// Change returns the changes of sets that make a frontend another one of the same address, protocol and port. Nil is one that isn't there. Endpoints that stay keep
// their places if they have them in both.
func Change(before, after *Frontend) []dataplane.SetChange {
	changes := map[string]*dataplane.SetChange{}
	at := func(set string) *dataplane.SetChange {
		if changes[set] == nil {
			changes[set] = &dataplane.SetChange{Set: set}
		}
		return changes[set]
	}
	is := map[dataplane.Element]string{}
	if before != nil {
		for _, c := range before.elements() {
			for _, e := range c.Add {
				is[e] = c.Set
			}
		}
	}
	if after != nil {
		for _, c := range after.elements() {
			for _, e := range c.Add {
				if is[e] == c.Set {
					delete(is, e)
				} else {
					at(c.Set).Add = append(at(c.Set).Add, e)
				}
			}
		}
	}
	for e, set := range is {
		at(set).Remove = append(at(set).Remove, e)
	}
	var all []dataplane.SetChange
	for _, c := range changes {
		all = append(all, *c)
	}
	slices.SortFunc(all, func(a, b dataplane.SetChange) int { return cmp.Compare(a.Set, b.Set) })
	return all
}

// ChangeAddresses returns the changes of sets that remove addresses from those of Services, and add others.
func ChangeAddresses(remove, add []netip.Addr) (all []dataplane.SetChange) {
	for _, f := range families {
		if c := (dataplane.SetChange{Set: f.Named(addressesSet), Remove: f.set("", remove).Elements, Add: f.set("", add).Elements}); len(c.Remove)+len(c.Add) > 0 {
			all = append(all, c)
		}
	}
	return all
}

// Sticky is the map of the endpoints that clients get again, in the table of a gateway machine.
func Sticky(f dataplane.Family) string { return f.Named(stickyMap) }

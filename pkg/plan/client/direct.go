package client

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// RouterState is the state of a router to which a client sends directly.
type RouterState uint8

// The states of routers.
const (
	// RouterLive takes flows.
	RouterLive RouterState = iota + 1
	// RouterDraining takes no new flow, and keeps its flows.
	RouterDraining
	// RouterDead doesn't answer, and loses its flows to live routers.
	RouterDead
)

// Router is a router of an Egress at one of its addresses.
type Router struct {
	Addr  netip.Addr
	State RouterState
	// Pod is its UID and Name its name, empty if they aren't known.
	Pod  types.UID
	Name string
}

// RoutersOf returns the routers that the EndpointSlices of an Egress's Service list, sorted, each
// address once. A router that isn't ready, or that ends, is draining. There are no more of a family than
// shares, those first that take flows: each client has a tunnel to all of them.
func RoutersOf(lists []*discoveryv1.EndpointSlice) []Router {
	var all []Router
	for _, list := range lists {
		for _, e := range list.Endpoints {
			state := RouterLive
			if ready := e.Conditions.Ready; ready != nil && !*ready {
				state = RouterDraining
			}
			var pod corev1.ObjectReference
			if e.TargetRef != nil {
				pod = *e.TargetRef
			}
			for _, text := range e.Addresses {
				if a, err := netip.ParseAddr(text); err == nil && a.IsGlobalUnicast() {
					all = append(all, Router{a.Unmap(), state, pod.UID, pod.Name})
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b Router) int { return cmp.Or(cmp.Compare(a.State, b.State), a.Addr.Compare(b.Addr)) })
	listed, used := map[netip.Addr]bool{}, map[dataplane.Family]int{}
	all = slices.DeleteFunc(all, func(r Router) bool {
		if listed[r.Addr] { // while an endpoint moves from one slice to another it may be in both
			return true
		}
		f := dataplane.FamilyOf(r.Addr)
		listed[r.Addr] = true
		used[f]++
		return used[f] > groupBuckets
	})
	slices.SortFunc(all, func(a, b Router) int { return a.Addr.Compare(b.Addr) })
	return all
}

// withoutStrays leaves out the routers that are outside of the cluster and inside a destination of another
// Egress. Anybody who may write EndpointSlices in the namespace of one Egress can list such addresses,
// and packets to a tunnel's end take no tunnel.
func withoutStrays(egresses []Egress) (kept []Egress, strays []Conflict) {
	var inCluster []netip.Prefix
	for _, e := range egresses {
		inCluster = append(inCluster, e.inCluster()...)
	}
	// Private ones inside of a destination that isn't take no tunnel anyway.
	captures := func(e Egress, a netip.Prefix) bool {
		return prefixes.Within(a, prefixes.Private(e.Destinations)) || !prefixes.Within(a, dataplane.PrivateRanges) && prefixes.Within(a, e.Destinations)
	}
	kept = slices.Clone(egresses)
	for i := range kept {
		kept[i].Routers = slices.DeleteFunc(slices.Clone(kept[i].Routers), func(r Router) bool {
			a := netip.PrefixFrom(r.Addr, r.Addr.BitLen())
			if prefixes.Within(a, inCluster) {
				return false
			}
			for j, other := range egresses {
				if i != j && !kept[i].same(other) && captures(other, a) {
					strays = append(strays, Conflict{Dst: a, Winner: other.String(), Loser: kept[i].Name, Router: true})
					return true
				}
			}
			return false
		})
	}
	slices.SortStableFunc(strays, func(a, b Conflict) int { return cmp.Or(strings.Compare(a.Loser, b.Loser), a.Dst.Compare(b.Dst)) })
	return kept, slices.Compact(strays)
}

// groupBuckets is how many shares a group has.
const groupBuckets = 128

// Group has the routers that take and keep the flows of an Egress in one family or, for a
// while after the peering has changed, its Service, too.
type Group struct {
	ID     uint32
	Family dataplane.Family
	Egress string
	// Direct says that the routers take flows; otherwise the Service does, the only member.
	Direct bool
	// Members take flows. Draining are routers that only keep their flows. Former are the addresses that
	// keep flows from before the peering changed. All are sorted.
	Members, Draining, Former []netip.Addr
	// Dead are routers that lose their flows, if there is a member to take them.
	Dead []netip.Addr
	// Source is the client's own address, Protocol the mark of its objects; Idle see Client.
	Source   netip.Addr
	Protocol int
	Idle     time.Duration
}

// groupName tells groups of a client apart.
type groupName struct {
	way string
	dataplane.Family
}

// groupIDs returns the IDs of the groups of Egresses, which are sorted.
func groupIDs(egresses []Egress) map[groupName]uint32 {
	ids := map[groupName]uint32{}
	taken := map[uint32]bool{}
	for _, e := range egresses {
		if !e.grouped() {
			continue
		}
		for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
			id := dataplane.NexthopGroupOf(e.way(), f, 0)
			for attempt := 1; taken[id]; attempt++ {
				id = dataplane.NexthopGroupOf(e.way(), f, attempt)
			}
			ids[groupName{e.way(), f}], taken[id] = id, true
		}
	}
	return ids
}

// routers returns the addresses in the family of an Egress's routers in some states.
func (c inFamily) routers(e *Egress, states ...RouterState) []netip.Addr {
	var all []netip.Addr
	for _, r := range e.Routers {
		if c.has(r.Addr) && slices.Contains(states, r.State) {
			all = append(all, r.Addr)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return all
}

// grouped says whether flows go by a group.
func (e *Egress) grouped() bool { return e.Direct || e.Switched }

func (c inFamily) groupsOf(egresses []Egress) []Group {
	var all []Group
	for i := range egresses {
		if e := &egresses[i]; e.grouped() {
			all = append(all, c.groupOf(e))
		}
	}
	return all
}

func (c inFamily) groupOf(e *Egress) Group {
	g := Group{
		ID: c.groups[groupName{e.way(), c.Family}], Family: c.Family, Egress: e.Name, Direct: e.Direct,
		Source: c.own, Protocol: c.Protocol, Idle: c.Idle,
	}
	if !e.Direct {
		g.Members, g.Former = c.service(e), c.routers(e, RouterLive, RouterDraining)
		return g
	}
	g.Members, g.Draining, g.Dead = c.routers(e, RouterLive), c.routers(e, RouterDraining), c.routers(e, RouterDead)
	if e.Switched {
		g.Former = c.service(e)
	}
	return g
}

// Seed is a number, not 0, by which the groups of one client differ from those of others: without the
// source among the hashed fields, all clients would choose the same router for a destination.
func (g Group) Seed() uint32 {
	h := fnv.New32a()
	h.Write(g.Source.AsSlice())
	return max(h.Sum32(), 1)
}

// open says whether a group has a member when the tunnels to some routers exist.
func (s State) open(group uint32, links map[netip.Addr]int) bool {
	return slices.ContainsFunc(s.Groups, func(g Group) bool {
		return g.ID == group && slices.ContainsFunc(g.Members, func(a netip.Addr) bool { return links[a] != 0 })
	})
}

// NexthopsBy are the nexthop objects, and the groups of them, when the tunnels to some routers
// exist. A group without a member isn't there.
func (s State) NexthopsBy(links map[netip.Addr]int) (nexthops []dataplane.Nexthop, groups []dataplane.NexthopGroup) {
	for _, g := range s.Groups {
		group := dataplane.NexthopGroup{ID: g.ID, Buckets: groupBuckets, Turn: g.Seed(), Idle: g.Idle, Protocol: g.Protocol}
		for _, a := range g.Members {
			if link := links[a]; link != 0 {
				n := g.nexthopBy(link)
				nexthops = append(nexthops, n)
				group.Members = append(group.Members, dataplane.NexthopMember{ID: n.ID, Weight: 1})
			}
		}
		if len(group.Members) > 0 {
			slices.SortFunc(group.Members, dataplane.CompareMembers)
			groups = append(groups, group)
		}
	}
	return nexthops, groups
}

// keepers returns the groups of the routers that keep their flows, by the links of the tunnels to them.
func (s State) keepers(links map[netip.Addr]int) map[int]Group {
	groups := map[int]Group{}
	for _, g := range s.Groups {
		for _, a := range g.keeping() {
			if link := links[a]; link != 0 {
				groups[link] = g
			}
		}
	}
	return groups
}

// KeepingBy are, by their IDs, the nexthop objects of the routers that keep their flows, when the tunnels to some routers
// exist.
func (s State) KeepingBy(links map[netip.Addr]int) map[uint32]dataplane.Nexthop {
	nexthops := map[uint32]dataplane.Nexthop{}
	for link, g := range s.keepers(links) {
		n := g.nexthopBy(link)
		nexthops[n.ID] = n
	}
	return nexthops
}

// nexthopBy is the nexthop object of a router to which a link leads.
func (g Group) nexthopBy(link int) dataplane.Nexthop {
	return dataplane.Nexthop{ID: dataplane.NexthopOf(link), Family: g.Family, Link: link, Protocol: g.Protocol}
}

// PinRoutesBy are the routes that pins lead to, each in the table of its link, and tables are all
// tables of links to some peers.
func (s State) PinRoutesBy(links map[netip.Addr]int) (routes []dataplane.Route, tables []int) {
	for _, link := range links {
		tables = append(tables, dataplane.TableOf(link))
	}
	slices.Sort(tables)
	for link, g := range s.keepers(links) {
		routes = append(routes, dataplane.Route{
			Table: dataplane.TableOf(link), Dst: netip.PrefixFrom(g.Source, 0).Masked(), Link: link, Source: g.Source, Protocol: g.Protocol,
		})
	}
	slices.SortFunc(routes, dataplane.CompareRoutes)
	return routes, tables
}

// keeping returns the routers that keep their flows. Flows of dead routers stay, too, when no router takes
// flows: if all are silent, the network is the likely cause, and the flows go on after it is back.
func (g Group) keeping() []netip.Addr {
	all := slices.Concat(g.Members, g.Draining, g.Former)
	if g.Direct && len(g.Members) == 0 {
		all = append(all, g.Dead...)
	}
	return all
}

// Routers are those of a group that is direct, whatever their state.
func (g Group) Routers() []netip.Addr {
	if !g.Direct {
		return nil
	}
	return slices.Concat(g.Members, g.Draining, g.Dead)
}

// Package client derives, from the Egresses that a pod uses, what there should be in the pod's network
// namespace, and what its node keeps of its packets.
//
// It must not know what routers make of these packets. Its words are:
//
//	peer      an address of an Egress's Service, to which packets are sent unless the Egress is direct
//	direct    packets are sent to the routers themselves, by a group of nexthop objects: Members take flows, others keep those that they have
//	switched  direct since a moment ago, or not any more: flows stay where they are
//	closed    nothing is sent to a destination: its routes make it unreachable, or lead into a sink
//	sink      a link by which packets get lost, for destinations to which answers must find a route; see dataplane.MetricSink
//	claim     a destination, and the Egress that gets its packets
//	stray     a router that isn't used, since its address is in a destination of another Egress
//	pin       a rule that keeps the flow of one socket with the router that it has
package client

import (
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/prefixes"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Client is a pod that uses Egresses.
type Client struct {
	// Address is the pod's own. In a family that it doesn't have, nothing is made.
	Address ipam.Address
	// Link is the name of the pod's link to the node, Index its index and MTU its MTU.
	Link  string
	Index int
	MTU   int
	// ContainerID and Link identify the link to coild, Wired says that it has made it.
	ContainerID string
	Wired       bool
	// Port is the UDP port of FoU, Protocol the mark of routes and rules.
	Port     uint16
	Protocol int
	// Idle is the time after which the packets of a socket that has sent nothing for so long may go by another
	// router, of an Egress that is direct.
	Idle time.Duration
	// Egresses are those that the annotations name, and one for each policy that selects the pod. Those of policies are in the
	// order of their precedence.
	Egresses []Egress
	// Stale says that sockets may go by routes from before a change of which it isn't known how it
	// ended.
	Stale bool
}

// Egress is an Egress as a client uses it. One that several policies let the client use is there for each of them, with the
// same routers and tunnels.
type Egress struct {
	// Name is namespace/name; empty of an Egress of which only the kernel knows that its destinations are closed.
	Name string
	// Policy is the policy that lets the client use it; empty if an annotation does.
	Policy       string
	Destinations []netip.Prefix
	// Open says that packets to the destinations leave as those of other pods do while nothing can forward them, where they
	// would be unreachable otherwise.
	Open bool
	// InCluster are ranges that no Egress captures.
	InCluster []netip.Prefix
	// Peers are the addresses of the Service, to which packets are sent unless Direct. In a family
	// without one, the destinations are unreachable.
	Peers ipam.Address
	// Direct sends to the routers themselves. In a family without a live one, the destinations
	// are unreachable.
	Direct  bool
	Routers []Router
	// Blocks are the AddressBlocks of the floating addresses, nil if the Egress has no such addresses. Block is that of the address by
	// which the client leaves: packets go to the router that has it, and nowhere while none has.
	Blocks []string
	Block  string
	// OfRouters are the floating addresses of the routers, nil if they have none. Packets go to routers that have one.
	OfRouters []OfRouter
	// Others are addresses of routers that don't have the client's floating address now. They had it, or have it before the client knows: packets
	// that they send are taken.
	Others []netip.Addr
	// Left are addresses that the Service or routers had until a moment ago: packets that they still send
	// are taken.
	Left []netip.Addr
	// Switched says that it was the other way round before: flows stay where they are.
	Switched bool
	// SourcePortAuto lets the kernel choose the UDP source port of each flow.
	SourcePortAuto bool
	// OriginatingOnly leaves connections from the destinations to the way they came.
	OriginatingOnly bool
}

// OfRouter is a floating address of a router: its AddressBlock, and the name of the router that takes it for its own.
type OfRouter struct{ Block, Router string }

// State has the objects that a client's network namespace should have; the zero value has
// none.
type State struct {
	// Tunnels are one for each peer and router, sorted by it.
	Tunnels []dataplane.Tunnel
	// Groups are those of the routers of Egresses that are direct or have switched, one for each family.
	Groups []Group
	// Rules are in the order of their evaluation.
	Rules []dataplane.Rule
	// Routes are sorted. Each destination has one by its tunnel and one that makes it
	// unreachable without; with OriginatingOnly one between these, by which packets get lost.
	Routes []Route
	// Filter is nil without Egresses.
	Filter *ruleset.Client
	// Conflicts are destinations that several Egresses claim.
	Conflicts []Conflict
}

// Route is a route in a client. If Peer is valid it leads into the tunnel to that,
// whose link is known only when it is made. If Nexthop is set it leads to that group, as soon as
// that has a member. If Sink is set it leads to the link by which packets of its family get lost.
type Route struct {
	dataplane.Route
	Peer netip.Addr
	Sink bool
}

// Conflict is a destination that two Egresses of a client claim; Winner has it.
type Conflict struct {
	Dst           netip.Prefix
	Winner, Loser string
	// Router says that Loser has it as the address of a router.
	Router bool
}

// FamiliesOf returns the families that tunnels are needed in.
func FamiliesOf(tunnels []dataplane.Tunnel) []dataplane.Family {
	return familiesOf(tunnels, func(t dataplane.Tunnel, f dataplane.Family) bool { return dataplane.FamilyOf(t.Remote) == f })
}

// Sinks are the families in which packets must get lost.
func (s State) Sinks() []dataplane.Family {
	return familiesOf(s.Routes, func(r Route, f dataplane.Family) bool { return r.Sink && dataplane.FamilyOf(r.Dst.Addr()) == f })
}

// familiesOf returns the families that one of some things is of.
func familiesOf[T any](all []T, is func(T, dataplane.Family) bool) []dataplane.Family {
	return slices.DeleteFunc([]dataplane.Family{dataplane.IPv4, dataplane.IPv6}, func(f dataplane.Family) bool {
		return !slices.ContainsFunc(all, func(x T) bool { return is(x, f) })
	})
}

// Closed are the routes that need no tunnel: with them alone, each destination is
// unreachable, or packets there get lost, and nothing else is.
func (s State) Closed(sinks map[dataplane.Family]int) []dataplane.Route {
	return s.By(nil, sinks)
}

// By are the routes when the tunnels to some peers exist, with the indexes of their links, and of those
// by which packets get lost.
func (s State) By(links map[netip.Addr]int, sinks map[dataplane.Family]int) []dataplane.Route {
	var routes []dataplane.Route
	for _, r := range s.Routes {
		leads := true
		switch {
		case r.Sink:
			r.Link, leads = sinks[dataplane.FamilyOf(r.Dst.Addr())]
		case r.Peer.IsValid():
			r.Link, leads = links[r.Peer]
		case r.Nexthop != 0:
			leads = s.open(r.Nexthop, links)
		}
		if leads {
			routes = append(routes, r.Route)
		}
	}
	return routes
}

// StateOf returns the objects that a client needs. The longest prefix decides which Egress a packet
// takes. Of several Egresses with one prefix it is the first by name of those that annotations name, else that of the first policy.
func StateOf(c Client) State {
	var s State
	if len(c.Egresses) == 0 {
		return s
	}
	uses, strays := withoutStrays(byPrecedence(c.Egresses))
	claims, conflicts := claimsOf(uses)
	s.Conflicts = append(conflicts, strays...)
	marked := originating(claims)
	egresses := onceEach(uses)
	groups := groupIDs(egresses)
	var sources []netipx.IPRange
	var addressless []Route
	for _, family := range []inFamily{{Family: dataplane.IPv4, own: c.Address.IPv4}, {Family: dataplane.IPv6, own: c.Address.IPv6}} {
		family.Client, family.groups = c, groups
		if !family.own.IsValid() {
			// These routes aren't made: the filter alone keeps the destinations closed, whatever address the pod got by other
			// means, as by SLAAC.
			addressless = append(addressless, family.routes(claims, family.spared(uses, nil))...)
			continue
		}
		s.Tunnels = append(s.Tunnels, family.tunnels(egresses)...)
		s.Groups = append(s.Groups, family.groupsOf(egresses)...)
		s.Routes = append(s.Routes, family.routes(claims, family.spared(uses, s.Tunnels))...)
		s.Rules = append(s.Rules, family.rules(len(marked) > 0)...)
		for _, r := range marked {
			if family.has(r.From()) {
				sources = append(sources, r)
			}
		}
	}
	slices.SortFunc(s.Tunnels, func(a, b dataplane.Tunnel) int { return a.Remote.Compare(b.Remote) })
	slices.SortFunc(s.Routes, func(a, b Route) int { return dataplane.CompareRoutes(a.Route, b.Route) })
	s.Filter = filterOf(c, egresses, slices.Concat(s.Routes, addressless), sources)
	return s
}

// inCluster returns the ranges that no Egress captures. Everything can't be in the cluster: that would
// switch all Egresses off.
func (e Egress) inCluster() []netip.Prefix {
	var all []netip.Prefix
	for _, p := range e.InCluster {
		if p = p.Masked(); p.IsValid() && p.Bits() > 0 {
			all = append(all, p)
		}
	}
	return all
}

// spared returns the ranges of the cluster that rules don't spare already. No rule spares the private ones inside
// of a private destination; of these the Egress that has it knows best.
func (e Egress) spared() []netip.Prefix {
	var private prefixSet
	private.add(prefixes.Private(e.Destinations)...)
	return slices.DeleteFunc(e.inCluster(), func(p netip.Prefix) bool {
		return prefixes.Within(p, dataplane.PrivateRanges) && !private.LookupPrefix(p)
	})
}

// inFamily is a client in one address family, in which it has the address own.
type inFamily struct {
	Client
	own netip.Addr
	dataplane.Family
	groups map[groupName]uint32
}

func (c inFamily) has(a netip.Addr) bool { return dataplane.FamilyOf(a) == c.Family }

// remotes returns the addresses to which packets of an Egress are sent.
func (c inFamily) remotes(e *Egress) []netip.Addr {
	if e.grouped() {
		g := c.groupOf(e)
		return slices.Concat(g.keeping(), g.Dead)
	}
	return c.service(e)
}

// service returns the address of an Egress's Service, if it has one in the family.
func (c inFamily) service(e *Egress) []netip.Addr {
	return slices.DeleteFunc(e.Peers.Addrs(), func(a netip.Addr) bool { return !c.has(a) })
}

// forwards says whether there is something to which packets of an Egress can be sent.
func (c inFamily) forwards(e *Egress) bool {
	if e.Direct {
		return len(c.routers(e, RouterLive)) > 0
	}
	return len(c.service(e)) > 0
}

func (c inFamily) tunnels(egresses []Egress) []dataplane.Tunnel {
	var all []dataplane.Tunnel
	for i := range egresses {
		for _, remote := range c.remotes(&egresses[i]) {
			if slices.ContainsFunc(all, func(t dataplane.Tunnel) bool { return t.Remote == remote }) {
				continue
			}
			t := dataplane.Tunnel{Local: c.own, Remote: remote, Port: c.Port, SourcePort: c.Port, MTU: dataplane.TunnelMTU(c.Family, c.MTU)}
			if egresses[i].SourcePortAuto {
				t.SourcePort = 0
			}
			all = append(all, t)
		}
	}
	return all
}

// spared are the ranges whose packets take none of the tunnels: those of the cluster, and the tunnels' own ends.
func (c inFamily) spared(egresses []Egress, tunnels []dataplane.Tunnel) []netip.Prefix {
	var all []netip.Prefix
	for _, e := range egresses {
		all = append(all, e.spared()...)
	}
	for _, t := range tunnels {
		all = append(all, netip.PrefixFrom(t.Remote, t.Remote.BitLen()))
	}
	all = slices.DeleteFunc(all, func(p netip.Prefix) bool { return !c.has(p.Addr()) })
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

func (c inFamily) routes(claims []claim, spared []netip.Prefix) []Route {
	var routes []Route
	for _, p := range spared {
		for _, table := range []int{dataplane.TableNarrow, dataplane.TableWide} {
			routes = append(routes, Route{Route: dataplane.Route{Table: table, Dst: p, Type: dataplane.Throw, Protocol: c.Protocol}})
		}
	}
	for _, d := range claims {
		// A private range of the cluster is asked for by a longer prefix, a public one by none.
		if !c.has(d.Addr()) || slices.ContainsFunc(spared, func(r netip.Prefix) bool {
			return r == d.Prefix || prefixes.Within(d.Prefix, []netip.Prefix{r}) && !prefixes.Within(r, dataplane.PrivateRanges)
		}) {
			continue
		}
		route := dataplane.Route{Table: dataplane.TableWide, Dst: d.Prefix, Protocol: c.Protocol}
		if prefixes.Within(d.Prefix, dataplane.PrivateRanges) {
			route.Table = dataplane.TableNarrow
		}
		if d.egress.Open && !c.forwards(d.egress) {
			// A route, so that no shorter prefix decides.
			route.Type = dataplane.Throw
			routes = append(routes, Route{Route: route})
			continue
		}
		closed := route
		closed.Type, closed.Metric = dataplane.Unreachable, dataplane.MetricUnreachable
		routes = append(routes, Route{Route: closed})
		route.Source = c.own // routers take only packets from the address of the tunnel's end
		if d.egress.OriginatingOnly {
			sink := route
			sink.Metric = dataplane.MetricSink
			routes = append(routes, Route{Route: sink, Sink: true})
		}
		if d.egress.grouped() {
			route.Nexthop = c.groups[groupName{d.egress.way(), c.Family}]
			routes = append(routes, Route{Route: route})
			continue
		}
		for _, peer := range c.service(d.egress) {
			routes = append(routes, Route{Route: route, Peer: peer})
		}
	}
	return routes
}

func (c inFamily) rules(marked bool) []dataplane.Rule {
	var rules []dataplane.Rule
	add := func(r dataplane.Rule) {
		r.Family, r.Protocol = c.Family, c.Protocol
		rules = append(rules, r)
	}
	if marked {
		add(dataplane.Rule{Priority: dataplane.PriorityOriginating, Mark: dataplane.MarkOriginating, Mask: dataplane.MarkOriginating, Table: dataplane.TableMain})
	}
	for _, p := range dataplane.LinkLocalRanges {
		if c.has(p.Addr()) {
			add(dataplane.Rule{Priority: dataplane.PriorityLinkLocal, To: p, Table: dataplane.TableMain})
		}
	}
	add(dataplane.Rule{Priority: dataplane.PriorityNarrow, Table: dataplane.TableNarrow})
	priority := dataplane.PriorityPrivate
	for _, p := range dataplane.PrivateRanges {
		if c.has(p.Addr()) {
			add(dataplane.Rule{Priority: priority, To: p, Table: dataplane.TableMain})
			priority++
		}
	}
	add(dataplane.Rule{Priority: dataplane.PriorityWide, Table: dataplane.TableWide})
	return rules
}

// originating returns the addresses of destinations whose Egress captures only connections that the client
// opens, sorted and without overlaps: the longest prefix decides whose an address is.
func originating(claims []claim) []netipx.IPRange {
	by := map[netip.Prefix]bool{}
	for _, c := range claims {
		by[c.Prefix] = c.egress.OriginatingOnly
	}
	return chosen(by)
}

// Package gateway derives what a router of an Egress should have for its clients, and has the words by which a
// router says how much it uses of that.
//
// It knows what clients send, by package client. It must not know how routers are deployed.
package gateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/client"
	"github.com/coil-net/coil/pkg/plan/prefixes"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Config has the facts that a router knows of itself.
type Config struct {
	// Pod is the name of its pod, in the namespace of its Egress.
	Pod string
	// Addresses are the router's own, at most one of each family.
	Addresses []netip.Addr
	// Transits are the addresses that the router's node translates to its own, as far as it is ready for that; at most one of each family.
	Transits []netip.Addr
	// Uplink is the name of the link to everything; UplinkIndex and MTU are its.
	Uplink      string
	UplinkIndex int
	MTU         int
	// Port is the UDP port of FoU.
	Port uint16
	// Probers are the addresses that ask at the TCP port HealthPort how the router is.
	Probers    []netip.Addr
	HealthPort uint16
	// Ports are the TCP ports at which the router tells of itself. AlsoAskers may ask there
	// beside Probers, the cluster and addresses that are routed nowhere but at home.
	Ports      []uint16
	AlsoAskers []netip.Prefix
	// SourcePortAuto lets the kernel choose source ports whatever the Egress says.
	SourcePortAuto bool
	// MaxConnections is how many connections the router can track, 0 if that isn't known.
	MaxConnections int
	// Over are the clients, sorted, that have more connections than one may have.
	Over []netip.Addr
}

// Pod is a pod that uses a router, with one of its addresses.
type Pod struct {
	Addr            netip.Addr
	Namespace, Name string
	UID             types.UID
}

// State has the objects that a router should have.
type State struct {
	Config
	// Pods are the pods that may send, sorted by address. Two of them have one address for as
	// long as its old pod is listed beside the new one.
	Pods []Pod
	// Tunnels lead to the addresses of the pods, one to each.
	Tunnels []dataplane.Tunnel
	// Destinations are the ranges that clients may reach, sorted and without overlaps.
	Destinations []netip.Prefix
	// Askers may ask at Ports.
	Askers []netip.Prefix
	// MaxPerClient is how many connections one address of a client may have, 0 any number.
	MaxPerClient int
	// Floating is how clients leave by floating addresses; nil if they leave by the router's.
	Floating *ruleset.GatewayFloating
}

// The parts of what a router has that one address of a client may take unless its Egress says more:
// of the connections that it can track, and of its ports towards one destination.
const (
	clientConnections = 8
	clientPorts       = 4
)

// maxPerClient is how many connections one address of a client of an Egress may have in a router
// that can track so many, 0 if that isn't known.
func maxPerClient(egress *v2.Egress, tracked int) int {
	if most := egress.Spec.MaxConnectionsPerClient; most != nil {
		return max(0, int(*most))
	}
	ports := SourcePorts / clientPorts
	if tracked == 0 {
		return ports
	}
	return max(1, min(ports, tracked/clientConnections))
}

// sharedRange is between private and public addresses (RFC 6598); some clusters give it to pods.
var sharedRange = netip.MustParsePrefix("100.64.0.0/10")

// askers returns the addresses that may ask a router of an Egress at Ports, as for its metrics. Private addresses are among them, because not every
// network plugin says which ones its nodes and pods have.
func askers(cfg Config, egress *v2.Egress) []netip.Prefix {
	all := slices.Concat(dataplane.PrivateRanges, dataplane.LinkLocalRanges, []netip.Prefix{sharedRange}, cfg.AlsoAskers, prefixes.Valid(egress.Status.InClusterCIDRs))
	for _, a := range cfg.Probers {
		all = append(all, netip.PrefixFrom(a, a.BitLen()))
	}
	return prefixes.Aggregate(all)
}

// StateOf returns what a router of an Egress should have for the clients that the
// EndpointSlices list. Addresses of a family that the router doesn't have are left out. An
// address is a client's as long as anybody claims it, so that a pod that leaves never takes the
// address from one that came. skipped names endpoints and destinations that can't be
// understood; they cost nobody else anything.
func StateOf(cfg Config, egress *v2.Egress, lists []*discoveryv1.EndpointSlice) (g State, skipped []string) {
	g.Config, g.Askers, g.MaxPerClient = cfg, askers(cfg, egress), maxPerClient(egress, cfg.MaxConnections)
	own := make(map[dataplane.Family]netip.Addr, len(cfg.Addresses))
	for _, a := range cfg.Addresses {
		own[dataplane.FamilyOf(a)] = a
	}
	for _, d := range egress.Spec.Destinations {
		if _, err := netip.ParsePrefix(d); err != nil {
			skipped = append(skipped, "destination "+d)
		}
	}
	g.Destinations = forwarded(egress, own)
	var uses []use
	for _, list := range lists {
		u, err := useOf(egress, list)
		if err != nil {
			skipped = append(skipped, fmt.Sprintf("%s: %v", list.Name, err))
			continue
		}
		for _, e := range list.Endpoints {
			pods, bad := podsOf(e, own)
			u.pods = append(u.pods, pods...)
			for _, b := range bad {
				skipped = append(skipped, list.Name+": "+b)
			}
		}
		uses, g.Pods = append(uses, u), append(g.Pods, u.pods...)
	}
	g.Floating = floatingOf(cfg, egress, own, uses)
	slices.SortFunc(g.Pods, func(a, b Pod) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	g.Pods = slices.Compact(g.Pods)
	slices.Sort(skipped)

	port := cfg.Port
	if cfg.SourcePortAuto || egress.Spec.FouSourcePortAuto {
		port = 0
	}
	for i, p := range g.Pods {
		if i > 0 && g.Pods[i-1].Addr == p.Addr {
			last := &g.Tunnels[len(g.Tunnels)-1]
			if alias := last.Alias + owners + string(p.UID); len(alias) <= maxAlias {
				last.Alias = alias
			}
			continue
		}
		f := dataplane.FamilyOf(p.Addr)
		g.Tunnels = append(g.Tunnels, dataplane.Tunnel{
			Local: own[f], Remote: p.Addr, SourcePort: port, Port: cfg.Port, MTU: dataplane.TunnelMTU(f, cfg.MTU), Alias: string(p.UID),
		})
	}
	return g, skipped
}

// forwarded are the addresses to which a router with some addresses of its own forwards, without
// overlaps: those for which a client of the Egress alone takes the tunnel. A client may send others
// into it all the same, and a router reaches hosts in the cluster, or on its link, as itself.
func forwarded(egress *v2.Egress, own map[dataplane.Family]netip.Addr) []netip.Prefix {
	pod := client.Client{
		Address:  ipam.Address{IPv4: own[dataplane.IPv4], IPv6: own[dataplane.IPv6]},
		Egresses: []client.Egress{client.EgressOf(egress, nil)},
	}
	var all []netip.Prefix
	for _, r := range client.StateOf(pod).Filter.Destinations {
		if own[dataplane.FamilyOf(r.From())].IsValid() {
			all = append(all, r.Prefixes()...)
		}
	}
	return all
}

// The alias of a tunnel's link has the UIDs of its pods, so that a router that starts again
// knows whose connections there are.
const (
	owners   = ","
	maxAlias = 255 // bytes, as long as IFALIASZ of linux/if.h lets it be
)

// podsOf returns the pod of an endpoint with each of its addresses.
func podsOf(e discoveryv1.Endpoint, own map[dataplane.Family]netip.Addr) (pods []Pod, bad []string) {
	if e.Conditions.Ready != nil && !*e.Conditions.Ready {
		return nil, nil
	}
	for _, text := range e.Addresses {
		a, err := netip.ParseAddr(text)
		mine := own[dataplane.FamilyOf(a)]
		switch {
		case err != nil, e.TargetRef == nil, !a.IsGlobalUnicast(), a == mine:
			bad = append(bad, text)
		case mine.IsValid():
			pods = append(pods, Pod{a, e.TargetRef.Namespace, e.TargetRef.Name, e.TargetRef.UID})
		}
	}
	return pods, bad
}

// icmp is the protocol number of ICMP.
var icmp = map[dataplane.Family]uint8{dataplane.IPv4: 1, dataplane.IPv6: 58}

// Routes returns the routes to the clients that have a tunnel, and the rules that lead to them: for packets
// that come in by the uplink, and for the router's own ICMP, which answers clients' echo requests.
// The outer packets of tunnels are the router's own, too, and must not take these routes. A packet is forwarded
// only with the mark that the filter sets: without the filter, none is.
func (g State) Routes(links map[netip.Addr]dataplane.TunnelLink) ([]dataplane.Route, []dataplane.Rule) {
	routes := make([]dataplane.Route, 0, len(g.Tunnels))
	for _, t := range g.Tunnels {
		if l, ok := links[t.Remote]; ok {
			routes = append(routes, dataplane.Route{
				Table: dataplane.TableWide, Dst: netip.PrefixFrom(t.Remote, t.Remote.BitLen()), Link: l.Index,
				Scope: dataplane.LinkScope, Protocol: dataplane.ProtocolNode,
			})
		}
	}
	slices.SortFunc(routes, dataplane.CompareRoutes)
	var rules []dataplane.Rule
	for _, a := range g.Addresses {
		r := dataplane.Rule{Family: dataplane.FamilyOf(a), Priority: dataplane.PriorityWide, Table: dataplane.TableWide, Protocol: dataplane.ProtocolNode}
		forwarded, own := r, r
		forwarded.Input, forwarded.Mark, forwarded.Mask = g.Uplink, dataplane.MarkFiltered, dataplane.MarkFiltered
		own.Input, own.Transport = dataplane.Loopback, icmp[r.Family]
		rules = append(rules, forwarded, own)
		r.Table = dataplane.TableMain
		filtered, sent, others := r, r, r
		filtered.Priority, filtered.Mark, filtered.Mask = dataplane.PriorityFiltered, dataplane.MarkFiltered, dataplane.MarkFiltered
		sent.Priority, sent.Input = dataplane.PriorityOwn, dataplane.Loopback
		others.Priority, others.Table, others.Blackhole = dataplane.PriorityUnfiltered, 0, true
		rules = append(rules, filtered, sent, others)
	}
	return routes, rules
}

// Filter returns the rules of nftables; clients without a tunnel may not send.
func (g State) Filter(links map[netip.Addr]dataplane.TunnelLink) ruleset.Gateway {
	rules := ruleset.Gateway{
		Uplink: g.UplinkIndex, MTU: g.MTU, Addresses: g.Addresses, Port: g.Port, Probers: g.Probers, HealthPort: g.HealthPort, Ports: g.Ports, Askers: g.Askers, Destinations: g.Destinations,
		Clients: make([]ruleset.GatewayClient, 0, len(g.Tunnels)), MaxPerClient: g.MaxPerClient, Over: g.Over, Floating: g.Floating, Transits: g.Transits,
	}
	for _, t := range g.Tunnels {
		if l, ok := links[t.Remote]; ok {
			rules.Clients = append(rules.Clients, ruleset.GatewayClient{Addr: t.Remote, Link: l.Index})
		}
	}
	return rules
}

// Equal says whether two gateways need the same of the kernel.
func (g State) Equal(o State) bool {
	return g.MaxPerClient == o.MaxPerClient && g.Floating.Equal(o.Floating) && slices.Equal(g.Transits, o.Transits) && slices.Equal(g.Over, o.Over) && g.Uplink == o.Uplink && g.UplinkIndex == o.UplinkIndex && g.MTU == o.MTU && g.Port == o.Port && slices.Equal(g.Addresses, o.Addresses) &&
		slices.Equal(g.Destinations, o.Destinations) && slices.Equal(g.Askers, o.Askers) && slices.Equal(g.Tunnels, o.Tunnels)
}

// Change has the tunnels that differ between two states of a router.
type Change struct {
	// Came and Left are tunnels; no tunnel of Came leads where one was.
	Came, Left []dataplane.Tunnel
}

// Since returns the changes since before, in tunnels alone: destinations, floating addresses, askers, the limit of
// connections, clients over it, and which pod has an address, may have changed, too. It returns false if tunnels that stay must change, if
// the router's own network has changed, or if nothing has.
func (g State) Since(before State) (c Change, ok bool) {
	if g.Uplink != before.Uplink || g.UplinkIndex != before.UplinkIndex || g.MTU != before.MTU || !slices.Equal(g.Addresses, before.Addresses) {
		return c, false
	}
	old, now := before.Tunnels, g.Tunnels // both are sorted
	for len(old) > 0 || len(now) > 0 {
		switch {
		case len(old) == 0 || len(now) > 0 && now[0].Remote.Less(old[0].Remote):
			c.Came, now = append(c.Came, now[0]), now[1:]
		case len(now) == 0 || old[0].Remote.Less(now[0].Remote):
			c.Left, old = append(c.Left, old[0]), old[1:]
		case old[0] != now[0]:
			return Change{}, false
		default:
			old, now = old[1:], now[1:]
		}
	}
	return c, g.MaxPerClient != before.MaxPerClient || !g.Floating.Equal(before.Floating) || !slices.Equal(g.Transits, before.Transits) || !slices.Equal(g.Over, before.Over) || !slices.Equal(g.Pods, before.Pods) || !slices.Equal(g.Destinations, before.Destinations) || !slices.Equal(g.Askers, before.Askers)
}

// Released returns the addresses of before that nobody has now, or that came to a pod that
// didn't have them: the connections that are left are their old pods'.
func (g State) Released(before State) []netip.Addr {
	var released []netip.Addr
	old, now := before.Pods, g.Pods // both are sorted by address
	for len(old) > 0 {
		addr := old[0].Addr
		for len(now) > 0 && now[0].Addr.Less(addr) {
			now = now[1:]
		}
		var had, has []Pod
		had, old = claimants(old, addr)
		has, now = claimants(now, addr)
		came := slices.ContainsFunc(has, func(p Pod) bool {
			return !slices.ContainsFunc(had, func(o Pod) bool { return o.UID == p.UID })
		})
		if came || len(has) == 0 {
			released = append(released, addr)
		}
	}
	return released
}

// claimants returns the first of the pods, as many as have the address, and the others.
func claimants(pods []Pod, addr netip.Addr) (with, others []Pod) {
	n := 0
	for n < len(pods) && pods[n].Addr == addr {
		n++
	}
	return pods[:n], pods[n:]
}

// Inherited returns the addresses of tunnels that a program before this one made for pods
// that aren't those of g: the connections that are left are theirs. A link without an alias
// says nothing.
func (g State) Inherited(links map[netip.Addr]dataplane.TunnelLink) []netip.Addr {
	now := claims(g.Pods)
	var inherited []netip.Addr
	for addr, l := range links {
		before := strings.Split(l.Alias, owners)
		came := slices.ContainsFunc(now[addr], func(uid types.UID) bool { return !slices.Contains(before, string(uid)) })
		if len(now[addr]) == 0 || l.Alias != "" && came {
			inherited = append(inherited, addr)
		}
	}
	slices.SortFunc(inherited, netip.Addr.Compare)
	return inherited
}

// claims returns the UIDs of the pods that have each address.
func claims(pods []Pod) map[netip.Addr][]types.UID {
	uids := make(map[netip.Addr][]types.UID, len(pods))
	for _, p := range pods {
		uids[p.Addr] = append(uids[p.Addr], p.UID)
	}
	return uids
}

package dataplane

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
)

// RouteType is the type of a route (rtm_type).
type RouteType uint8

// The types of routes that Coil makes.
const (
	// Unicast sends to Link, by Gateway if there is one.
	Unicast RouteType = iota
	// Unreachable answers with ICMP "host unreachable".
	Unreachable
	// Throw makes the lookup go on with the next rule.
	Throw
	// Local delivers to this host, by the link lo. The kernel sends from such an address only if the route is in the table RT_TABLE_LOCAL.
	Local
)

// Scope is the scope of a route (rtm_scope).
type Scope uint8

// The scopes of routes that Coil makes. IPv6 has no scopes: it reads back as Universe.
const (
	Universe Scope = iota
	LinkScope
	HostScope // of Local routes
)

// Route is one route in one table. It is identified by table, destination and metric.
type Route struct {
	Table int
	Dst   netip.Prefix
	Type  RouteType
	// Link is the interface index; 0 for none, or for any by which Gateway is reached.
	Link int
	// Nexthop is the ID of a nexthop object, in place of Link and Gateway; 0 for none.
	Nexthop uint32
	// Gateway is the next hop; the zero Addr for none.
	Gateway netip.Addr
	// OnLink takes the gateway as reachable on the link.
	OnLink bool
	// Source is the preferred source address; the zero Addr for none.
	Source netip.Addr
	Scope  Scope
	// Protocol is the owner's mark (rtm_protocol).
	Protocol int
	// Metric is the priority among routes to the same destination. IPv6's default
	// of 1024 reads back as 0.
	Metric int
}

// String prints the route as "ip route" does, with the table at the end.
func (r Route) String() string {
	var w Words
	w.Add(r.Type == Unreachable, "unreachable")
	w.Add(r.Type == Throw, "throw")
	w.Add(r.Type == Local, "local")
	w.Add(true, "%s", r.Dst)
	w.Add(r.Gateway.IsValid(), "via %s", r.Gateway)
	w.Add(r.Link != 0, "dev %d", r.Link)
	w.Add(r.Nexthop != 0, "nhid %#x", r.Nexthop)
	w.Add(true, "proto %d", r.Protocol)
	w.Add(r.Scope == LinkScope, "scope link")
	w.Add(r.Scope == HostScope, "scope host")
	w.Add(r.Source.IsValid(), "src %s", r.Source)
	w.Add(r.Metric != 0, "metric %d", r.Metric)
	w.Add(r.OnLink, "onlink")
	w.Add(true, "table %d", r.Table)
	return w.String()
}

// Words are the parts of a text as iproute2 prints it.
type Words []string

// Add adds a part if the object has it.
func (w *Words) Add(has bool, format string, args ...any) {
	if has {
		*w = append(*w, fmt.Sprintf(format, args...))
	}
}

// String joins the parts.
func (w Words) String() string { return strings.Join(w, " ") }

// CompareRoutes orders routes by table, destination, metric.
func CompareRoutes(a, b Route) int {
	return cmp.Or(
		cmp.Compare(a.Table, b.Table),
		a.Dst.Addr().Compare(b.Dst.Addr()),
		cmp.Compare(a.Dst.Bits(), b.Dst.Bits()),
		cmp.Compare(a.Metric, b.Metric),
	)
}

// Canonical returns the route as it is read back from the kernel.
func (r Route) Canonical() Route {
	if FamilyOf(r.Dst.Addr()) == IPv4 {
		return r
	}
	r.Scope = Universe
	if r.Metric == defaultIPv6Metric {
		r.Metric = 0
	}
	if r.Type == Unreachable || r.Type == Throw {
		// The kernel puts IPv6 routes without a link on lo.
		r.Link = 0
	}
	return r
}

// defaultIPv6Metric is the metric that the kernel gives an IPv6 route without one
// (IP6_RT_PRIO_USER, linux/ipv6_route.h).
const defaultIPv6Metric = 1024

// Family is an address family.
type Family uint8

// The address families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// String is "IPv4" or "IPv6".
func (f Family) String() string { return fmt.Sprintf("IPv%d", uint8(f)) }

// FamilyOf returns the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// Loopback is the link by which, to rules, packets come that a namespace sends itself.
const Loopback = "lo"

// Rule is a routing policy rule that looks up a table.
type Rule struct {
	Family   Family
	Priority int
	// From and To restrict the rule to sources and destinations; the zero Prefix is all.
	From, To netip.Prefix
	// Input restricts the rule to packets that come in by a link of this name, or with
	// Loopback to packets that are sent here; empty is all.
	Input string
	// Output restricts the rule to packets of sockets that are bound to a link of this name;
	// empty is all.
	Output string
	// Mark restricts the rule to packets that have, of the bits of Mask, those of this mark; a
	// Mask of 0 is all packets.
	Mark, Mask uint32
	// Transport restricts the rule to a protocol on top of IP, such as 6 for TCP, and
	// SourcePort and DestinationPort to its ports; 0 is all. The kernel refuses 65535. Unless
	// Input is Loopback, it then dissects every packet that comes in.
	Transport                   uint8
	SourcePort, DestinationPort uint16
	// Table is where the route is looked up; without a route the next rule decides.
	Table int
	// Blackhole drops packets without a word, in place of Table.
	Blackhole bool
	// Protocol is the owner's mark (FRA_PROTOCOL).
	Protocol int
}

// String prints the rule as "ip rule" does.
func (r Rule) String() string {
	var w Words
	w.Add(true, "%d:", r.Priority)
	w.Add(!r.From.IsValid(), "from all")
	w.Add(r.From.IsValid(), "from %s", r.From)
	w.Add(r.To.IsValid(), "to %s", r.To)
	w.Add(r.Mask != 0, "fwmark %#x/%#x", r.Mark, r.Mask)
	w.Add(r.Input != "", "iif %s", r.Input)
	w.Add(r.Output != "", "oif %s", r.Output)
	w.Add(r.Transport != 0, "ipproto %d", r.Transport)
	w.Add(r.SourcePort != 0, "sport %d", r.SourcePort)
	w.Add(r.DestinationPort != 0, "dport %d", r.DestinationPort)
	w.Add(!r.Blackhole, "lookup %d", r.Table)
	w.Add(r.Blackhole, "blackhole")
	w.Add(true, "proto %d (%s)", r.Protocol, r.Family)
	return w.String()
}

// Result counts the changes of a Sync; the zero Result means that everything was
// as wanted.
type Result struct {
	Added, Replaced, Deleted int
}

// Plus returns the sum of two results.
func (r Result) Plus(o Result) Result {
	return Result{r.Added + o.Added, r.Replaced + o.Replaced, r.Deleted + o.Deleted}
}

// Changed says whether anything was written.
func (r Result) Changed() bool { return r != Result{} }

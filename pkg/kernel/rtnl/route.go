package rtnl

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Route is a route that was found in the kernel.
type Route struct {
	dataplane.Route
	// Exact says that the value describes the route completely. Otherwise it has
	// something that Coil's routes don't have, such as several next hops.
	Exact bool
	// Local says that the route delivers to this host.
	Local bool
	// Links are the indexes of the links that packets may leave by, of all next hops.
	Links []int
	// odd says that the route is selected by more than table, destination and metric.
	odd  bool
	body []byte
}

// SameIdentity says whether the kernel takes the two for the same route, so
// that one can only replace the other.
func (r Route) SameIdentity(o dataplane.Route) bool {
	return !r.odd && r.Table == o.Table && r.Dst == o.Dst && r.Metric == o.Metric
}

// AddRoute asks for a new route; ErrExist if there is one of the same table,
// destination and metric, whoever made it.
func AddRoute(r dataplane.Route) Request {
	return routeRequest(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r, "add")
}

// ReplaceRoute asks for a route in place of the one of the same table,
// destination and metric, whoever made it, with no moment in between.
func ReplaceRoute(r dataplane.Route) Request {
	return routeRequest(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, r, "replace")
}

// DelRoute asks for the removal of a route of the same table, destination,
// metric and protocol; ErrNotExist. Its link, gateway and source don't matter.
func DelRoute(r dataplane.Route) Request {
	var e encoder
	// RT_SCOPE_NOWHERE and RTN_UNSPEC match any scope and any type.
	e.routeHeader(r, unix.RT_SCOPE_NOWHERE, unix.RTN_UNSPEC, 0)
	return Request{unix.RTM_DELROUTE, 0, e.b, func() string { return "route del " + r.String() }}
}

// DelFoundRoute asks for the removal of exactly the route that was found.
func DelFoundRoute(r Route) Request {
	return Request{unix.RTM_DELROUTE, 0, r.body, func() string { return "route del " + r.String() }}
}

func routeRequest(kind, flags uint16, r dataplane.Route, verb string) Request {
	var e encoder
	types := map[dataplane.RouteType]uint8{
		dataplane.Unicast:     unix.RTN_UNICAST,
		dataplane.Unreachable: unix.RTN_UNREACHABLE,
		dataplane.Throw:       unix.RTN_THROW,
	}
	var rtFlags uint32
	if r.OnLink {
		rtFlags = unix.RTNH_F_ONLINK
	}
	e.routeHeader(r, kernelScope(r.Scope), types[r.Type], rtFlags)
	if r.Link != 0 {
		e.attrU32(unix.RTA_OIF, uint32(r.Link))
	}
	if r.Gateway.IsValid() {
		e.attrAddr(unix.RTA_GATEWAY, r.Gateway)
	}
	if r.Nexthop != 0 {
		e.attrU32(rtaNexthop, r.Nexthop)
	}
	if r.Source.IsValid() {
		e.attrAddr(unix.RTA_PREFSRC, r.Source)
	}
	return Request{kind, flags, e.b, func() string { return "route " + verb + " " + r.String() }}
}

// routeHeader appends a struct rtmsg and the identity of a route.
func (e *encoder) routeHeader(r dataplane.Route, scope, kind uint8, flags uint32) {
	e.u8(family(r.Dst.Addr()), uint8(r.Dst.Bits()), 0, 0)
	e.u8(smallTable(r.Table), uint8(r.Protocol), scope, kind)
	e.u32(flags)
	e.attrAddr(unix.RTA_DST, r.Dst.Addr())
	e.attrU32(unix.RTA_TABLE, uint32(r.Table))
	if r.Metric != 0 {
		e.attrU32(unix.RTA_PRIORITY, uint32(r.Metric))
	}
}

// smallTable is the table where the header has only 8 bits for it.
func smallTable(table int) uint8 {
	if table < 256 {
		return uint8(table)
	}
	return unix.RT_TABLE_UNSPEC
}

// Routes returns the routes of a family in a table, of one protocol, or of all
// if protocol is 0. A table that doesn't exist has none.
func (h *Handle) Routes(ctx context.Context, f dataplane.Family, table, protocol int) ([]Route, error) {
	var e encoder
	e.u8(families[f], 0, 0, 0)
	e.u8(smallTable(table), uint8(protocol), 0, 0)
	e.u32(0)
	e.attrU32(unix.RTA_TABLE, uint32(table))
	r := Request{unix.RTM_GETROUTE, 0, e.b, func() string {
		return fmt.Sprintf("route show table %d proto %d (%s)", table, protocol, f)
	}}
	routes, err := List(ctx, h, r, func(body []byte) (Route, bool, error) {
		r, cached, err := parseRoute(body)
		// The kernel filters, too, if it can.
		ok := !cached && r.Table == table && (protocol == 0 || r.Protocol == protocol)
		return r, ok && dataplane.FamilyOf(r.Dst.Addr()) == f, err
	})
	if isNoTable(err) {
		return nil, nil
	}
	return routes, err
}

// RouteTo returns the route that a packet from this host to an address takes:
// the entry of the table, with its table. A link of 0 is any, another one is a
// link that the packet must leave by. ErrNotExist if there is no route.
func (h *Handle) RouteTo(ctx context.Context, to netip.Addr, link int) (Route, error) {
	var e encoder
	e.u8(family(to), uint8(to.BitLen()), 0, 0)
	e.u8(0, 0, 0, 0)
	flags := uint32(unix.RTM_F_FIB_MATCH)
	if to.Is4() {
		// IPv6 always tells the table, and refuses the flag.
		flags |= unix.RTM_F_LOOKUP_TABLE
	}
	e.u32(flags)
	e.attrAddr(unix.RTA_DST, to)
	if link != 0 {
		e.attrU32(unix.RTA_OIF, uint32(link))
	}
	req := Request{unix.RTM_GETROUTE, 0, e.b, func() string { return fmt.Sprintf("route get fibmatch %s oif %d", to, link) }}
	var r Route
	err := h.Get(ctx, req, func(body []byte) (err error) {
		r, _, err = parseRoute(body)
		return err
	})
	return r, err
}

// Attributes of linux/rtnetlink.h that tell flows apart.
const (
	rtaProtocol        = 27
	rtaSourcePort      = 28
	rtaDestinationPort = 29
)

// LinkOf returns the index of the link by which a packet of a flow from this host leaves, which a
// bucket of a group may decide: that counts as used then. transport is TCP's or UDP's number.
// ErrNotExist if there is no route.
func (h *Handle) LinkOf(ctx context.Context, transport uint8, from, to netip.AddrPort) (int, error) {
	var e encoder
	e.u8(family(to.Addr()), uint8(to.Addr().BitLen()), uint8(from.Addr().BitLen()), 0)
	e.u8(0, 0, 0, 0)
	e.u32(0)
	e.attrAddr(unix.RTA_DST, to.Addr())
	e.attrAddr(unix.RTA_SRC, from.Addr())
	e.attr(rtaProtocol, []byte{transport})
	e.attrPort(rtaSourcePort, from.Port())
	e.attrPort(rtaDestinationPort, to.Port())
	req := Request{unix.RTM_GETROUTE, 0, e.b, func() string { return fmt.Sprintf("route get %s from %s ipproto %d", to, from, transport) }}
	var r Route
	err := h.Get(ctx, req, func(body []byte) (err error) {
		r, _, err = parseRoute(body)
		return err
	})
	if err == nil && (r.Type != dataplane.Unicast || len(r.Links) == 0) {
		err = fmt.Errorf("%s: %w", req, ErrNotExist)
	}
	if err != nil {
		return 0, err
	}
	return r.Links[0], nil
}

// linksOf reads the links of several next hops: each a struct rtnexthop with attributes.
func linksOf(hops []byte) ([]int, error) {
	var links []int
	for len(hops) >= unix.SizeofRtNexthop {
		n := int(binary.NativeEndian.Uint16(hops))
		if n < unix.SizeofRtNexthop || n > len(hops) {
			return nil, fmt.Errorf("next hop of %d bytes in %d bytes: %w", n, len(hops), errMalformed)
		}
		links = append(links, int(int32(binary.NativeEndian.Uint32(hops[4:]))))
		hops = hops[min(align(n), len(hops)):]
	}
	return links, nil
}

// hop reads an attribute about next hops. Where they are a nexthop object's, the kernel tells
// only what that says.
func (r *Route) hop(a attribute, byObject bool) (err error) {
	switch a.kind {
	case unix.RTA_OIF:
		link := int(a.u32())
		r.Links = append(r.Links, link)
		if !byObject {
			r.Link = link
		}
	case unix.RTA_GATEWAY:
		if !byObject {
			r.Gateway = a.addr()
		}
	case unix.RTA_MULTIPATH:
		r.Exact = r.Exact && byObject
		r.Links, err = linksOf(a.value)
	}
	return err
}

// parseRoute reads a struct rtmsg and its attributes. A cached route isn't an
// entry of a table, but the result of a lookup.
func parseRoute(body []byte) (r Route, cached bool, err error) {
	if len(body) < unix.SizeofRtMsg {
		return Route{}, false, fmt.Errorf("route in %d bytes: %w", len(body), errMalformed)
	}
	fam, bits, srcBits, tos := body[0], int(body[1]), body[2], body[3]
	flags := binary.NativeEndian.Uint32(body[8:])
	r.Table, r.Protocol = int(body[4]), int(body[5])
	r.Exact = true
	r.odd = tos != 0 || srcBits != 0
	r.OnLink = flags&unix.RTNH_F_ONLINK != 0
	if body[6] == unix.RT_SCOPE_LINK {
		r.Scope = dataplane.LinkScope
	}
	switch body[7] {
	case unix.RTN_UNICAST:
	case unix.RTN_UNREACHABLE:
		r.Type = dataplane.Unreachable
	case unix.RTN_THROW:
		r.Type = dataplane.Throw
	default:
		r.Exact = false
		r.Local = body[7] == unix.RTN_LOCAL
	}
	as, err := attributes(body[unix.SizeofRtMsg:])
	if err != nil {
		return Route{}, false, err
	}
	dst := netip.IPv4Unspecified()
	if fam == unix.AF_INET6 {
		dst = netip.IPv6Unspecified()
	}
	// What deletes exactly this route: its identity, next hops and source. State
	// such as RTNH_F_LINKDOWN isn't accepted back.
	e := encoder{b: append(make([]byte, 0, len(body)), body[:8]...)}
	e.u32(flags & unix.RTNH_F_ONLINK)
	byObject := false
	for a := range as {
		byObject = byObject || a.kind == rtaNexthop
	}
	for a := range as {
		switch a.kind {
		case unix.RTA_DST:
			dst = a.addr()
		case rtaNexthop:
			r.Nexthop = a.u32()
		case unix.RTA_TABLE:
			r.Table = int(a.u32())
		case unix.RTA_OIF, unix.RTA_MULTIPATH, unix.RTA_GATEWAY:
			if err := r.hop(a, byObject); err != nil {
				return Route{}, false, err
			}
			if byObject {
				continue // the kernel refuses both
			}
		case unix.RTA_PREFSRC:
			r.Source = a.addr()
		case unix.RTA_PRIORITY:
			r.Metric = int(a.u32())
		case unix.RTA_CACHEINFO, unix.RTA_PREF:
			continue
		default:
			r.Exact = false
		}
		e.attr(a.kind, a.value)
	}
	r.body = e.b
	if r.Dst = netip.PrefixFrom(dst, bits); !r.Dst.IsValid() {
		return Route{}, false, fmt.Errorf("route to %v/%d: %w", dst, bits, errMalformed)
	}
	r.Route = r.Canonical()
	return r, flags&unix.RTM_F_CLONED != 0, nil
}

package rtnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Route is a route that was found in the kernel.
type Route struct {
	dataplane.Route
	// Exact says that the value describes the route completely. Otherwise it has
	// something that Coil's routes don't have, such as several next hops.
	Exact bool
	// Links are the indexes of the links that packets may leave by, of all next hops.
	Links []int
	// Odd says that the route is selected by more than table, destination and metric. Otherwise the kernel takes all routes
	// with these three for the same one, so that one can only replace the other.
	Odd  bool
	body []byte
}

// AddRoute asks for a new route; ErrExist if there is one of the same table,
// destination and metric, whoever made it.
func AddRoute(r dataplane.Route) Request { return routeRequest(create, "add", r) }

// ReplaceRoute asks for a route in place of the one of the same table,
// destination and metric, whoever made it, with no moment in between.
func ReplaceRoute(r dataplane.Route) Request { return routeRequest(replace, "replace", r) }

// DelRoute asks for the removal of a route of the same table, destination,
// metric and protocol; ErrNotExist. Its link, gateway and source don't matter.
func DelRoute(r dataplane.Route) Request {
	header := routeHeader(r.Dst, r.Table, r.Protocol)
	header.Scope, header.Type = unix.RT_SCOPE_NOWHERE, unix.RTN_UNSPEC // any scope and any type
	return newRequest(unix.RTM_DELROUTE, 0, text("route del %s", r), header,
		address(unix.RTA_DST, r.Dst.Addr()), number(unix.RTA_TABLE, uint32(r.Table)), numberIf(unix.RTA_PRIORITY, uint32(r.Metric)))
}

// DelFoundRoute asks for the removal of exactly the route that was found.
func DelFoundRoute(r Route) Request {
	return Request{unix.RTM_DELROUTE, 0, r.body, text("route del %s", r)}
}

// routeTypes are the kernel's numbers of the types of routes.
var routeTypes = []uint8{dataplane.Unicast: unix.RTN_UNICAST, dataplane.Unreachable: unix.RTN_UNREACHABLE, dataplane.Throw: unix.RTN_THROW,
	dataplane.Local: unix.RTN_LOCAL}

func routeRequest(flags uint16, verb string, r dataplane.Route) Request {
	header := routeHeader(r.Dst, r.Table, r.Protocol)
	header.Scope, header.Type = scopes[r.Scope], routeTypes[r.Type]
	if r.OnLink {
		header.Flags = unix.RTNH_F_ONLINK
	}
	return newRequest(unix.RTM_NEWROUTE, flags, text("route %s %s", verb, r), header,
		address(unix.RTA_DST, r.Dst.Addr()), number(unix.RTA_TABLE, uint32(r.Table)), numberIf(unix.RTA_PRIORITY, uint32(r.Metric)),
		numberIf(unix.RTA_OIF, uint32(r.Link)), address(unix.RTA_GATEWAY, r.Gateway),
		numberIf(rtaNexthop, r.Nexthop), address(unix.RTA_PREFSRC, r.Source))
}

// routeHeader is the header of a message about a route, or about a rule, which has the same layout.
func routeHeader(dst netip.Prefix, table, protocol int) *nl.RtMsg {
	header := &nl.RtMsg{}
	header.Family, header.Dst_len = families[dataplane.FamilyOf(dst.Addr())], uint8(dst.Bits())
	header.Table, header.Protocol = smallTable(table), uint8(protocol)
	return header
}

// smallTable is the table where the header has only 8 bits for it.
func smallTable(table int) uint8 {
	if table < 256 {
		return uint8(table)
	}
	return unix.RT_TABLE_UNSPEC
}

// Routes returns the routes of a family in a table, or in all if that is 0, of one protocol, or
// of all if that is 0. A table that doesn't exist has none.
func (h *Handle) Routes(ctx context.Context, f dataplane.Family, table, protocol int) ([]Route, error) {
	header := routeHeader(netip.Prefix{}, table, protocol)
	header.Family, header.Dst_len = families[f], 0
	r := newRequest(unix.RTM_GETROUTE, 0, text("route show table %d proto %d (%s)", table, protocol, f), header, numberIf(unix.RTA_TABLE, uint32(table)))
	routes, err := List(ctx, h, r, func(body []byte) (Route, bool, error) {
		r, cached, err := parseRoute(body)
		// The kernel filters, too, if it can.
		ok := !cached && (table == 0 || r.Table == table) && (protocol == 0 || r.Protocol == protocol)
		return r, ok && dataplane.FamilyOf(r.Dst.Addr()) == f, err
	})
	if isNoTable(err) {
		return nil, nil
	}
	return routes, err
}

// Packet is one of which it is asked how it goes.
type Packet struct {
	To netip.Addr
	// From is its source; the zero Addr for one that this host chooses.
	From netip.Addr
	// In is the index of the link by which it came; 0 if it is this host's own. Out is that of a link that it must leave by; 0 is any.
	In, Out int
	// Mark is its mark (SO_MARK).
	Mark uint32
}

// String is as ip-route(8) has it.
func (p Packet) String() string {
	text := p.To.String()
	if p.From.IsValid() {
		text += " from " + p.From.String()
	}
	if p.In != 0 {
		text += fmt.Sprintf(" iif %d", p.In)
	}
	if p.Out != 0 {
		text += fmt.Sprintf(" oif %d", p.Out)
	}
	if p.Mark != 0 {
		text += fmt.Sprintf(" mark %#x", p.Mark)
	}
	return text
}

// RouteTo returns the route that a packet from this host to an address takes, as RouteOf. A link of 0 is any, another one is a
// link that the packet must leave by.
func (h *Handle) RouteTo(ctx context.Context, to netip.Addr, link int) (Route, error) {
	return h.RouteOf(ctx, Packet{To: to, Out: link})
}

// RouteOf returns the route that a packet takes: the entry of the table, with its table. ErrNotExist if there is no route.
func (h *Handle) RouteOf(ctx context.Context, p Packet) (Route, error) {
	header := routeHeader(netip.PrefixFrom(p.To, p.To.BitLen()), 0, 0)
	header.Flags = unix.RTM_F_FIB_MATCH
	if p.To.Is4() {
		// IPv6 always tells the table, and refuses the flag.
		header.Flags |= unix.RTM_F_LOOKUP_TABLE
	}
	if p.From.IsValid() {
		header.Src_len = uint8(p.From.BitLen())
	}
	return h.lookUp(ctx, newRequest(unix.RTM_GETROUTE, 0, text("route get fibmatch %s", p), header,
		address(unix.RTA_DST, p.To), address(unix.RTA_SRC, p.From), numberIf(unix.RTA_IIF, uint32(p.In)), numberIf(unix.RTA_OIF, uint32(p.Out)), numberIf(unix.RTA_MARK, p.Mark)))
}

// Way tells people the route that a packet takes, with the name of its link.
func (h *Handle) Way(ctx context.Context, p Packet) (string, error) {
	r, err := h.RouteOf(ctx, p)
	if errors.Is(err, ErrNotExist) {
		return "no route", nil
	}
	if err != nil {
		return "", err
	}
	text := r.String()
	if l, err := h.LinkByIndex(ctx, r.Link); err == nil {
		text += " (" + l.Name + ")"
	}
	return text, nil
}

// lookUp asks for one route.
func (h *Handle) lookUp(ctx context.Context, req Request) (r Route, err error) {
	err = h.Get(ctx, req, func(body []byte) (err error) {
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
	header := routeHeader(netip.PrefixFrom(to.Addr(), to.Addr().BitLen()), 0, 0)
	header.Src_len = uint8(from.Addr().BitLen())
	req := newRequest(unix.RTM_GETROUTE, 0, text("route get %s from %s ipproto %d", to, from, transport), header,
		address(unix.RTA_DST, to.Addr()), address(unix.RTA_SRC, from.Addr()), nl.NewRtAttr(rtaProtocol, []byte{transport}),
		nl.NewRtAttr(rtaSourcePort, nl.BEUint16Attr(from.Port())), nl.NewRtAttr(rtaDestinationPort, nl.BEUint16Attr(to.Port())))
	r, err := h.lookUp(ctx, req)
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
func (r *Route) hop(a Attribute, byObject bool) (err error) {
	switch a.Kind {
	case unix.RTA_OIF:
		link := int(a.U32())
		r.Links = append(r.Links, link)
		if !byObject {
			r.Link = link
		}
	case unix.RTA_GATEWAY:
		if !byObject {
			r.Gateway = a.Addr()
		}
	case unix.RTA_MULTIPATH:
		r.Exact = r.Exact && byObject
		r.Links, err = linksOf(a.Value)
	}
	return err
}

// parseRoute reads a struct rtmsg and its attributes, by hand: the library's reader doesn't tell which
// attributes it leaves out. A cached route isn't an entry of a table, but the result of a lookup.
func parseRoute(body []byte) (r Route, cached bool, err error) {
	b, rest, as := Cut(body, unix.SizeofRtMsg)
	header := nl.DeserializeRtMsg(b)
	r.Table, r.Protocol = int(header.Table), int(header.Protocol)
	kind := slices.Index(routeTypes, header.Type)
	r.Exact, r.Type = kind >= 0, dataplane.RouteType(max(kind, 0))
	r.Odd = header.Tos != 0 || header.Src_len != 0
	r.OnLink = header.Flags&unix.RTNH_F_ONLINK != 0
	r.Scope = dataplane.Scope(max(slices.Index(scopes, header.Scope), 0))
	dst := netip.IPv4Unspecified()
	if header.Family == unix.AF_INET6 {
		dst = netip.IPv6Unspecified()
	}
	// The body of a request that deletes exactly this route: its identity, next hops and source. State
	// such as RTNH_F_LINKDOWN isn't accepted back.
	r.body = binary.NativeEndian.AppendUint32(append(make([]byte, 0, len(body)), b[:8]...), header.Flags&unix.RTNH_F_ONLINK)
	byObject := false
	for a := range as.In(rest) {
		byObject = byObject || a.Kind == rtaNexthop
	}
	for a := range as.In(rest) {
		switch a.Kind {
		case unix.RTA_DST:
			dst = a.Addr()
		case rtaNexthop:
			r.Nexthop = a.U32()
		case unix.RTA_TABLE:
			r.Table = int(a.U32())
		case unix.RTA_OIF, unix.RTA_MULTIPATH, unix.RTA_GATEWAY:
			if err := r.hop(a, byObject); err != nil {
				return Route{}, false, err
			}
			if byObject {
				continue // the kernel refuses both
			}
		case unix.RTA_PREFSRC:
			r.Source = a.Addr()
		case unix.RTA_PRIORITY:
			r.Metric = int(a.U32())
		case unix.RTA_CACHEINFO, unix.RTA_PREF:
			continue
		default:
			r.Exact = false
		}
		r.body = AppendAttribute(r.body, a.Kind, a.Value)
	}
	if as.Err != nil {
		return Route{}, false, as.Err
	}
	if r.Dst = netip.PrefixFrom(dst, int(header.Dst_len)); !r.Dst.IsValid() {
		return Route{}, false, fmt.Errorf("route to %v/%d: %w", dst, header.Dst_len, errMalformed)
	}
	r.Route = r.Canonical()
	return r, header.Flags&unix.RTM_F_CLONED != 0, nil
}

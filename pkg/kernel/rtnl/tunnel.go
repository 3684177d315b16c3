package rtnl

import (
	"context"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// IFLA_IPTUN_ of linux/if_tunnel.h.
const (
	iptunLocal           = 2
	iptunRemote          = 3
	iptunTTL             = 4
	iptunFlags           = 8
	iptunProto           = 9
	iptunEncapType       = 15
	iptunEncapFlags      = 16
	iptunEncapSport      = 17
	iptunEncapDport      = 18
	iptunCollectMetadata = 19
)

// Values of these attributes, of linux/if_tunnel.h and linux/ip6_tunnel.h.
const (
	encapFou = 1 // TUNNEL_ENCAP_FOU
	// noEncapLimit leaves out an option that only costs 8 bytes (IP6_TNL_F_IGN_ENCAP_LIMIT).
	noEncapLimit = 1
	// settableFlags are those flags that aren't the kernel's own notes (IP6_TNL_F_CAP_).
	settableFlags = 0xffff
)

// tunnelKind is how the tunnels of one address family are made.
type tunnelKind struct {
	kind     string
	protocol uint8 // of what is inside
	// checksum makes outer UDP checksums: TUNNEL_ENCAP_FLAG_CSUM, of IPv6 _CSUM6.
	checksum uint16
}

var tunnelKinds = map[dataplane.Family]tunnelKind{
	dataplane.IPv4: {"ipip", unix.IPPROTO_IPIP, 1},
	dataplane.IPv6: {"ip6tnl", unix.IPPROTO_IPV6, 2},
}

// Tunnel is a link that puts IP into IP, as it was found in the kernel.
type Tunnel struct {
	Link
	// Spec is what Coil's tunnels differ in. An address that isn't valid is any.
	Spec dataplane.Tunnel
	// Exact says that Spec describes the tunnel completely: it has Coil's way of FoU, TTL
	// and protocol.
	Exact bool
	// Receiver takes what no tunnel of two addresses does.
	Receiver bool
}

// AddTunnel asks for a new tunnel, which is down. ErrExist if a link has the name, or a
// tunnel has the two addresses.
func AddTunnel(name string, t dataplane.Tunnel) Request {
	var e encoder
	e.ifInfo(0, 0, 0)
	e.attrString(unix.IFLA_IFNAME, name)
	e.tunnel(t)
	return Request{unix.RTM_NEWLINK, unix.NLM_F_CREATE | unix.NLM_F_EXCL, e.b, func() string {
		return fmt.Sprintf("link add %s type %s", name, t)
	}}
}

// SetTunnel asks for all of a tunnel to be as wanted, while packets go through it.
func SetTunnel(index int, t dataplane.Tunnel) Request {
	var e encoder
	e.ifInfo(index, 0, 0)
	e.tunnel(t)
	return Request{unix.RTM_NEWLINK, 0, e.b, func() string { return fmt.Sprintf("link change %d type %s", index, t) }}
}

// tunnel appends what makes a link the tunnel.
func (e *encoder) tunnel(t dataplane.Tunnel) {
	f := dataplane.FamilyOf(t.Remote)
	k := tunnelKinds[f]
	e.attrU32(unix.IFLA_MTU, uint32(t.MTU))
	e.nest(unix.IFLA_LINKINFO, func() {
		e.attrString(unix.IFLA_INFO_KIND, k.kind)
		e.nest(unix.IFLA_INFO_DATA, func() {
			e.attrAddr(iptunLocal, t.Local)
			e.attrAddr(iptunRemote, t.Remote)
			e.attr(iptunTTL, []byte{dataplane.TunnelTTL})
			e.attr(iptunProto, []byte{k.protocol})
			if f == dataplane.IPv6 {
				e.attrU32(iptunFlags, noEncapLimit)
			}
			e.attrU16(iptunEncapType, encapFou)
			e.attrU16(iptunEncapFlags, k.checksum)
			e.attrPort(iptunEncapSport, t.SourcePort)
			e.attrPort(iptunEncapDport, t.Port)
		})
	})
}

// AddReceiver asks for a link, which is down, that takes what no tunnel of two addresses
// does. ErrExist if the namespace has one of the family, of whatever name.
func AddReceiver(name string, f dataplane.Family) Request {
	var e encoder
	e.ifInfo(0, 0, 0)
	e.attrString(unix.IFLA_IFNAME, name)
	e.nest(unix.IFLA_LINKINFO, func() {
		e.attrString(unix.IFLA_INFO_KIND, tunnelKinds[f].kind)
		e.nest(unix.IFLA_INFO_DATA, func() { e.attr(iptunCollectMetadata, nil) })
	})
	return Request{unix.RTM_NEWLINK, unix.NLM_F_CREATE | unix.NLM_F_EXCL, e.b, func() string {
		return fmt.Sprintf("link add %s type %s external", name, tunnelKinds[f].kind)
	}}
}

// Tunnels returns all tunnels of a family: those of Coil's kind, whoever made them.
func (h *Handle) Tunnels(ctx context.Context, f dataplane.Family) ([]Tunnel, error) {
	kind := tunnelKinds[f].kind
	var e encoder
	e.ifInfo(0, 0, 0)
	e.nest(unix.IFLA_LINKINFO, func() { e.attrString(unix.IFLA_INFO_KIND, kind) })
	e.attrU32(unix.IFLA_EXT_MASK, filterSkipStats)
	r := Request{unix.RTM_GETLINK, 0, e.b, func() string { return "link show type " + kind }}
	return List(ctx, h, r, func(body []byte) (Tunnel, bool, error) {
		// A kernel that doesn't know the kind doesn't filter.
		l, err := parseLink(body)
		if err != nil || l.Kind != kind {
			return Tunnel{}, false, err
		}
		t, err := parseTunnel(f, l, body)
		return t, true, err
	})
}

// parseTunnel reads what is special about a link that is a tunnel.
func parseTunnel(f dataplane.Family, l Link, body []byte) (Tunnel, error) {
	k := tunnelKinds[f]
	t := Tunnel{Link: l, Spec: dataplane.Tunnel{MTU: l.MTU}}
	var encap, flags uint16
	var ttl, protocol uint8
	var options uint32
	field := func(kind uint16, value []byte) error {
		a := attribute{kind, value}
		switch kind {
		case iptunLocal:
			t.Spec.Local = a.endpoint()
		case iptunRemote:
			t.Spec.Remote = a.endpoint()
		case iptunTTL:
			ttl = a.u8()
		case iptunProto:
			protocol = a.u8()
		case iptunFlags:
			options = a.u32()
		case iptunEncapType:
			encap = a.u16()
		case iptunEncapFlags:
			flags = a.u16()
		case iptunEncapSport:
			t.Spec.SourcePort = a.port()
		case iptunEncapDport:
			t.Spec.Port = a.port()
		case iptunCollectMetadata:
			t.Receiver = true
		}
		return nil
	}
	err := EachAttribute(body[unix.SizeofIfInfomsg:], func(kind uint16, value []byte) error {
		if kind != unix.IFLA_LINKINFO {
			return nil
		}
		return EachAttribute(value, func(kind uint16, value []byte) error {
			if kind != unix.IFLA_INFO_DATA {
				return nil
			}
			return EachAttribute(value, field)
		})
	})
	// A tunnel of IPv4 never changes its protocol; that of 2.x takes any.
	anyProtocol := f == dataplane.IPv4 && protocol == 0
	t.Exact = !t.Receiver && encap == encapFou && flags == k.checksum && ttl == dataplane.TunnelTTL &&
		(protocol == k.protocol || anyProtocol) && (f == dataplane.IPv4 || options&settableFlags == noEncapLimit)
	return t, err
}

// endpoint is the address of one end of a tunnel, invalid if it is any.
func (a attribute) endpoint() netip.Addr {
	addr := a.addr()
	if addr.IsUnspecified() {
		return netip.Addr{}
	}
	return addr
}

//go:build !coil_vxlan

package rtnl

import (
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Values of these attributes, of linux/if_tunnel.h and linux/ip6_tunnel.h.
const (
	encapFou = 1 // TUNNEL_ENCAP_FOU
	// noEncapLimit leaves out an option that only costs 8 bytes (IP6_TNL_F_IGN_ENCAP_LIMIT).
	noEncapLimit = 1
	// settableFlags are those flags that aren't the kernel's own notes (IP6_TNL_F_CAP_).
	settableFlags = 0xffff
)

// way is how the tunnels of one address family are made.
type way struct {
	kind     string
	protocol uint8 // of the inner packet
	// checksum makes outer UDP checksums: TUNNEL_ENCAP_FLAG_CSUM, of IPv6 _CSUM6.
	checksum uint16
}

var ways = map[dataplane.Family]way{
	dataplane.IPv4: {"ipip", unix.IPPROTO_IPIP, 1},
	dataplane.IPv6: {"ip6tnl", unix.IPPROTO_IPV6, 2},
}

// tunnelKind is the kind of the tunnels of a family.
func tunnelKind(f dataplane.Family) string { return ways[f].kind }

// AddTunnel asks for a new tunnel, which is down. ErrExist if a link has the name, or a
// tunnel has the two addresses.
func AddTunnel(name string, t dataplane.Tunnel) Request {
	return newRequest(unix.RTM_NEWLINK, create, text("link add %s type %s", name, t), linkHeader(0, false),
		word(unix.IFLA_IFNAME, name), number(unix.IFLA_MTU, uint32(t.MTU)), tunnelInfo(t))
}

// SetTunnel asks for all of a tunnel to be as wanted, while packets go through it.
func SetTunnel(index int, t dataplane.Tunnel) Request {
	return newRequest(unix.RTM_NEWLINK, 0, text("link change %d type %s", index, t), linkHeader(index, false),
		number(unix.IFLA_MTU, uint32(t.MTU)), tunnelInfo(t))
}

// tunnelInfo has the attributes that make a link the tunnel.
func tunnelInfo(t dataplane.Tunnel) *nl.RtAttr {
	f := dataplane.FamilyOf(t.Remote)
	k := ways[f]
	return linkInfo(k.kind, nest(unix.IFLA_INFO_DATA,
		address(nl.IFLA_IPTUN_LOCAL, t.Local),
		address(nl.IFLA_IPTUN_REMOTE, t.Remote),
		nl.NewRtAttr(nl.IFLA_IPTUN_TTL, []byte{dataplane.TunnelTTL}),
		nl.NewRtAttr(nl.IFLA_IPTUN_PROTO, []byte{k.protocol}),
		when(f == dataplane.IPv6, number(nl.IFLA_IPTUN_FLAGS, noEncapLimit)),
		nl.NewRtAttr(nl.IFLA_IPTUN_ENCAP_TYPE, nl.Uint16Attr(encapFou)),
		nl.NewRtAttr(nl.IFLA_IPTUN_ENCAP_FLAGS, nl.Uint16Attr(k.checksum)),
		nl.NewRtAttr(nl.IFLA_IPTUN_ENCAP_SPORT, nl.BEUint16Attr(t.SourcePort)),
		nl.NewRtAttr(nl.IFLA_IPTUN_ENCAP_DPORT, nl.BEUint16Attr(t.Port))))
}

// AddReceiver asks for a link, which is down, that takes packets that no tunnel of two addresses
// takes. ErrExist if the namespace has one of the family, of whatever name.
func AddReceiver(name string, f dataplane.Family) Request {
	kind := tunnelKind(f)
	return newRequest(unix.RTM_NEWLINK, create, text("link add %s type %s external", name, kind), linkHeader(0, false),
		word(unix.IFLA_IFNAME, name), linkInfo(kind, nest(unix.IFLA_INFO_DATA, nl.NewRtAttr(nl.IFLA_IPTUN_COLLECT_METADATA, nil))))
}

// parseTunnel reads the attributes of a tunnel of a link that is one.
func parseTunnel(f dataplane.Family, l Link, body []byte) (Tunnel, error) {
	k := ways[f]
	t := Tunnel{Link: l, Spec: dataplane.Tunnel{MTU: l.MTU}}
	_, rest, as := Cut(body, unix.SizeofIfInfomsg)
	info := as.Find(rest, unix.IFLA_LINKINFO, unix.IFLA_INFO_DATA).Value
	t.Spec.Local = as.Find(info, nl.IFLA_IPTUN_LOCAL).endpoint()
	t.Spec.Remote = as.Find(info, nl.IFLA_IPTUN_REMOTE).endpoint()
	t.Spec.SourcePort = as.Find(info, nl.IFLA_IPTUN_ENCAP_SPORT).Port()
	t.Spec.Port = as.Find(info, nl.IFLA_IPTUN_ENCAP_DPORT).Port()
	t.Receiver = as.Find(info, nl.IFLA_IPTUN_COLLECT_METADATA).Kind != 0
	// A tunnel of IPv4 never changes its protocol; that of 2.x takes any.
	protocol := as.Find(info, nl.IFLA_IPTUN_PROTO).U8()
	anyProtocol := f == dataplane.IPv4 && protocol == 0
	t.Exact = !t.Receiver && as.Find(info, nl.IFLA_IPTUN_ENCAP_TYPE).U16() == encapFou &&
		as.Find(info, nl.IFLA_IPTUN_ENCAP_FLAGS).U16() == k.checksum && as.Find(info, nl.IFLA_IPTUN_TTL).U8() == dataplane.TunnelTTL &&
		(protocol == k.protocol || anyProtocol) &&
		(f == dataplane.IPv4 || as.Find(info, nl.IFLA_IPTUN_FLAGS).U32()&settableFlags == noEncapLimit)
	return t, as.Err
}

package nft

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Expressions of rules, named as nft(8) spells them. Each is a list: they are joined by match.

// register is the first of 16 bytes; registerAfterIndex is where the next field of a
// concatenation is after an interface's index.
const (
	register           = 1
	registerAfterIndex = unix.NFT_REG32_01
)

// match joins expressions.
func match(parts ...[]expr.Any) []expr.Any {
	var out []expr.Any
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func compare(op expr.CmpOp, data []byte) expr.Any {
	return &expr.Cmp{Op: op, Register: register, Data: data}
}

// iifnamePrefix matches what came in by links whose names begin so.
func iifnamePrefix(prefix string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register}, compare(expr.CmpOpEq, []byte(prefix))}
}

// ifIndex is an interface's index as the kernel loads it. To compare it costs less than a name,
// which is copied for each packet.
func ifIndex(index int) []byte { return binaryutil.NativeEndian.PutUint32(uint32(index)) }

func iif(op expr.CmpOp, index int) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIF, Register: register}, compare(op, ifIndex(index))}
}

// iifIn matches packets that came in by links of a set.
func iifIn(s set) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIF, Register: register}, &expr.Lookup{SourceRegister: register, SetName: s.name}}
}

func oif(op expr.CmpOp, index int) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyOIF, Register: register}, compare(op, ifIndex(index))}
}

// iifgroup matches packets that came in by a link of a group.
func iifgroup(group uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: register}, compare(expr.CmpOpEq, binaryutil.NativeEndian.PutUint32(group)),
	}
}

// sourceMissing matches packets whose source the host wouldn't reach by the link that they came
// in by: "fib saddr . iif oif missing". An address of the host itself is missing, too.
func sourceMissing() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: register, ResultOIF: true, FlagSADDR: true, FlagIIF: true, FlagPRESENT: true},
		compare(expr.CmpOpEq, make([]byte, 4)),
	}
}

// protocol is what differs between the families of addresses.
type protocol struct {
	family   dataplane.Family
	suffix   string // of names
	nfproto  byte
	size     uint32 // of an address
	header   int    // bytes before those of TCP
	src, dst uint32 // offsets in the header
	address  nftables.SetDatatype
}

var protocols = []protocol{
	{dataplane.IPv4, "_ipv4", unix.NFPROTO_IPV4, 4, 20, 12, 16, nftables.TypeIPAddr},
	{dataplane.IPv6, "_ipv6", unix.NFPROTO_IPV6, 16, 40, 8, 24, nftables.TypeIP6Addr},
}

// linkLocal are the addresses that are of one link only (RFC 4291, section 2.5.6).
var linkLocal = netip.MustParsePrefix("fe80::/10")

// unspecified is the source of who has no address.
func (p protocol) unspecified() netip.Addr {
	if p.family == dataplane.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// of matches packets of the family.
func (p protocol) of() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: register}, compare(expr.CmpOpEq, []byte{p.nfproto})}
}

func (p protocol) load(offset, to uint32) expr.Any {
	return &expr.Payload{DestRegister: to, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: p.size}
}

// in matches packets whose address at an offset is, or isn't, in a set.
func (p protocol) in(offset uint32, s set, is bool) []expr.Any {
	return []expr.Any{p.load(offset, register), &expr.Lookup{SourceRegister: register, SetName: s.name, Invert: !is}}
}

// is matches packets whose address at an offset is this one, which costs less than a set does.
func (p protocol) is(offset uint32, a netip.Addr) []expr.Any {
	return []expr.Any{p.load(offset, register), compare(expr.CmpOpEq, a.AsSlice())}
}

// from matches packets whose interface and source are, or aren't, in a set.
func (p protocol) from(s set, is bool) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIF, Register: register}, p.load(p.src, registerAfterIndex),
		&expr.Lookup{SourceRegister: register, SetName: s.name, Invert: !is},
	}
}

// within matches packets whose source is in a prefix.
func (p protocol) within(prefix netip.Prefix) []expr.Any {
	mask := make([]byte, p.size)
	for i := range prefix.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return []expr.Any{
		p.load(p.src, register),
		&expr.Bitwise{SourceRegister: register, DestRegister: register, Len: p.size, Mask: mask, Xor: make([]byte, p.size)},
		compare(expr.CmpOpEq, prefix.Masked().Addr().AsSlice()),
	}
}

func l4proto(number byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register}, compare(expr.CmpOpEq, []byte{number})}
}

// echoRequest matches what asks for an answer, echoReply the answer (RFC 792, RFC 4443).
func (p protocol) echoRequest() []expr.Any { return p.echo(8, 128) }
func (p protocol) echoReply() []expr.Any   { return p.echo(0, 129) }

func (p protocol) echo(kind, kind6 byte) []expr.Any {
	if p.family == dataplane.IPv6 {
		kind = kind6
	}
	return match(p.icmpType(), []expr.Any{compare(expr.CmpOpEq, []byte{kind})})
}

// icmp matches ICMP messages whose type is in a set.
func (p protocol) icmp(types set) []expr.Any {
	return match(p.icmpType(), []expr.Any{&expr.Lookup{SourceRegister: register, SetName: types.name}})
}

// icmpType matches ICMP messages and loads their type.
func (p protocol) icmpType() []expr.Any {
	number := byte(unix.IPPROTO_ICMP)
	if p.family == dataplane.IPv6 {
		number = unix.IPPROTO_ICMPV6
	}
	return match(l4proto(number), []expr.Any{
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1},
	})
}

// tooLarge matches what says of a packet to an address in a set that it doesn't fit the way
// there (RFC 1191, RFC 8201). The kernel then asks its tunnels whether they sent it.
func (p protocol) tooLarge(s set) []expr.Any {
	const header = 8 // of ICMP, before the packet that it is about
	number, kind := byte(unix.IPPROTO_ICMP), []byte{3, 4}
	if p.family == dataplane.IPv6 {
		number, kind = unix.IPPROTO_ICMPV6, []byte{2, 0}
	}
	load := func(offset, size uint32) expr.Any {
		return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: size}
	}
	return match(l4proto(number), []expr.Any{
		load(0, 2), compare(expr.CmpOpEq, kind),
		load(header+p.dst, p.size), &expr.Lookup{SourceRegister: register, SetName: s.name},
	})
}

// sport and dport are where the ports are in the headers of UDP and TCP.
const sport, dport = 0, 2

func udpDport(port uint16) []expr.Any { return portOf(unix.IPPROTO_UDP, dport, port) }

func tcpPort(offset uint32, port uint16) []expr.Any { return portOf(unix.IPPROTO_TCP, offset, port) }

// portOf looks at the port first: to load it from the packet costs less than to ask for the
// protocol, which few packets are left for.
func portOf(protocol byte, offset uint32, port uint16) []expr.Any {
	return match([]expr.Any{
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2},
		compare(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, port)),
	}, l4proto(protocol))
}

// bits matches if any of some bits of what the expression before loaded are set.
func bits(mask uint32) []expr.Any {
	return []expr.Any{
		&expr.Bitwise{
			SourceRegister: register, DestRegister: register, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(mask), Xor: make([]byte, 4),
		},
		compare(expr.CmpOpNeq, make([]byte, 4)),
	}
}

// ctState matches connections in any of some states.
func ctState(states uint32) []expr.Any {
	return match([]expr.Any{&expr.Ct{Key: expr.CtKeySTATE, Register: register}}, bits(states))
}

func ctMark(mask uint32) []expr.Any {
	return match([]expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: register}}, bits(mask))
}

// ctReply matches packets against the direction in which their connection was opened.
func ctReply() []expr.Any {
	const reply = 1 // IP_CT_DIR_REPLY
	return []expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: register}, compare(expr.CmpOpEq, []byte{reply})}
}

// Bits of a connection's status: IPS_CONFIRMED from when its first packet has passed, IPS_SRC_NAT
// if its source is translated.
const confirmed, sourceNAT = 1 << 3, 1 << 4

// ctTranslated matches packets of connections whose source is translated.
func ctTranslated() []expr.Any {
	return match([]expr.Any{&expr.Ct{Key: expr.CtKeySTATUS, Register: register}}, bits(sourceNAT))
}

// ctOpens matches packets that open a connection, which go to the chains of the type nat. It doesn't
// match what belongs to no connection.
func ctOpens() []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: register},
		&expr.Bitwise{
			SourceRegister: register, DestRegister: register, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(confirmed), Xor: make([]byte, 4),
		},
		compare(expr.CmpOpEq, make([]byte, 4)),
	}
}

// translate gives what opens a connection a source, with a random port.
func (p protocol) translate(source netip.Addr) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: register, Data: source.AsSlice()},
		&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(p.nfproto), RegAddrMin: register, FullyRandom: true},
	}
}

// setBits sets, in what the expression before loaded, the bits of a mask to those of a value.
func setBits(value, mask uint32) expr.Any {
	return &expr.Bitwise{
		SourceRegister: register, DestRegister: register, Len: 4,
		Mask: binaryutil.NativeEndian.PutUint32(^mask), Xor: binaryutil.NativeEndian.PutUint32(value & mask),
	}
}

func ctMarkSet(value, mask uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeyMARK, Register: register}, setBits(value, mask),
		&expr.Ct{Key: expr.CtKeyMARK, Register: register, SourceRegister: true},
	}
}

func metaMarkSet(value, mask uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register}, setBits(value, mask),
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register, SourceRegister: true},
	}
}

// mark gives packets that have none a mark.
func mark(value uint32) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: register, Data: binaryutil.NativeEndian.PutUint32(value)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: register, SourceRegister: true},
	}
}

// tcpOpens matches the first packet of each direction of a TCP connection (RFC 9293).
func tcpOpens() []expr.Any {
	const syn, rst = 2, 4
	const flags = 13 // offset in the header
	return match([]expr.Any{
		&expr.Payload{DestRegister: register, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
		&expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 1, Mask: []byte{syn | rst}, Xor: []byte{0}},
		compare(expr.CmpOpEq, []byte{syn}),
	}, l4proto(unix.IPPROTO_TCP))
}

// setMSS makes the maximum segment size of a new TCP connection what the expression before
// loaded; a smaller one stays, and none isn't added.
func setMSS() expr.Any {
	const mss = 2 // kind of option
	return &expr.Exthdr{SourceRegister: register, Type: mss, Offset: 2, Len: 2, Op: expr.ExthdrOpTcpopt}
}

// clampMSS makes segments of a new TCP connection no larger than a number of bytes.
func clampMSS(size uint16) []expr.Any {
	return []expr.Any{&expr.Immediate{Register: register, Data: binary.BigEndian.AppendUint16(nil, size)}, setMSS()}
}

// routeMSS makes segments of a new TCP connection fit the routes of their packets.
func routeMSS() []expr.Any {
	return []expr.Any{
		&expr.Rt{Register: register, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: register, DestRegister: register, Op: expr.ByteorderHton, Len: 2, Size: 2},
		setMSS(),
	}
}

// segment is the maximum segment size of TCP in packets of a link's MTU (RFC 6691).
func (p protocol) segment(mtu int) uint16 {
	const tcp = 20
	return uint16(max(0, mtu-p.header-tcp))
}

// count adds to a named counter.
func count(name string) []expr.Any {
	const counter = 1 // NFT_OBJECT_COUNTER
	return []expr.Any{&expr.Objref{Type: counter, Name: name}}
}

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

func drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

// jump goes on in a chain, and comes back from its end.
func jump(c chain) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: c.name}}
}

// back returns to the chain that a jump came from.
func back() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}} }

// goTo goes on in a chain, at whose end a packet is accepted.
func goTo(c chain) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: c.name}}
}

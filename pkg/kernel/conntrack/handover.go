package conntrack

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Attributes and values of linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h, for flows that are copied.
const (
	typeNew = unix.NFNL_SUBSYS_CTNETLINK << 8 // IPCTNL_MSG_CT_NEW

	ctaStatus  = 3
	ctaNATSrc  = 6
	ctaTimeout = 7
	ctaMark    = 8

	ctaNATProto   = 3
	ctaNATPortMin = 1
	ctaNATPortMax = 2

	ctaProtoSrcPort  = 2
	ctaProtoICMPID   = 4
	ctaProtoICMPv6ID = 7

	ctaProtoInfoTCPScaleOrig  = 2
	ctaProtoInfoTCPScaleReply = 3
	ctaProtoInfoTCPFlagsOrig  = 4
	ctaProtoInfoTCPFlagsReply = 5

	statusSeenReply = 1 << 1
	statusAssured   = 1 << 2
	statusConfirmed = 1 << 3
	statusSrcNAT    = 1 << 4
	statusDstNAT    = 1 << 5

	tcpBeLiberal = 0x08 // window tracking starts anew: ctnetlink doesn't tell of windows
)

// natAddress are the attributes with the lowest and the highest address, by family.
var natAddress = map[byte][2]uint16{unix.AF_INET: {1, 2}, unix.AF_INET6: {4, 5}}

// Flow is a flow with another source than its sender's, as one namespace has it and another one may get it. Ports are identifiers if
// the protocol is ICMP or ICMPv6, of which only echoes are flows.
type Flow struct {
	Protocol byte
	// Src sent to Dst, where it is known as Translated.
	Src, Dst, Translated netip.AddrPort
	// Timeout is when the kernel forgets the flow unless there are packets, in seconds.
	Timeout uint32
	Mark    uint32
	// TCP is of protocol TCP.
	TCP TCP
}

// TCP is what the kernel knows of a connection.
type TCP struct {
	State byte
	// Scales are those of the windows, and Flags say which options were agreed on, each in both directions.
	ScaleOrig, ScaleReply, FlagsOrig, FlagsReply byte
}

// String is such as "tcp 10.0.0.1:1024 > 192.0.2.1:443 as 198.51.100.7:1024".
func (f Flow) String() string {
	name := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_ICMPV6: "icmpv6"}[f.Protocol]
	if name == "" {
		name = fmt.Sprintf("protocol %d", f.Protocol)
	}
	return fmt.Sprintf("%s %s > %s as %s", name, f.Src, f.Dst, f.Translated)
}

// Translated calls each with the flows whose source is translated to one of the addresses, and that are of use elsewhere: both sides
// have sent (ASSURED), or it is an echo that was answered. Half-open ones aren't, since their next packet begins them anew. Flows whose
// destination is translated, too, and those of a zone other than 0 are left out.
func (t *Table) Translated(ctx context.Context, addrs []netip.Addr, each func(Flow)) error {
	wanted := make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		wanted[a] = true
	}
	// The kernel's own filter is wrong for IPv6 in Linux 6.18, so all are read.
	return t.flows(ctx, func(f flow) {
		if _, _, back := f.translated(); wanted[back] {
			if c, ok := f.copyOf(); ok {
				each(c)
			}
		}
	})
}

// copyOf returns the flow without what only its namespace knows.
func (f *flow) copyOf() (Flow, bool) {
	src, dst, back := f.translated()
	var as rtnl.Attributes
	at := func(tuple []byte, kind uint16) uint16 { return as.Find(tuple, ctaTupleProto, kind).Port() }
	from, to, known := at(f.original, ctaProtoSrcPort), f.to, at(f.reply, ctaProtoDstPort)
	lasting := f.status&statusAssured != 0
	if id, ok := echoID[f.protocol]; ok {
		if kind := as.Find(f.original, ctaTupleProto, id+1).U8(); kind != echoRequest[f.protocol] {
			return Flow{}, false
		}
		from, known = at(f.original, id), at(f.reply, id)
		to, lasting = from, f.status&statusSeenReply != 0
	}
	c := Flow{
		Protocol: f.protocol, Timeout: f.timeout, Mark: f.mark,
		Src: netip.AddrPortFrom(src, from), Dst: netip.AddrPortFrom(dst, to), Translated: netip.AddrPortFrom(back, known),
	}
	if f.protocol == unix.IPPROTO_TCP {
		c.TCP = TCP{
			State:     f.tcpState,
			ScaleOrig: as.Find(f.tcp, ctaProtoInfoTCPScaleOrig).U8(), ScaleReply: as.Find(f.tcp, ctaProtoInfoTCPScaleReply).U8(),
			FlagsOrig: as.Find(f.tcp, ctaProtoInfoTCPFlagsOrig).U8(), FlagsReply: as.Find(f.tcp, ctaProtoInfoTCPFlagsReply).U8(),
		}
	}
	alone := f.status&(statusSrcNAT|statusDstNAT) == statusSrcNAT && f.zone == nil
	return c, lasting && alone && as.Err == nil && c.valid() == nil
}

// echoID are the attributes of a tuple with the identifier of an echo, by protocol; the next attribute is the type. echoRequest and
// echoReply are types.
var (
	echoID      = map[byte]uint16{unix.IPPROTO_ICMP: ctaProtoICMPID, unix.IPPROTO_ICMPV6: ctaProtoICMPv6ID}
	echoRequest = map[byte]byte{unix.IPPROTO_ICMP: 8, unix.IPPROTO_ICMPV6: 128}
	echoReply   = map[byte]byte{unix.IPPROTO_ICMP: 0, unix.IPPROTO_ICMPV6: 129}
)

// valid says why the kernel can't have the flow.
func (f Flow) valid() error {
	family := func(a netip.AddrPort) int { return a.Addr().BitLen() }
	if !f.Src.IsValid() || family(f.Src) != family(f.Dst) || family(f.Src) != family(f.Translated) || f.Src.Addr().Is4In6() || f.Src.Addr().Zone() != "" {
		return fmt.Errorf("%s: the addresses aren't of one family", f)
	}
	v4 := f.Src.Addr().Is4()
	switch {
	case f.Protocol == unix.IPPROTO_TCP, f.Protocol == unix.IPPROTO_UDP, f.Protocol == unix.IPPROTO_ICMP && v4, f.Protocol == unix.IPPROTO_ICMPV6 && !v4:
		return nil
	}
	return fmt.Errorf("%s: no protocol that is copied", f)
}

// Insert gives flows to the table, and returns how many it took: not those of which it has the addresses and ports already. A chain of
// type nat must be there, else the kernel translates nothing. The kernel doesn't check the windows of TCP in flows that were inserted. Both
// namespaces need nf_conntrack_tcp_be_liberal while the two directions of a connection pass different ones.
func (t *Table) Insert(ctx context.Context, flows []Flow) (int, error) {
	for _, f := range flows {
		if err := f.valid(); err != nil {
			return 0, err
		}
	}
	return t.h.Apply(ctx, unix.EEXIST, rtnl.Requests(flows, Flow.insertion)...)
}

// Update gives flows that the table has the timeout, the mark and the state that they have elsewhere, and returns how many it has.
func (t *Table) Update(ctx context.Context, flows []Flow) (int, error) {
	for _, f := range flows {
		if err := f.valid(); err != nil {
			return 0, err
		}
	}
	return t.h.Apply(ctx, unix.ENOENT, rtnl.Requests(flows, Flow.update)...)
}

// update changes the flow. The kernel refuses to change its answers' tuple and its translation.
func (f Flow) update() rtnl.Request {
	family := f.family()
	b := slices.Concat([]byte{family, 0, 0, 0}, f.tuple(ctaTupleOrig, family, false), f.state())
	return rtnl.NewRequest(typeNew, 0, b, "conntrack -U %s", f)
}

func (f Flow) family() byte {
	if f.Src.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// state has the attributes of what changes in the life of the flow.
func (f Flow) state() []byte {
	b := slices.Concat(word(ctaTimeout, f.Timeout), word(ctaMark, f.Mark))
	if f.Protocol != unix.IPPROTO_TCP {
		return b
	}
	return append(b, nest(ctaProtoInfo, nest(ctaProtoInfoTCP,
		attribute(ctaProtoInfoTCPState, []byte{f.TCP.State}),
		attribute(ctaProtoInfoTCPScaleOrig, []byte{f.TCP.ScaleOrig}), attribute(ctaProtoInfoTCPScaleReply, []byte{f.TCP.ScaleReply}),
		attribute(ctaProtoInfoTCPFlagsOrig, []byte{f.TCP.FlagsOrig | tcpBeLiberal, 0xff}), // flags, and which of them are meant
		attribute(ctaProtoInfoTCPFlagsReply, []byte{f.TCP.FlagsReply | tcpBeLiberal, 0xff})))...)
}

// insertion asks for the flow. The tuple of the answers is the inverse of the original one, and not as the kernel tells it: with that it finds
// nothing to translate.
func (f Flow) insertion() rtnl.Request {
	family, status := f.family(), uint32(statusSeenReply|statusAssured|statusConfirmed)
	reply := Flow{Protocol: f.Protocol, Src: f.Dst, Dst: f.Src}
	as := natAddress[family]
	b := slices.Concat([]byte{family, 0, 0, 0},
		f.tuple(ctaTupleOrig, family, false), reply.tuple(ctaTupleReply, family, true),
		nest(ctaNATSrc,
			attribute(as[0], f.Translated.Addr().AsSlice()), attribute(as[1], f.Translated.Addr().AsSlice()),
			nest(ctaNATProto, port(ctaNATPortMin, f.Translated.Port()), port(ctaNATPortMax, f.Translated.Port()))),
		f.state())
	if _, echo := echoID[f.Protocol]; echo {
		status &^= statusAssured
	}
	b = append(b, word(ctaStatus, status)...)
	return rtnl.NewRequest(typeNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, b, "conntrack -I %s", f)
}

// tuple is one direction of the flow.
func (f Flow) tuple(kind uint16, family byte, answer bool) []byte {
	src, dst := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if family == unix.AF_INET6 {
		src, dst = ctaIPv6Src, ctaIPv6Dst
	}
	proto := slices.Concat(port(ctaProtoSrcPort, f.Src.Port()), port(ctaProtoDstPort, f.Dst.Port()))
	if id, ok := echoID[f.Protocol]; ok {
		types := echoRequest
		if answer {
			types = echoReply
		}
		proto = slices.Concat(port(id, f.Src.Port()), attribute(id+1, []byte{types[f.Protocol]}), attribute(id+2, []byte{0})) // code 0
	}
	return nest(kind,
		nest(ctaTupleIP, attribute(src, f.Src.Addr().AsSlice()), attribute(dst, f.Dst.Addr().AsSlice())),
		nest(ctaTupleProto, attribute(ctaProtoNum, []byte{f.Protocol}), proto))
}

func attribute(kind uint16, value []byte) []byte { return rtnl.AppendAttribute(nil, kind, value) }

func nest(kind uint16, parts ...[]byte) []byte {
	return rtnl.AppendAttribute(nil, kind|unix.NLA_F_NESTED, slices.Concat(parts...))
}

func port(kind, v uint16) []byte { return attribute(kind, binary.BigEndian.AppendUint16(nil, v)) }

func word(kind uint16, v uint32) []byte {
	return attribute(kind, binary.BigEndian.AppendUint32(nil, v))
}

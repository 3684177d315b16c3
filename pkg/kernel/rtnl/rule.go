package rtnl

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Rule is a rule that was found in the kernel.
type Rule struct {
	dataplane.Rule
	// Exact says that the value describes the rule completely. Otherwise it has
	// something that Coil's rules don't have, such as a type of service.
	Exact bool
	body  []byte
}

// Attributes of linux/fib_rules.h.
const (
	fraSportMask = 28
	fraDportMask = 29
)

// AddRule asks for a new rule. It is put after the rules of the same priority;
// ErrExist if there is one that differs in nothing, not even the protocol.
func AddRule(r dataplane.Rule) Request {
	header := routeHeader(r.To, r.Table, 0) // a struct fib_rule_hdr has its layout
	// The length of a prefix that isn't valid is -1.
	header.Dst_len, header.Src_len = uint8(max(r.To.Bits(), 0)), uint8(max(r.From.Bits(), 0))
	header.Family, header.Type = families[r.Family], unix.FR_ACT_TO_TBL
	if r.Blackhole {
		header.Type = unix.FR_ACT_BLACKHOLE
	}
	return newRequest(unix.RTM_NEWRULE, create, text("rule add %s", r), header,
		address(unix.FRA_SRC, r.From.Addr()), address(unix.FRA_DST, r.To.Addr()),
		wordIf(unix.FRA_IIFNAME, r.Input), wordIf(unix.FRA_OIFNAME, r.Output),
		when(r.Mask != 0, number(unix.FRA_FWMARK, r.Mark)), numberIf(unix.FRA_FWMASK, r.Mask),
		when(r.Transport != 0, nl.NewRtAttr(unix.FRA_IP_PROTO, []byte{r.Transport})),
		onePort(unix.FRA_SPORT_RANGE, r.SourcePort), onePort(unix.FRA_DPORT_RANGE, r.DestinationPort),
		number(unix.FRA_PRIORITY, uint32(r.Priority)), number(unix.FRA_TABLE, uint32(r.Table)),
		nl.NewRtAttr(unix.FRA_PROTOCOL, []byte{uint8(r.Protocol)}))
}

// onePort is a struct fib_rule_port_range with a single port; nil if that is 0.
func onePort(kind int, port uint16) *nl.RtAttr {
	return when(port != 0, nl.NewRtAttr(kind, slices.Repeat(nl.Uint16Attr(port), 2)))
}

// DelRule asks for the removal of a rule with all that AddRule gives it; ErrNotExist.
func DelRule(r dataplane.Rule) Request {
	return Request{unix.RTM_DELRULE, 0, AddRule(r).body, text("rule del %s", r)}
}

// DelFoundRule asks for the removal of the rule that was found; ErrNotExist.
// The kernel removes the first one that matches, and takes protocol 0 for any.
func DelFoundRule(r Rule) Request {
	return Request{unix.RTM_DELRULE, 0, r.body, text("rule del %s", r)}
}

// Rules returns all rules of a family, in order of evaluation.
func (h *Handle) Rules(ctx context.Context, f dataplane.Family) ([]Rule, error) {
	header := &nl.RtMsg{}
	header.Family = families[f]
	r := newRequest(unix.RTM_GETRULE, 0, text("rule show (%s)", f), header)
	return List(ctx, h, r, parseRule)
}

// parseRule reads a struct fib_rule_hdr, which has the size and layout of a struct rtmsg, and its
// attributes, by hand: the library's reader doesn't tell which attributes it leaves out.
func parseRule(body []byte) (r Rule, ok bool, err error) {
	b, rest, as := Cut(body, unix.SizeofRtMsg)
	header := nl.DeserializeRtMsg(b)
	r.Family, r.Table, r.Blackhole = familyOf(header.Family), int(header.Table), header.Type == unix.FR_ACT_BLACKHOLE
	// FIB_RULE_INVERT changes the meaning; the other flags are state.
	r.Exact = header.Tos == 0 && (header.Type == unix.FR_ACT_TO_TBL || r.Blackhole) && header.Flags&unix.FIB_RULE_INVERT == 0
	r.body = binary.NativeEndian.AppendUint32(bytes.Clone(b[:8]), header.Flags&unix.FIB_RULE_INVERT)
	for a := range as.In(rest) {
		switch a.Kind {
		case unix.FRA_SRC:
			r.From = netip.PrefixFrom(a.Addr(), int(header.Src_len))
		case unix.FRA_DST:
			r.To = netip.PrefixFrom(a.Addr(), int(header.Dst_len))
		case unix.FRA_PRIORITY:
			r.Priority = int(a.U32())
		case unix.FRA_TABLE:
			r.Table = int(a.U32())
		case unix.FRA_PROTOCOL:
			r.Protocol = int(a.U8())
		case unix.FRA_IIFNAME:
			r.Input = a.Text()
		case unix.FRA_OIFNAME:
			r.Output = a.Text()
		case unix.FRA_FWMARK:
			r.Mark = a.U32()
		case unix.FRA_FWMASK:
			r.Mask = a.U32()
		case unix.FRA_IP_PROTO:
			r.Transport = a.U8()
		case unix.FRA_SPORT_RANGE, unix.FRA_DPORT_RANGE:
			port := a.U16()
			r.Exact = r.Exact && len(a.Value) == 4 && bytes.Equal(a.Value[:2], a.Value[2:])
			if a.Kind == unix.FRA_SPORT_RANGE {
				r.SourcePort = port
			} else {
				r.DestinationPort = port
			}
		case fraSportMask, fraDportMask:
			// Of kernels since 6.15; all ones is one port.
			r.Exact = r.Exact && a.U16() == 1<<16-1
		case unix.FRA_SUPPRESS_PREFIXLEN:
			// Always there; all ones is "off".
			r.Exact = r.Exact && int32(a.U32()) == -1
		default:
			r.Exact = r.Exact && a.zero()
		}
		r.body = AppendAttribute(r.body, a.Kind, a.Value)
	}
	return r, true, as.Err
}

// isNoTable says whether a dump failed because the table doesn't exist.
func isNoTable(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && refused.Errno == unix.ENOENT
}

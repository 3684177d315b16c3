package rtnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/dataplane"
)

// Rule is a rule that was found in the kernel.
type Rule struct {
	dataplane.Rule
	// Exact says that the value describes the rule completely. Otherwise it has
	// something that Coil's rules don't have, such as a source.
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
	var e encoder
	bits := 0
	if r.To.IsValid() {
		bits = r.To.Bits()
	}
	action := uint8(unix.FR_ACT_TO_TBL)
	if r.Blackhole {
		action = unix.FR_ACT_BLACKHOLE
	}
	// struct fib_rule_hdr
	e.u8(families[r.Family], uint8(bits), 0, 0)
	e.u8(smallTable(r.Table), 0, 0, action)
	e.u32(0)
	if r.To.IsValid() {
		e.attrAddr(unix.FRA_DST, r.To.Addr())
	}
	if r.Input != "" {
		e.attrString(unix.FRA_IIFNAME, r.Input)
	}
	if r.Mark != 0 {
		e.attrU32(unix.FRA_FWMARK, r.Mark)
		e.attrU32(unix.FRA_FWMASK, r.Mark)
	}
	if r.Transport != 0 {
		e.attr(unix.FRA_IP_PROTO, []byte{r.Transport})
	}
	if r.SourcePort != 0 {
		e.attrPorts(unix.FRA_SPORT_RANGE, r.SourcePort)
	}
	if r.DestinationPort != 0 {
		e.attrPorts(unix.FRA_DPORT_RANGE, r.DestinationPort)
	}
	e.attrU32(unix.FRA_PRIORITY, uint32(r.Priority))
	e.attrU32(unix.FRA_TABLE, uint32(r.Table))
	e.attr(unix.FRA_PROTOCOL, []byte{uint8(r.Protocol)})
	return Request{unix.RTM_NEWRULE, unix.NLM_F_CREATE | unix.NLM_F_EXCL, e.b, func() string { return "rule add " + r.String() }}
}

// DelRule asks for the removal of a rule with all that AddRule gives it; ErrNotExist.
func DelRule(r dataplane.Rule) Request {
	return Request{unix.RTM_DELRULE, 0, AddRule(r).body, func() string { return "rule del " + r.String() }}
}

// attrPorts appends a struct fib_rule_port_range with a single port.
func (e *encoder) attrPorts(kind uint16, port uint16) {
	b := binary.NativeEndian.AppendUint16(nil, port)
	e.attr(kind, binary.NativeEndian.AppendUint16(b, port))
}

// ports reads a struct fib_rule_port_range, and says whether it is a single port.
func (a attribute) ports() (port uint16, single bool) {
	if len(a.value) < 4 {
		return 0, false
	}
	port = binary.NativeEndian.Uint16(a.value)
	return port, port == binary.NativeEndian.Uint16(a.value[2:])
}

// DelFoundRule asks for the removal of the rule that was found; ErrNotExist.
// The kernel removes the first one that matches, and takes protocol 0 for any.
func DelFoundRule(r Rule) Request {
	return Request{unix.RTM_DELRULE, 0, r.body, func() string { return "rule del " + r.String() }}
}

// Rules returns all rules of a family, in order of evaluation.
func (h *Handle) Rules(ctx context.Context, f dataplane.Family) ([]Rule, error) {
	var e encoder
	e.u8(families[f], 0, 0, 0, 0, 0, 0, 0)
	e.u32(0)
	r := Request{unix.RTM_GETRULE, 0, e.b, func() string { return fmt.Sprintf("rule show (%s)", f) }}
	return List(ctx, h, r, func(body []byte) (Rule, bool, error) {
		r, err := parseRule(f, body)
		return r, true, err
	})
}

func parseRule(f dataplane.Family, body []byte) (Rule, error) {
	const header = unix.SizeofRtMsg // struct fib_rule_hdr has its size and layout
	if len(body) < header {
		return Rule{}, fmt.Errorf("rule in %d bytes: %w", len(body), errMalformed)
	}
	bits, srcBits, tos, action := int(body[1]), body[2], body[3], body[7]
	flags := binary.NativeEndian.Uint32(body[8:])
	// FIB_RULE_INVERT changes the meaning; the other flags are state.
	r := Rule{Exact: srcBits == 0 && tos == 0 && (action == unix.FR_ACT_TO_TBL || action == unix.FR_ACT_BLACKHOLE) && flags&unix.FIB_RULE_INVERT == 0}
	r.Family, r.Table, r.Blackhole = f, int(body[4]), action == unix.FR_ACT_BLACKHOLE
	as, err := attributes(body[header:])
	if err != nil {
		return Rule{}, err
	}
	e := encoder{b: append([]byte(nil), body[:8]...)}
	e.u32(flags & unix.FIB_RULE_INVERT)
	var mask uint32
	for a := range as {
		switch a.kind {
		case unix.FRA_DST:
			r.To = netip.PrefixFrom(a.addr(), bits)
		case unix.FRA_PRIORITY:
			r.Priority = int(a.u32())
		case unix.FRA_TABLE:
			r.Table = int(a.u32())
		case unix.FRA_PROTOCOL:
			r.Protocol = int(a.u8())
		case unix.FRA_IIFNAME:
			r.Input = a.string()
		case unix.FRA_FWMARK:
			r.Mark = a.u32()
		case unix.FRA_FWMASK:
			mask = a.u32()
		case unix.FRA_IP_PROTO:
			r.Transport = a.u8()
		case unix.FRA_SPORT_RANGE, unix.FRA_DPORT_RANGE:
			port, single := a.ports()
			r.Exact = r.Exact && single
			if a.kind == unix.FRA_SPORT_RANGE {
				r.SourcePort = port
			} else {
				r.DestinationPort = port
			}
		case fraSportMask, fraDportMask:
			// Of kernels since 6.15; all ones is one port.
			r.Exact = r.Exact && a.u16() == 1<<16-1
		case unix.FRA_SUPPRESS_PREFIXLEN:
			// Always there; all ones is "off".
			r.Exact = r.Exact && int32(a.u32()) == -1
		default:
			r.Exact = r.Exact && a.zero()
		}
		e.attr(a.kind, a.value)
	}
	r.Exact = r.Exact && mask == r.Mark
	r.body = e.b
	return r, nil
}

// isNoTable says whether a dump failed because the table doesn't exist.
func isNoTable(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && refused.Errno == unix.ENOENT
}

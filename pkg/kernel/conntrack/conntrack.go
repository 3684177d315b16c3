// Package conntrack reads and changes the kernel's table of flows: it makes the kernel forget the flows of addresses that have no pod
// any more, so that packets that are still sent for the old pod never reach the next one, and copies translated flows from one
// network namespace to another.
//
// It owns the messages of ctnetlink (linux/netfilter/nfnetlink_conntrack.h). It must
// not know why an address is forgotten, nor why its flows move.
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// Types of messages, and attributes, of linux/netfilter/nfnetlink_conntrack.h.
const (
	typeGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET
	typeDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaProtoInfo  = 4
	ctaID         = 12
	ctaZone       = 18

	ctaTupleIP           = 1
	ctaTupleProto        = 2
	ctaProtoNum          = 1
	ctaProtoDstPort      = 3
	ctaProtoInfoTCP      = 1
	ctaProtoInfoTCPState = 1

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4
)

// Table is the kernel's table of flows in one network namespace. It is safe for
// concurrent use.
type Table struct {
	ns *netns.NS
	h  *rtnl.Handle
}

// New returns the table of a namespace, nil for the one that the process was started in,
// which must stay open as long as the table is used.
func New(ns *netns.NS) (*Table, error) {
	h, err := rtnl.NewProtocol(ns, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open the table of flows: %w", err)
	}
	return &Table{ns, h}, nil
}

// Close closes the table. No call may be in progress.
func (t *Table) Close() { t.h.Close() }

// Forget deletes all flows that one of the addresses takes part in, in either
// direction, before or after address translation, and returns how many these were.
// The kernel's table is read once, whatever the number of addresses. A kernel that
// tracks no flows has none, and isn't made to load the module that could.
func (t *Table) Forget(ctx context.Context, addrs ...netip.Addr) (int, error) {
	wanted := setOf(addrs)
	return t.forget(ctx, func(f flow) bool { return f.concerns(wanted) })
}

// forget deletes flows.
func (t *Table) forget(ctx context.Context, which func(flow) bool) (int, error) {
	// Of the namespace's own flows; Documentation/networking/nf_conntrack-sysctl.rst.
	count, err := sysctl.Get(t.ns, "net/netfilter/nf_conntrack_count")
	if errors.Is(err, sysctl.ErrNotExist) || count == "0" {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("count flows: %w", err)
	}
	var stale []rtnl.Request
	err = t.flows(ctx, func(f flow) {
		if which(f) {
			stale = append(stale, f.deletion())
		}
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return 0, nil // nfnetlink knows no such subsystem
	}
	if err != nil {
		return 0, err
	}
	return t.h.Apply(ctx, unix.ENOENT, stale...) // it has ended
}

// nfgenmsgSize is the size of struct nfgenmsg: family, version, resource ID.
const nfgenmsgSize = 4

// all asks for all objects of a type. The header's zeros say all families, and version 0 (NFNETLINK_V0).
func all(kind uint16, text string) rtnl.Request {
	return rtnl.NewRequest(kind, 0, make([]byte, nfgenmsgSize), "%s", text)
}

// flows calls each with the entries of the table, which are valid until it returns.
func (t *Table) flows(ctx context.Context, each func(flow)) error {
	err := t.h.Dump(ctx, all(typeGet, "conntrack -L"), func(body []byte) error {
		f, err := parse(body)
		if err == nil {
			each(f)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("list flows: %w", err)
	}
	return nil
}

// flow is an entry of the table. Its slices are those of the message.
type flow struct {
	family byte
	// original and reply are the attributes of the tuples, tcp those of a connection.
	original, reply, tcp []byte
	id, zone             []byte
	ends                 [8]netip.Addr // source and destination of both directions, in both families
	protocol             byte
	to                   uint16 // the port that the original direction leads to
	tcpState             byte

	status, timeout, mark uint32
}

// parse reads an entry without copying, for there may be hundreds of thousands: the library, which would
// copy each, knows neither the ID nor the zone.
func parse(body []byte) (f flow, err error) {
	header, rest, as := rtnl.Cut(body, nfgenmsgSize)
	f.family = header[0]
	for a := range as.In(rest) {
		switch a.Kind {
		case ctaTupleOrig:
			f.original = a.Value
			f.tuple(&as, a.Value, 0)
		case ctaTupleReply:
			f.reply = a.Value
			f.tuple(&as, a.Value, 4)
		case ctaID:
			f.id = a.Value
		case ctaZone:
			f.zone = a.Value
		case ctaProtoInfo:
			f.tcp = as.Find(a.Value, ctaProtoInfoTCP).Value
			f.tcpState = as.Find(f.tcp, ctaProtoInfoTCPState).U8()
		case ctaStatus:
			f.status = a.BE32()
		case ctaTimeout:
			f.timeout = a.BE32()
		case ctaMark:
			f.mark = a.BE32()
		}
	}
	return f, as.Err
}

// tuple reads the addresses of one direction into ends, and of the original one where it leads.
func (f *flow) tuple(as *rtnl.Attributes, b []byte, at int) {
	for a := range as.In(as.Find(b, ctaTupleIP).Value) {
		if a.Kind >= ctaIPv4Src && a.Kind <= ctaIPv6Dst {
			f.ends[at+int(a.Kind-ctaIPv4Src)] = a.Addr()
		}
	}
	if at == 0 {
		f.protocol = as.Find(b, ctaTupleProto, ctaProtoNum).U8()
		f.to = as.Find(b, ctaTupleProto, ctaProtoDstPort).Port()
	}
}

// concerns says whether one of the addresses is an end of the flow.
func (f flow) concerns(addrs map[netip.Addr]bool) bool {
	return slices.ContainsFunc(f.ends[:], func(end netip.Addr) bool { return end.IsValid() && addrs[end] })
}

// translated returns the source of a flow, where it leads, and where its answers go.
func (f *flow) translated() (src, dst, back netip.Addr) {
	if f.family == unix.AF_INET6 {
		return f.ends[2], f.ends[3], f.ends[7]
	}
	return f.ends[0], f.ends[1], f.ends[5]
}

// deletion deletes the flow, and not one that has its addresses and ports now.
func (f *flow) deletion() rtnl.Request {
	b := []byte{f.family, 0, 0, 0}
	b = rtnl.AppendAttribute(b, ctaTupleOrig|unix.NLA_F_NESTED, f.original)
	if f.zone != nil {
		b = rtnl.AppendAttribute(b, ctaZone, f.zone)
	}
	b = rtnl.AppendAttribute(b, ctaID, f.id)
	ends := slices.DeleteFunc(slices.Clone(f.ends[:4]), func(a netip.Addr) bool { return !a.IsValid() })
	return rtnl.NewRequest(typeDelete, 0, b, "conntrack -D of %v", ends)
}

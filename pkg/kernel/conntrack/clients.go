package conntrack

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

// Attributes of linux/netfilter/nfnetlink_conntrack.h, and states of nf_conntrack_tcp.h.
const (
	ctaProtoInfo         = 4
	ctaProtoInfoTCP      = 1
	ctaProtoInfoTCPState = 1

	tcpTimeWait = 7 // TCP_CONNTRACK_TIME_WAIT
	tcpClose    = 8 // TCP_CONNTRACK_CLOSE
)

// Clients returns how many flows each source has that go on with one of the addresses own in its place.
// TCP connections that have ended don't count, as in the kernel's own counts (already_closed of
// nf_conncount.c). It reads the whole table.
func (t *Table) Clients(ctx context.Context, own ...netip.Addr) (map[netip.Addr]int, error) {
	counts := map[netip.Addr]int{}
	all := rtnl.NewRequest(typeGet, 0, make([]byte, nfgenmsgSize), func() string { return "conntrack -L" })
	err := t.h.Dump(ctx, all, func(body []byte) error {
		f, err := parse(body)
		if err != nil {
			return err
		}
		if src, back := f.translated(); src != back && slices.Contains(own, back) && !f.ended() {
			counts[src]++
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	return counts, nil
}

// translated returns the source of a flow, and where its answers go.
func (f *flow) translated() (src, back netip.Addr) {
	if f.family == unix.AF_INET6 {
		return f.ends[2], f.ends[7]
	}
	return f.ends[0], f.ends[5]
}

// ended says whether a flow is a TCP connection that has ended.
func (f *flow) ended() (ended bool) {
	_ = rtnl.EachAttribute(f.protoInfo, func(kind uint16, value []byte) error {
		if kind != ctaProtoInfoTCP {
			return nil
		}
		return rtnl.EachAttribute(value, func(kind uint16, value []byte) error {
			if kind == ctaProtoInfoTCPState && len(value) > 0 {
				ended = value[0] == tcpTimeWait || value[0] == tcpClose
			}
			return nil
		})
	})
	return ended
}

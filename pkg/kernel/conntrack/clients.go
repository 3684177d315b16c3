package conntrack

import (
	"context"
	"net/netip"
	"slices"
)

// States of TCP of nf_conntrack_tcp.h.
const (
	tcpTimeWait = 7 // TCP_CONNTRACK_TIME_WAIT
	tcpClose    = 8 // TCP_CONNTRACK_CLOSE
)

// Clients returns how many flows each source has that go on with one of the addresses own in its place.
// TCP connections that have ended don't count, as in the kernel's own counts (already_closed of
// nf_conncount.c). It reads the whole table.
func (t *Table) Clients(ctx context.Context, own ...netip.Addr) (map[netip.Addr]int, error) {
	counts := map[netip.Addr]int{}
	err := t.flows(ctx, func(f flow) {
		src, _, back := f.translated()
		if src != back && slices.Contains(own, back) && f.tcpState != tcpTimeWait && f.tcpState != tcpClose {
			counts[src]++
		}
	})
	if err != nil {
		return nil, err
	}
	return counts, nil
}

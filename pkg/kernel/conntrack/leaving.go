package conntrack

import (
	"context"
	"net/netip"
)

// Leaving counts the connections that are translated to each of some addresses, without TCP connections that have ended. It reads the whole table.
func (t *Table) Leaving(ctx context.Context, own ...netip.Addr) (map[netip.Addr]int, error) {
	counts, mine := map[netip.Addr]int{}, setOf(own)
	err := t.flows(ctx, func(f flow) {
		src, _, back := f.translated()
		if src != back && mine[back] && f.tcpState != tcpTimeWait && f.tcpState != tcpClose {
			counts[back]++
		}
	})
	if err != nil {
		return nil, err
	}
	return counts, nil
}

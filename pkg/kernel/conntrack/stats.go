package conntrack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

const (
	typeStats = unix.NFNL_SUBSYS_CTNETLINK<<8 | 4 // IPCTNL_MSG_CT_GET_STATS_CPU

	statsInsertFailed = 9  // CTA_STATS_INSERT_FAILED
	statsDrop         = 10 // CTA_STATS_DROP
	statsEarlyDrop    = 11 // CTA_STATS_EARLY_DROP
)

// Size returns how many flows of the namespace are tracked, and how many may be. A kernel
// that tracks none has room for none.
func (t *Table) Size() (count, limit int, err error) { return SizeIn(t.ns) }

// SizeIn is Size of a network namespace; nil is that of the process.
func SizeIn(ns *netns.NS) (count, limit int, err error) {
	for key, value := range map[string]*int{"count": &count, "max": &limit} {
		text, err := sysctl.Get(ns, "net/netfilter/nf_conntrack_"+key)
		if errors.Is(err, sysctl.ErrNotExist) {
			return 0, 0, nil
		}
		if err == nil {
			*value, err = strconv.Atoi(text)
		}
		if err != nil {
			return 0, 0, fmt.Errorf("count flows: %w", err)
		}
	}
	return count, limit, nil
}

// Stats count the failures of tracking flows since the namespace was made.
type Stats struct {
	// InsertFailed are packets whose new flow had the addresses and ports of another one.
	InsertFailed uint64
	// Dropped are packets for whose new flow there was no room, EarlyDropped are flows
	// without an answer that made room.
	Dropped, EarlyDropped uint64
}

// Stats returns the counts of all processors.
func (t *Table) Stats(ctx context.Context) (Stats, error) {
	var s Stats
	err := t.h.Dump(ctx, all(typeStats, "conntrack -S"), func(body []byte) error {
		_, rest, as := rtnl.Cut(body, nfgenmsgSize)
		s.InsertFailed += uint64(as.Find(rest, statsInsertFailed).BE32())
		s.Dropped += uint64(as.Find(rest, statsDrop).BE32())
		s.EarlyDropped += uint64(as.Find(rest, statsEarlyDrop).BE32())
		return as.Err
	})
	if err != nil {
		return Stats{}, fmt.Errorf("read statistics of flows: %w", err)
	}
	return s, nil
}

// Use is how many ports the translation of source addresses takes up towards one
// destination: of the address that has most in use, of 64512.
type Use struct {
	Protocol    byte // as in the IP header
	Destination netip.AddrPort
	Ports       int
}

// maxDestinations bounds the memory of Uses.
const maxDestinations = 1 << 16

// Uses returns the destinations that most ports of the addresses own are used for, at most
// n of them, the most used first. It reads the whole table; of destinations beyond the
// first 65536 it knows nothing.
func (t *Table) Uses(ctx context.Context, n int, own ...netip.Addr) ([]Use, error) {
	type destination struct {
		from     netip.Addr
		protocol byte
		to       netip.AddrPort
	}
	counts, mine := map[destination]int{}, setOf(own)
	err := t.flows(ctx, func(f flow) {
		src, dst, back := f.translated()
		if src == back || !mine[back] || f.to == 0 {
			return
		}
		d := destination{back, f.protocol, netip.AddrPortFrom(dst, f.to)}
		if _, known := counts[d]; known || len(counts) < maxDestinations {
			counts[d]++
		}
	})
	if err != nil {
		return nil, err
	}
	type towards struct {
		protocol byte
		to       netip.AddrPort
	}
	most := map[towards]int{}
	for d, ports := range counts {
		most[towards{d.protocol, d.to}] = max(ports, most[towards{d.protocol, d.to}])
	}
	uses := make([]Use, 0, len(most))
	for d, ports := range most {
		uses = append(uses, Use{d.protocol, d.to, ports})
	}
	slices.SortFunc(uses, func(a, b Use) int {
		return cmp.Or(b.Ports-a.Ports, a.Destination.Compare(b.Destination), cmp.Compare(a.Protocol, b.Protocol))
	})
	return slices.Clone(uses[:min(n, len(uses))]), nil
}

// States of TCP of nf_conntrack_tcp.h.
const (
	tcpTimeWait = 7 // TCP_CONNTRACK_TIME_WAIT
	tcpClose    = 8 // TCP_CONNTRACK_CLOSE
)

// Clients returns how many flows each source has that go on with one of the addresses own in its place.
// TCP connections that have ended don't count, as in the kernel's own counts (already_closed of
// nf_conncount.c). It reads the whole table.
func (t *Table) Clients(ctx context.Context, own ...netip.Addr) (map[netip.Addr]int, error) {
	counts, mine := map[netip.Addr]int{}, setOf(own)
	err := t.flows(ctx, func(f flow) {
		src, _, back := f.translated()
		if src != back && mine[back] && f.tcpState != tcpTimeWait && f.tcpState != tcpClose {
			counts[src]++
		}
	})
	if err != nil {
		return nil, err
	}
	return counts, nil
}

func setOf(addrs []netip.Addr) map[netip.Addr]bool {
	set := make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		set[a] = true
	}
	return set
}

package rtnl

import (
	"context"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Traffic counts the packets of a link since it was made.
type Traffic struct {
	// In came by the link, and Out left by it. Lost are those that didn't get through, in either direction.
	In, Out, Lost uint64
}

// Since is how many packets there were after an earlier count.
func (t Traffic) Since(before Traffic) Traffic {
	less := func(now, then uint64) uint64 { return now - min(now, then) } // the link may be a new one
	return Traffic{In: less(t.In, before.In), Out: less(t.Out, before.Out), Lost: less(t.Lost, before.Lost)}
}

// Traffic returns the counts of a link, by its name; ErrNotExist.
func (h *Handle) Traffic(ctx context.Context, name string) (t Traffic, err error) {
	r := newRequest(unix.RTM_GETLINK, 0, text("-s link show %s", name), linkHeader(0, false), word(unix.IFLA_IFNAME, name))
	err = h.Get(ctx, r, func(body []byte) (err error) {
		t, err = parseTraffic(body)
		return err
	})
	return t, err
}

// parseTraffic reads the beginning of a struct rtnl_link_stats64 (linux/if_link.h).
func parseTraffic(body []byte) (t Traffic, err error) {
	_, rest, as := Cut(body, unix.SizeofIfInfomsg)
	b := as.Find(rest, unix.IFLA_STATS64).Value
	const fields, size = 8, 8 // packets, bytes, errors and drops, each received and sent
	if as.Err != nil {
		return t, as.Err
	}
	if len(b) < fields*size {
		return t, fmt.Errorf("statistics of a link in %d bytes: %w", len(b), errMalformed)
	}
	at := func(i int) uint64 { return binary.NativeEndian.Uint64(b[i*size:]) }
	return Traffic{In: at(0), Out: at(1), Lost: at(4) + at(5) + at(6) + at(7)}, nil
}

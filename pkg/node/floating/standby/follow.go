package standby

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
)

// Flows of other nodes' addresses are taken while a router tracks less than mostOf of mostIn parts of what it can: the rest is for its own flows.
const mostOf, mostIn = 3, 4

// mostWhole is how many flows a copy of all flows of an address may have.
const mostWhole = 1 << 20

// following are the flows that another node copies to routers here.
type following struct {
	s    *Standby
	from string
	conn net.Conn
	// addrs are the addresses whose copies were begun.
	addrs  map[netip.Addr]*kept
	buffer []byte
	said   answer
}

// kept is an address whose flows are kept.
type kept struct {
	floating.Address
	// all are the flows of a copy that isn't complete, by their identity; nil if there is none.
	all map[uint64]bool
	// complete says that they have all come.
	complete bool
}

var seed = maphash.MakeSeed()

// identity tells a flow from others, also from one that has the same ends and another translation. It is a hash, since there may be very many.
func identity(f conntrack.Flow) uint64 {
	return maphash.Comparable(seed, conntrack.Flow{Protocol: f.Protocol, Src: f.Src, Dst: f.Dst, Translated: f.Translated})
}

// Serve takes flows by a connection whose first frame was frames.Follow, until the other node closes the connection, or says nothing for long.
func (s *Standby) Serve(ctx context.Context, from string, conn net.Conn) {
	f := &following{s: s, from: from, conn: conn, addrs: map[netip.Addr]*kept{}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	err := frames.During(ctx, conn, func() error {
		for {
			if err := f.take(ctx); err != nil {
				return err
			}
		}
	})
	klog.FromContext(ctx).V(2).Info("A node copies no connections of floating addresses to this one any more", "from", from, "reason", err)
}

// take takes a frame.
func (f *following) take(ctx context.Context) error {
	if err := f.conn.SetDeadline(time.Now().Add(f.s.limits.beat + 2*f.s.limits.answer)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil { // its deadline is overwritten
		return err
	}
	k, payload, err := frames.Read(f.conn, &f.buffer)
	if err != nil {
		return err
	}
	switch k {
	case frames.Begin, frames.Complete:
		var o frames.Address
		if err := json.Unmarshal(payload, &o); err != nil {
			return fmt.Errorf("%w: %w", frames.ErrFrame, err)
		}
		if k == frames.Begin {
			f.begin(o)
			return nil
		}
		f.complete(o)
		return nil
	case frames.Opened:
		return f.flows(ctx, payload, f.open)
	case frames.Ended:
		return f.flows(ctx, payload, f.end)
	case frames.End:
		f.forget()
		faultpoint.At(faultpoint.FollowTaken)
		text, err := json.Marshal(f.said)
		f.said = answer{}
		return errors.Join(err, frames.Write(f.conn, frames.Ready, text))
	}
	return fmt.Errorf("%w: kind %d", frames.ErrFrame, k)
}

// allowed returns the address of a block if its flows are to be kept here, and notes why not otherwise.
func (f *following) allowed(o frames.Address) (floating.Address, bool) {
	b := f.s.cfg.Block(o.Block)
	err := fmt.Errorf("there is no AddressBlock %q of this UID", o.Block)
	var a floating.Address
	switch {
	case b == nil || string(b.UID) != o.ID:
	case f.s.cfg.Moves(o.ID):
		err = errors.New("this node still hands the address over")
	default:
		a, err = floating.Following(f.s.cfg.Node, f.from, b)
		if err == nil && o.Router != "" && o.Router != a.Pod {
			err = fmt.Errorf("the router here is pod %s, and not %s", a.Pod, o.Router)
		}
	}
	if err != nil {
		f.refuse(o.Block, err.Error())
		return floating.Address{}, false
	}
	return a, true
}

// may says whether flows of an address that was begun may be kept still.
func (f *following) may(k *kept) bool {
	a, ok := f.allowed(frames.Address{Block: k.Block, ID: k.ID})
	if ok && a != k.Address {
		f.refuse(k.Block, "another pod has the address now")
	}
	return ok && a == k.Address
}

// refuse takes no more flows of an address until it is begun again.
func (f *following) refuse(block, why string) {
	f.said.refuse(block, why)
	for addr, k := range f.addrs {
		if k.Block == block {
			delete(f.addrs, addr)
		}
	}
}

// begin takes flows of an address from now on.
func (f *following) begin(o frames.Address) {
	a, ok := f.allowed(o)
	if !ok {
		return
	}
	f.s.following(a)
	faultpoint.At(faultpoint.FollowBegun)
	k := &kept{Address: a, all: map[uint64]bool{}}
	for _, addr := range a.Addrs() {
		f.addrs[addr] = k
	}
}

// flows gives the flows of addresses that may be kept to do, by their pod.
func (f *following) flows(ctx context.Context, payload []byte, do func(context.Context, tables.Table, []conntrack.Flow) error) error {
	all, err := frames.ParseFlows(payload)
	if err != nil {
		return err
	}
	now := map[*kept]bool{} // whether they may be kept
	byPod := map[types.UID][]conntrack.Flow{}
	for _, flow := range all {
		k := f.addrs[flow.Translated.Addr()]
		if k == nil {
			continue
		}
		may, looked := now[k]
		if !looked {
			may = f.may(k)
			now[k] = may
		}
		if may {
			byPod[k.Pod] = append(byPod[k.Pod], flow)
		}
	}
	for pod, flows := range byPod {
		err := f.s.cfg.Tables.With(pod, func(_ context.Context, table tables.Table) error { return do(ctx, table, flows) })
		if err != nil {
			for _, flow := range flows {
				if k := f.addrs[flow.Translated.Addr()]; k != nil {
					f.refuse(k.Block, err.Error())
				}
			}
		}
	}
	return nil
}

// open keeps flows.
func (f *following) open(ctx context.Context, table tables.Table, flows []conntrack.Flow) error {
	limits := f.s.limits
	for i := range flows {
		flows[i].Timeout = min(max(flows[i].Timeout, uint32(limits.kept.Seconds())), tables.Longest)
		k := f.addrs[flows[i].Translated.Addr()]
		if k.all == nil {
			continue
		}
		if k.all[identity(flows[i])] = true; len(k.all) > mostWhole {
			return fmt.Errorf("it has more than %d connections", mostWhole)
		}
	}
	count, limit, err := table.Size()
	if err != nil {
		return err
	}
	room := len(flows)
	if limit > 0 {
		room = max(0, limit/mostIn*mostOf-count)
	}
	rest := flows
	for len(rest) > 0 && room > 0 {
		part := rest[:min(room, len(rest))]
		n, err := tables.Put(ctx, table, part)
		if err != nil {
			return err
		}
		faultpoint.At(faultpoint.FollowOpened)
		f.said.Taken += n
		f.s.metrics.flows.WithLabelValues(sideReceived, "opened").Add(float64(n))
		rest, room = rest[len(part):], room-n
	}
	known, err := table.Update(ctx, rest)
	if err != nil || known == len(rest) {
		return err
	}
	f.s.metrics.full.Add(float64(len(rest) - known))
	for _, flow := range rest {
		f.said.refuse(f.addrs[flow.Translated.Addr()].Block, fmt.Sprintf("the router tracks %d connections, and may track %d", count, limit))
	}
	return nil
}

// end forgets flows.
func (f *following) end(ctx context.Context, table tables.Table, flows []conntrack.Flow) error {
	n, err := table.Delete(ctx, flows)
	f.s.metrics.flows.WithLabelValues(sideReceived, "ended").Add(float64(n))
	return err
}

// complete notes that all flows of an address have come.
func (f *following) complete(o frames.Address) {
	for _, k := range f.addrs {
		if k.Block == o.Block && k.all != nil {
			k.complete = true
		}
	}
}

// forget forgets the flows of addresses that weren't among all of them, at the end of a turn: a router's whole table is read once for all its addresses.
func (f *following) forget() {
	byPod := map[types.UID]map[netip.Addr]*kept{}
	for addr, k := range f.addrs {
		if !k.complete {
			continue
		}
		if !f.may(k) {
			continue
		}
		if byPod[k.Pod] == nil {
			byPod[k.Pod] = map[netip.Addr]*kept{}
		}
		byPod[k.Pod][addr] = k
	}
	for pod, all := range byPod {
		err := f.s.cfg.Tables.With(pod, func(ctx context.Context, table tables.Table) error {
			var stale []conntrack.Flow
			err := table.Translated(ctx, slices.Collect(maps.Keys(all)), func(flow conntrack.Flow) {
				if !all[flow.Translated.Addr()].all[identity(flow)] {
					stale = append(stale, flow)
				}
			})
			if err != nil {
				return err
			}
			return f.end(ctx, table, stale)
		})
		for _, k := range all {
			if k.all, k.complete = nil, false; err != nil {
				f.refuse(k.Block, err.Error())
			}
		}
	}
}

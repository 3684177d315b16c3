package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
)

// errFollow says that the other node copies connections all the time.
var errFollow = errors.New("it is no hand-over")

// Accept takes the connections of an address that another node hands over to this one, or copies all the time.
func (h *Handover) Accept(ctx context.Context, from string, conn net.Conn) {
	log := klog.FromContext(ctx).WithValues("from", from)
	limited, cancel := context.WithTimeout(ctx, h.limits.total+2*h.limits.late)
	defer cancel()
	r := &receiving{h: h, from: from, conn: conn}
	err := frames.During(limited, conn, func() error { return r.serve(limited) })
	if errors.Is(err, errFollow) && limited.Err() == nil {
		h.cfg.Standby.Serve(ctx, from, conn)
		return
	}
	log = log.WithValues("block", r.offered.Block, "connections", r.flows)
	result := done
	switch {
	case err == nil:
		log.V(2).Info("Took the connections of a floating address")
	case errors.As(err, new(frames.Refusal)):
		result = refused
		log.Error(err, "The connections of a floating address aren't taken")
	case r.passes >= 2: // all but what was opened in the last moment
		log.V(2).Info("Took the connections of a floating address", "until", err)
	default:
		result = failed
		log.Error(err, "The connections of a floating address aren't taken")
	}
	h.metrics.ended(received, result, r.flows)
	if r.flows > 0 {
		h.cfg.Standby.Again(r.offered.Block)
		h.later(func() { h.forget(h.limits.unclaimed, r.address) }) // it may not move here after all
	}
}

// receiving is a hand-over, as its receiver has it.
type receiving struct {
	h       *Handover
	from    string
	conn    net.Conn
	buffer  []byte
	offered frames.Address
	address floating.Address
	// had are the flows that were copied all the time before, and that haven't come yet; nil after the first pass.
	had map[tables.Key]conntrack.Flow
	// bytes is how much came, flows how many flows were taken, and passes how many ends there were.
	bytes, flows, passes int
}

// serve takes a hand-over, and tells the sender why if it isn't taken.
func (r *receiving) serve(ctx context.Context) error {
	err := r.take(ctx)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, errFollow) {
		reason := strings.TrimPrefix(err.Error(), frames.Refusal{}.Error())
		_ = frames.Write(r.conn, frames.Refused, []byte(reason[:min(len(reason), frames.MostReason)]))
	}
	if errors.Is(err, io.EOF) && r.passes >= 2 {
		return nil
	}
	return err
}

func (r *receiving) take(ctx context.Context) error {
	k, payload, err := frames.Read(r.conn, &r.buffer)
	if err != nil {
		return err
	}
	if k == frames.Follow {
		return errFollow
	}
	if k != frames.Offer || json.Unmarshal(payload, &r.offered) != nil {
		return frames.Refuse("%v: it is no offer", frames.ErrFrame)
	}
	address, err := r.incoming(ctx)
	if err != nil {
		return err
	}
	r.address = address
	faultpoint.At(faultpoint.ReceiveOffered)
	if err := r.before(ctx, address); err != nil {
		return fmt.Errorf("connections of before: %w", err)
	}
	table, err := r.h.cfg.Tables.Open(ctx, address.Pod)
	if err != nil {
		return err
	}
	defer table.Close()
	faultpoint.At(faultpoint.ReceiveBegun)
	if err := r.ready(0); err != nil {
		return err
	}
	return r.passesOf(ctx, address, table)
}

// before looks after the flows of the address that the router has. Those of a standby stay until the first pass is over: the hand-over may fail. Others
// are of a time when the node had the address, or of a hand-over that came to nothing.
func (r *receiving) before(ctx context.Context, a floating.Address) error {
	if !r.h.cfg.Standby.Keeps(a) {
		return r.h.cfg.Tables.Forget(ctx, a.Pod, a.Addrs())
	}
	all, err := r.h.cfg.Tables.Read(ctx, a.Pod, a.Addrs())
	r.had = map[tables.Key]conntrack.Flow{}
	for _, addr := range a.Addrs() {
		for _, f := range all[addr] {
			r.had[tables.KeyOf(f)] = f
		}
	}
	return err
}

// open gives flows to the table that the router may have of a standby, with the same translation or with another one.
func (r *receiving) open(ctx context.Context, table tables.Table, flows []conntrack.Flow) (int, error) {
	if r.had == nil {
		return table.Insert(ctx, flows)
	}
	var others []conntrack.Flow
	for _, f := range flows {
		if had, ok := r.had[tables.KeyOf(f)]; ok && had.Translated != f.Translated {
			others = append(others, had)
		}
		delete(r.had, tables.KeyOf(f))
	}
	if _, err := table.Delete(ctx, others); err != nil {
		return 0, err
	}
	return tables.Put(ctx, table, flows)
}

// passed ends a pass: flows of a standby that weren't in the first one are over.
func (r *receiving) passed(ctx context.Context, table tables.Table) error {
	r.passes++
	_, err := table.Delete(ctx, slices.Collect(maps.Values(r.had)))
	r.had = nil
	return err
}

// incoming returns the address that is offered, as soon as the watch says that it is to come.
func (r *receiving) incoming(ctx context.Context) (floating.Address, error) {
	ctx, cancel := context.WithTimeout(ctx, r.h.limits.watch)
	defer cancel()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		a, err := r.allowed(false)
		if err == nil {
			return a, nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return floating.Address{}, err
		}
	}
}

// allowed returns the address if it may be handed over now.
func (r *receiving) allowed(begun bool) (floating.Address, error) {
	b := r.h.cfg.Block(r.offered.Block)
	if b == nil || string(b.UID) != r.offered.ID {
		return floating.Address{}, frames.Refuse("there is no AddressBlock %q of this UID", r.offered.Block)
	}
	a, err := floating.Incoming(r.h.cfg.Node, r.from, b, begun)
	if err != nil {
		return floating.Address{}, frames.Refuse("%v", err)
	}
	return a, nil
}

// passesOf takes the flows of an address until the sender closes the connection.
func (r *receiving) passesOf(ctx context.Context, a floating.Address, table tables.Table) error {
	count := 0
	for {
		k, payload, err := frames.Read(r.conn, &r.buffer)
		if err != nil {
			return err
		}
		if r.bytes += len(payload); r.bytes > r.h.limits.bytes {
			return frames.Refuse("there is room for %d bytes", r.h.limits.bytes)
		}
		if _, err := r.allowed(r.passes >= 2); err != nil {
			return err
		}
		var n int
		switch k {
		case frames.Opened:
			n, err = r.put(ctx, a, payload, func(ctx context.Context, flows []conntrack.Flow) (int, error) { return r.open(ctx, table, flows) })
			faultpoint.At(faultpoint.ReceiveOpened)
		case frames.Changed:
			_, err = r.put(ctx, a, payload, table.Update)
		case frames.End:
			if err = r.passed(ctx, table); err == nil {
				faultpoint.At(faultpoint.ReceivePassed)
				err = r.ready(count)
			}
			count = 0
		default:
			err = frames.Refuse("%v: kind %d", frames.ErrFrame, k)
		}
		count += n
		r.flows += n
		if err != nil {
			return err
		}
	}
}

// put gives flows to the table, if all are of the address.
func (r *receiving) put(ctx context.Context, a floating.Address, payload []byte, put func(context.Context, []conntrack.Flow) (int, error)) (int, error) {
	flows, err := frames.ParseFlows(payload)
	if err != nil {
		return 0, frames.Refuse("%v", err)
	}
	for i := range flows {
		if !slices.Contains(a.Addrs(), flows[i].Translated.Addr()) {
			return 0, frames.Refuse("%s isn't of the address", flows[i])
		}
		flows[i].Timeout = min(flows[i].Timeout, tables.Longest)
	}
	return put(ctx, flows)
}

func (r *receiving) ready(flows int) error {
	text, err := json.Marshal(taken{flows})
	if err != nil {
		return err
	}
	return frames.Write(r.conn, frames.Ready, text)
}

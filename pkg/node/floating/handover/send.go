package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
)

// sending is a hand-over, as its sender has it.
type sending struct {
	h       *Handover
	address floating.Address
	node    string // that is to have the address
	slot    bool
	conn    net.Conn // nil before there is one
	buffer  []byte
	// known has the flows that were sent, with the state of TCP.
	known map[tables.Key]byte
	// bytes is how much was sent, flows how many flows the receiver has taken.
	bytes, flows int
}

// taken is the payload of Ready.
type taken struct {
	Flows int `json:"flows"`
}

// prepare copies all flows, and then those that have changed meanwhile.
func (s *sending) prepare(ctx context.Context) error {
	select {
	case s.h.slots <- struct{}{}:
		s.slot = true
	case <-ctx.Done():
		return fmt.Errorf("wait for hand-overs of other addresses: %w", ctx.Err())
	}
	var err error
	if s.conn, err = s.h.cfg.Dial(ctx, s.node); err != nil {
		return err
	}
	text, err := json.Marshal(frames.Address{Block: s.address.Block, ID: s.address.ID})
	if err != nil {
		return err
	}
	if err := s.during(ctx, func() error { return errors.Join(s.write(frames.Offer, text), s.answer()) }); err != nil {
		return err
	}
	faultpoint.At(faultpoint.HandoverOffered)
	for _, passed := range []faultpoint.Point{faultpoint.HandoverCopied, faultpoint.HandoverReady} {
		if err := s.pass(ctx); err != nil {
			return err
		}
		faultpoint.At(passed)
	}
	return nil
}

// pass sends the flows that weren't sent before, or have another state, and waits until the receiver has taken them.
func (s *sending) pass(ctx context.Context) error {
	all, err := s.h.cfg.Tables.Read(ctx, s.address.Pod, s.address.Addrs())
	if err != nil {
		return fmt.Errorf("read the connections of the router: %w", err)
	}
	return s.during(ctx, func() error {
		var fresh, others batch
		for _, a := range s.address.Addrs() {
			for _, f := range all[a] {
				id := tables.KeyOf(f)
				state, known := s.known[id]
				s.known[id] = f.TCP.State
				var err error
				switch {
				case !known:
					err = s.add(&fresh, frames.Opened, f)
				case state != f.TCP.State:
					err = s.add(&others, frames.Changed, f)
				}
				if err != nil {
					return err
				}
			}
		}
		return errors.Join(s.flush(&fresh, frames.Opened), s.flush(&others, frames.Changed), s.write(frames.End, nil), s.answer())
	})
}

// batch is a frame in the making.
type batch struct {
	payload []byte
	flows   int
}

func (s *sending) add(b *batch, k frames.Kind, f conntrack.Flow) error {
	b.payload = frames.AppendFlow(b.payload, f)
	if b.flows++; b.flows < frames.FlowsPerFrame {
		return nil
	}
	return s.flush(b, k)
}

func (s *sending) flush(b *batch, k frames.Kind) error {
	if b.flows == 0 {
		return nil
	}
	err := s.write(k, b.payload)
	b.payload, b.flows = b.payload[:0], 0
	return err
}

func (s *sending) write(k frames.Kind, payload []byte) error {
	if s.bytes += len(payload); s.bytes > s.h.limits.bytes {
		return fmt.Errorf("the connections take more than %d bytes", s.h.limits.bytes)
	}
	if err := frames.Write(s.conn, k, payload); err != nil {
		// Why the receiver has closed the connection may be there to be read.
		return errors.Join(s.said(), err)
	}
	return nil
}

// said returns the receiver's refusal, if there is one.
func (s *sending) said() error {
	_ = s.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if k, payload, err := frames.Read(s.conn, &s.buffer); err == nil && k == frames.Refused {
		return frames.Refuse("%.*s", frames.MostReason, payload)
	}
	return nil
}

// answer waits for the receiver.
func (s *sending) answer() error {
	var t taken
	if err := frames.Answer(s.conn, &s.buffer, &t); err != nil {
		return err
	}
	s.flows += t.Flows
	return nil
}

// during does something with the connection until ctx ends.
func (s *sending) during(ctx context.Context, do func() error) error {
	return frames.During(ctx, s.conn, do)
}

// close ends the hand-over.
func (s *sending) close() {
	if s.conn != nil {
		_ = s.conn.Close()
	}
	if s.slot {
		<-s.h.slots
		s.slot = false
	}
}

package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
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
	known map[key]byte
	// bytes is how much was sent, flows how many flows the receiver has taken.
	bytes, flows int
}

// key tells flows of an address apart.
type key struct {
	protocol byte
	src, dst netip.AddrPort
}

func keyOf(f conntrack.Flow) key { return key{f.Protocol, f.Src, f.Dst} }

// offered is the payload of offer, and taken that of ready.
type (
	offered struct {
		Block string `json:"block"`
		ID    string `json:"id"`
		// Router is the pod that is to keep the flows, as the sender knows it; empty if it doesn't say.
		Router types.UID `json:"router,omitempty"`
	}
	taken struct {
		Flows int `json:"flows"`
	}
)

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
	text, err := json.Marshal(offered{Block: s.address.Block, ID: s.address.ID})
	if err != nil {
		return err
	}
	if err := s.during(ctx, func() error { return errors.Join(s.write(offer, text), s.answer()) }); err != nil {
		return err
	}
	for range 2 {
		if err := s.pass(ctx); err != nil {
			return err
		}
	}
	return nil
}

// pass sends the flows that weren't sent before, or have another state, and waits until the receiver has taken them.
func (s *sending) pass(ctx context.Context) error {
	all, err := s.h.dumps.call(ctx, s.address.Pod, s.address.Addrs())
	if err != nil {
		return fmt.Errorf("read the connections of the router: %w", err)
	}
	return s.during(ctx, func() error {
		var fresh, others batch
		for _, a := range s.address.Addrs() {
			for _, f := range all[a] {
				id := keyOf(f)
				state, known := s.known[id]
				s.known[id] = f.TCP.State
				var err error
				switch {
				case !known:
					err = s.add(&fresh, opened, f)
				case state != f.TCP.State:
					err = s.add(&others, changed, f)
				}
				if err != nil {
					return err
				}
			}
		}
		return errors.Join(s.flush(&fresh, opened), s.flush(&others, changed), s.write(end, nil), s.answer())
	})
}

// batch is a frame in the making.
type batch struct {
	payload []byte
	flows   int
}

func (s *sending) add(b *batch, k kind, f conntrack.Flow) error {
	b.payload = appendFlow(b.payload, f)
	if b.flows++; b.flows < flowsPerFrame {
		return nil
	}
	return s.flush(b, k)
}

func (s *sending) flush(b *batch, k kind) error {
	if b.flows == 0 {
		return nil
	}
	err := s.write(k, b.payload)
	b.payload, b.flows = b.payload[:0], 0
	return err
}

func (s *sending) write(k kind, payload []byte) error {
	if s.bytes += len(payload); s.bytes > s.h.limits.bytes {
		return fmt.Errorf("the connections take more than %d bytes", s.h.limits.bytes)
	}
	if err := writeFrame(s.conn, k, payload); err != nil {
		// Why the receiver has closed the connection may be there to be read.
		return errors.Join(s.said(), err)
	}
	return nil
}

// said returns the receiver's refusal, if there is one.
func (s *sending) said() error {
	_ = s.conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if k, payload, err := readFrame(s.conn, &s.buffer); err == nil && k == refused {
		return refuse("%.*s", mostReason, payload)
	}
	return nil
}

// answer waits for the receiver.
func (s *sending) answer() error {
	k, payload, err := readFrame(s.conn, &s.buffer)
	switch {
	case err != nil:
		return fmt.Errorf("wait for the other node: %w", err)
	case k == refused:
		return refuse("%.*s", mostReason, payload)
	case k != ready:
		return fmt.Errorf("%w: kind %d", errFrame, k)
	}
	var t taken
	if err := json.Unmarshal(payload, &t); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	s.flows += t.Flows
	return nil
}

// during does something with the connection until ctx ends.
func (s *sending) during(ctx context.Context, do func() error) error { return during(ctx, s.conn, do) }

func during(ctx context.Context, conn net.Conn, do func() error) error {
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	return errors.Join(do(), ctx.Err())
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

package standby

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
)

// exchange takes turns by one connection.
type exchange struct {
	st     *stream
	ctx    context.Context
	conn   net.Conn
	buffer []byte
}

// answer is the payload of frames.Ready.
type answer struct {
	// Taken is how many flows are new to the follower.
	Taken int `json:"taken"`
	// Refused says why flows of addresses weren't taken, by block.
	Refused map[string]string `json:"refused,omitempty"`
	// Others says that flows of so many addresses weren't taken that Refused doesn't have all.
	Others bool `json:"others,omitempty"`

	size int // of Refused, at most, as JSON
}

// refuse says why flows of an address weren't taken. An answer is one frame: when there are very many addresses it says of some only that, and at last
// only that there are others.
func (a *answer) refuse(block, why string) {
	why = why[:min(len(why), frames.MostReason)]
	name := 6*len(block) + len(`"":"",`) // a byte may become six
	if _, ok := a.Refused[block]; ok {
		return
	}
	if a.size+name+6*len(why) > frames.MostPayload/2 {
		why = ""
	}
	if a.size+name > frames.MostPayload-100 {
		a.Others = true
		return
	}
	if a.Refused == nil {
		a.Refused = map[string]string{}
	}
	a.Refused[block] = why
	a.size += name + 6*len(why)
}

// refuses says whether flows of an address weren't taken, or may not have been.
func (a answer) refuses(block string) bool {
	_, ok := a.Refused[block]
	return ok || a.Others
}

// take takes a turn, and says when the next one is.
func (x *exchange) take() (time.Duration, error) {
	whole, flows := x.read()
	if x.ctx.Err() != nil {
		return 0, x.ctx.Err()
	}
	over, begun := x.st.turn()
	sent := 0
	for _, a := range whole {
		n, err := x.whole(a, flows)
		if sent += n; err != nil {
			return 0, err
		}
	}
	if _, err := x.flows(frames.Ended, maps.Values(over)); err != nil {
		return 0, err
	}
	n, err := x.flows(frames.Opened, maps.Values(begun))
	if err != nil {
		return 0, err
	}
	faultpoint.At(faultpoint.StandbySent)
	got, err := x.answer()
	if err != nil {
		return 0, err
	}
	faultpoint.At(faultpoint.StandbySettled)
	x.st.s.metrics.flows.WithLabelValues(sideSent, "opened").Add(float64(sent + n))
	x.st.s.metrics.flows.WithLabelValues(sideSent, "ended").Add(float64(len(over)))
	next, news := x.st.settled(whole, got)
	if news {
		x.st.told()
	}
	return next, nil
}

// write writes a frame, for which the other node has some time.
func (x *exchange) write(k frames.Kind, payload []byte) error {
	if err := x.wait(); err != nil {
		return err
	}
	return frames.Write(x.conn, k, payload)
}

// wait gives the other node time.
func (x *exchange) wait() error {
	err := x.conn.SetDeadline(time.Now().Add(x.st.s.limits.answer))
	return errors.Join(err, x.ctx.Err()) // the end of ctx sets another deadline
}

// read reads the flows of the addresses whose turn it is.
func (x *exchange) read() (whole []lead, flows tables.Found) {
	byPod := map[types.UID][]lead{}
	for _, a := range x.st.starting(time.Now()) {
		byPod[a.Pod] = append(byPod[a.Pod], a)
	}
	flows = tables.Found{}
	for pod, all := range byPod {
		var addrs []netip.Addr
		for _, a := range all {
			addrs = append(addrs, a.Addrs()...)
		}
		read, err := x.st.s.cfg.Tables.Read(x.ctx, pod, addrs)
		if err != nil {
			x.st.failed(all, fmt.Errorf("read the connections of the router: %w", err))
			continue
		}
		for _, addr := range addrs {
			flows[addr] = read[addr]
		}
		whole = append(whole, all...)
	}
	return whole, flows
}

// whole sends all flows of an address. Echoes and connections that are over aren't kept.
func (x *exchange) whole(a lead, flows tables.Found) (sent int, err error) {
	name, err := json.Marshal(frames.Address{Block: a.Block, ID: a.ID, Router: a.router})
	if err != nil {
		return 0, err
	}
	if err := x.write(frames.Begin, name); err != nil {
		return 0, err
	}
	faultpoint.At(faultpoint.StandbyBegun)
	sent, err = x.flows(frames.Opened, func(yield func(conntrack.Flow) bool) {
		for _, addr := range a.Addrs() {
			for _, f := range flows[addr] {
				if !f.Echo() && !f.Over() && !yield(f) {
					return
				}
			}
		}
	})
	return sent, errors.Join(err, x.write(frames.Complete, name))
}

// flows sends flows.
func (x *exchange) flows(k frames.Kind, all iter.Seq[conntrack.Flow]) (sent int, err error) {
	var payload []byte
	n := 0
	flush := func() error {
		if n == 0 {
			return nil
		}
		err := x.write(k, payload)
		sent += n
		payload, n = payload[:0], 0
		return err
	}
	for f := range all {
		payload = frames.AppendFlow(payload, f)
		if n++; n == frames.FlowsPerFrame {
			if err := flush(); err != nil {
				return sent, err
			}
		}
	}
	return sent, flush()
}

// answer ends a turn, and returns what the other node says to it.
func (x *exchange) answer() (got answer, err error) {
	if err := x.write(frames.End, nil); err != nil {
		return got, err
	}
	err = frames.Answer(x.conn, &x.buffer, &got)
	return got, err
}

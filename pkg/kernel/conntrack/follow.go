package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

const (
	groupUpdate  = 2 // NFNLGRP_CONNTRACK_UPDATE
	groupDestroy = 3 // NFNLGRP_CONNTRACK_DESTROY

	tcpEstablished = 3
)

// FollowBuffer is the buffer for events, in bytes. It has room for those of some 10,000 flows that begin or end at once.
const FollowBuffer = 16 << 20

// events is a parameter. With 1 the kernel also tells of flows that began while nobody listened (Documentation/networking/nf_conntrack-sysctl.rst).
var events = sysctl.Setting{Key: "net/netfilter/nf_conntrack_events", Value: "1"}

// Event is a change of a translated flow.
type Event struct {
	Flow
	// Over says that the flow has ended: it is gone from the table, or both sides have ended it. Otherwise it has become of use elsewhere: see Translated.
	Over bool
}

// Events are changes of flows in a table from a moment on. They aren't safe for concurrent use, but for Close.
type Events struct{ listener *rtnl.Listener }

// Events begins to receive changes. It keeps the namespace alive until Close. For the flows that are there already, call Translated
// afterwards. The buffer is FollowBuffer, or less in tests.
//
// The kernel needn't tell of new flows: they aren't of use elsewhere yet.
func (t *Table) Events(buffer int) (*Events, error) {
	if _, err := sysctl.Set(t.ns, events); err != nil && !errors.Is(err, sysctl.ErrNotExist) {
		return nil, fmt.Errorf("let the kernel tell of flows: %w", err)
	}
	l, err := t.h.Listen(nil, groupUpdate, groupDestroy)
	if err != nil {
		return nil, err
	}
	if err := l.SetBuffer(buffer); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &Events{l}, nil
}

// Close ends the reception.
func (e *Events) Close() error { return e.listener.Close() }

// Run calls each with the events of flows whose source is translated to a wanted address. It calls lost when events were lost: then the table
// has to be read anew. Events that come within settle wake it once. Run returns when ctx ends, or with an error.
func (e *Events) Run(ctx context.Context, settle time.Duration, wanted func(netip.Addr) bool, each func(Event), lost func()) error {
	return e.listener.Run(ctx, settle, func(m *rtnl.Message) bool {
		if m == nil {
			lost()
			return false
		}
		event, ok, err := parseEvent(m.Kind(), m.Body, wanted)
		switch {
		case err != nil:
			lost()
		case ok:
			each(event)
		}
		return false
	}, func() {})
}

// parseEvent reads a notification; ok is false if it is of no interest. A flow is reported as over only once, if the kernel tells the state of a connection
// that is gone, as it does since Linux 5.13.
func parseEvent(kind uint16, body []byte, wanted func(netip.Addr) bool) (e Event, ok bool, err error) {
	f, err := parse(body)
	if err != nil {
		return Event{}, false, err
	}
	if _, _, back := f.translated(); !wanted(back) {
		return Event{}, false, nil
	}
	if e.Flow, ok = f.copyOf(); !ok || f.status&statusAssured == 0 {
		return Event{}, false, nil
	}
	gone, over := kind == typeDelete, e.Flow.Over()
	e.Over = gone || over
	ended := over && !gone || gone && !over
	begun := e.Protocol != unix.IPPROTO_TCP || e.TCP.State == tcpEstablished
	return e, ended || !e.Over && begun, nil
}

// Over says whether both sides have ended the connection.
func (f Flow) Over() bool {
	return f.Protocol == unix.IPPROTO_TCP && (f.TCP.State == tcpTimeWait || f.TCP.State == tcpClose)
}

// Echo says whether the flow is an echo of ICMP or ICMPv6.
func (f Flow) Echo() bool { return echoID[f.Protocol] != 0 }

// Delete deletes flows, and returns how many of them the table had. It doesn't delete a flow that has the same addresses and ports and another translation.
func (t *Table) Delete(ctx context.Context, flows []Flow) (int, error) {
	for _, f := range flows {
		if err := f.valid(); err != nil {
			return 0, err
		}
	}
	return t.h.Apply(ctx, unix.ENOENT, rtnl.Requests(flows, Flow.removal)...)
}

// removal deletes the flow by the tuple of its answers, which has the translation.
func (f Flow) removal() rtnl.Request {
	family := f.family()
	reply := Flow{Protocol: f.Protocol, Src: f.Dst, Dst: f.Translated}
	if _, echo := echoID[f.Protocol]; echo {
		reply.Src = netip.AddrPortFrom(f.Dst.Addr(), f.Translated.Port())
	}
	b := append([]byte{family, 0, 0, 0}, reply.tuple(ctaTupleReply, family, true)...)
	return rtnl.NewRequest(typeDelete, 0, b, "conntrack -D %s", f)
}

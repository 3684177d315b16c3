// Package handover copies the connections of a floating address to the node that is to have it next, from the network namespace of the
// router here to that of the router there.
//
// It owns what two nodes say about that, and when. It must not know how they find and trust each other (see package peers), nor when an
// address moves.
//
//	holder                                   next holder
//	1 offers the address                     looks whether the AddressBlock says so, and forgets what its router has of the address unless it is a standby's
//	2 sends all flows, then an end           inserts them, forgets others, and says how many
//	3 the same of what changed meanwhile     the same; then the address moves
//	4 once more, when it has moved           the same, if it has the address by now
//	5 forgets the flows after 10 s
//
// Until clients send to the next router, the one of before forwards with the address, and its node lets such packets out: their answers come to the next one, which knows their
// connections by step 3 or, if they were opened between 3 and the moment at which the node stopped to answer, by 4.
//
// Of addresses with a standby they are also copied all the time, to the node that takes the address when its holder fails: see package standby.
//
// Half-open connections aren't copied: their next packet opens them at the next router. A hand-over that fails, or isn't over within 10 s, costs
// the connections that weren't copied, and keeps no address from moving.
package handover

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/frames"
	"github.com/coil-net/coil/pkg/node/floating/tables"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// most is how many hand-overs are sent at once.
const most = 64

// Connections is how many connections to one node are open at once.
const Connections = most

// limits are what a hand-over may take.
type limits struct {
	// total is how long an address waits for it at most, late how long it may take after that.
	total, late time.Duration
	// watch is how much later the watch of one node may be than that of another.
	watch time.Duration
	// straggle is for how long a router forwards packets of clients that don't know yet where the address is.
	straggle time.Duration
	// unclaimed is for how long a router keeps flows of an address that hasn't come: the node that has it may have died while it handed it over, and a
	// busy one takes it late.
	unclaimed time.Duration
	// bytes is how much is sent.
	bytes int
}

var defaults = limits{total: 10 * time.Second, late: 3 * time.Second, watch: 2 * time.Second, straggle: ruleset.Straggling, unclaimed: time.Minute, bytes: 64 << 20}

// Config is what a Handover is made of.
type Config struct {
	Node string
	// Block returns an AddressBlock of the watch, nil if there is none.
	Block func(name string) *v2.AddressBlock
	// Tables are those of the pods of this node.
	Tables *tables.Tables
	// Straggle lets a pod of this node send from addresses that have moved away, for as long as there are clients that don't know.
	Straggle func(ctx context.Context, pod types.UID, addrs ...netip.Addr) error
	// Dial opens a connection to a node that nobody else reads or changes.
	Dial func(ctx context.Context, node string) (net.Conn, error)
	// Standby copies connections all the time.
	Standby Standby
}

// Standby copies connections all the time; see package standby.
type Standby interface {
	// Serve takes what another node copies all the time, by a connection whose first frame is read.
	Serve(ctx context.Context, from string, conn net.Conn)
	// Keeps says whether a router here has flows of the address for the node that has it.
	Keeps(a floating.Address) bool
	// Again has all flows of an address copied anew, if it is here.
	Again(block string)
}

// Handover implements floating.Mover, and the other side of it. Its methods may be called concurrently.
type Handover struct {
	cfg     Config
	limits  limits
	metrics *metrics
	life    context.Context // without an end
	closing chan struct{}
	slots   chan struct{} // has an element for each hand-over that is sent
	group   sync.WaitGroup

	mu     sync.Mutex
	closed bool
	// moving are the hand-overs that this node sends and that aren't over, by the UID of the block.
	moving map[string]int
	// asked is how often flows were to be forgotten, and forgets the number of the last time, by the UID of the block.
	asked   int
	forgets map[string]int
}

var _ floating.Mover = (*Handover)(nil)

// New returns a Handover, whose work ends by Finish.
func New(ctx context.Context, cfg Config, registry prometheus.Registerer) *Handover {
	return &Handover{
		cfg: cfg, limits: defaults, metrics: newMetrics(registry), life: context.WithoutCancel(ctx), closing: make(chan struct{}), slots: make(chan struct{}, most),
		moving: map[string]int{}, forgets: map[string]int{},
	}
}

// Finish ends what can wait, and waits until all else is done. Connections of the last moment aren't copied. No Move may be in progress.
func (h *Handover) Finish() {
	h.mu.Lock()
	if !h.closed {
		h.closed = true
		close(h.closing)
	}
	h.mu.Unlock()
	h.group.Wait()
}

// later does something for which Finish waits. After Finish it isn't done.
func (h *Handover) later(do func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.group.Go(do)
	}
}

// Move implements floating.Mover.
func (h *Handover) Move(ctx context.Context, a floating.Address, node string) {
	began := time.Now()
	h.move(a.ID, 1)
	log := klog.FromContext(ctx).WithValues("block", a.Block, "node", node)
	within, cancel := context.WithTimeout(ctx, h.limits.total)
	defer cancel()
	s := &sending{h: h, address: a, node: node, known: map[tables.Key]byte{}}
	err := s.prepare(within)
	h.metrics.took(began)
	if err != nil {
		h.move(a.ID, -1)
		s.close()
		result := failed
		if errors.As(err, new(frames.Refusal)) {
			result = refused
		}
		h.metrics.ended(sent, result, s.flows)
		log.Error(err, "The connections of a floating address aren't copied to the node that is to have it: they end", "copied", s.flows)
		h.later(func() { h.forget(h.limits.straggle, a) })
		return
	}
	log.Info("Copied the connections of a floating address to the node that is to have it", "connections", s.flows, "took", time.Since(began))
	h.group.Go(func() {
		h.follow(ctx, s)
		h.move(a.ID, -1)
		h.metrics.ended(sent, done, s.flows)
		h.forget(h.limits.straggle, a)
	})
}

// move notes that a hand-over begins or ends.
func (h *Handover) move(id string, change int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.moving[id] += change; h.moving[id] == 0 {
		delete(h.moving, id)
	}
}

// Moves says whether this node hands an address over: until that is over, the next holder doesn't have all flows.
func (h *Handover) Moves(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.moving[id] > 0
}

// follow copies what was opened until the address had moved, which is when moved ends.
func (h *Handover) follow(moved context.Context, s *sending) {
	defer s.close()
	log := klog.FromContext(moved)
	select {
	case <-moved.Done():
	case <-time.After(h.limits.late):
		return // it doesn't move now
	}
	if !h.moved(s) {
		return
	}
	faultpoint.At(faultpoint.HandoverMoved)
	if err := h.cfg.Straggle(h.life, s.address.Pod, s.address.Addrs()...); err != nil {
		log.Error(err, "Packets of clients that don't know yet where a floating address is are dropped", "block", s.address.Block)
	}
	ctx, cancel := context.WithTimeout(h.life, h.limits.late)
	defer cancel()
	if err := s.pass(ctx); err != nil {
		log.Info("Connections of the last moment before a floating address moved aren't copied", "block", s.address.Block, "reason", err)
	}
	faultpoint.At(faultpoint.HandoverDone)
}

// moved says whether the address is at the node by now. The watch may know that a moment later.
func (h *Handover) moved(s *sending) bool {
	late := time.After(h.limits.watch)
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		b := h.cfg.Block(s.address.Block)
		switch {
		case b == nil || b.Floating == nil || string(b.UID) != s.address.ID:
			return false
		case b.Floating.Holding.Holder == s.node:
			return true
		}
		select {
		case <-again.C:
		case <-h.closing: // the watch says no more
			return false
		case <-late:
			return false
		}
	}
}

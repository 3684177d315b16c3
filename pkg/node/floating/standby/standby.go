// Package standby copies the connections of this node's floating addresses all the time to the nodes that take the addresses when this one fails, and takes
// those of other nodes' addresses into the routers here.
//
// It owns what two nodes say about that, and when. It must not know how they find and trust each other (see package peers), nor when an address moves: its
// connections are copied by package handover then.
//
//	holder                                                      follower
//	begins an address, sends all its flows, and completes it    looks whether the AddressBlock says so, inserts them, and deletes all others
//	every 200 ms: flows that ended, and that began before that  deletes and inserts them
//	ends each turn                                              says what it has taken, and which addresses it doesn't take
//
// Nothing waits for the other end. What it doesn't take in time is kept, one state for each flow, up to a bound. Beyond the bound, and when the kernel has
// lost events, all flows are sent anew. They are also sent anew from time to time: the follower's kernel sees no packets, and would forget
// flows that live, and keep others whose end was lost. Flows that are shorter than a turn are never sent.
package standby

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/tables"
)

// Connections is how many connections to one node are open at once.
const Connections = 1

// Config is what a Standby is made of.
type Config struct {
	Node string
	// Block returns an AddressBlock of the watch, nil if there is none.
	Block func(name string) *v2.AddressBlock
	// Tables are those of the pods of this node.
	Tables *tables.Tables
	// Follow begins to receive changes of the table of a pod, and Here says whether a pod is on this node.
	Follow func(ctx context.Context, pod types.UID) (Events, error)
	Here   func(pod types.UID) bool
	// Moves says whether this node hands an address over, by the UID of its block.
	Moves func(id string) bool
	// Dial opens a connection to a node that nobody else reads or changes.
	Dial func(ctx context.Context, node string) (net.Conn, error)
	// Told, if there is one, is called when the state of a block's Standby may be another one. It doesn't block.
	Told func(block string)
}

// Standby copies connections all the time, until Finish. Its methods may be called concurrently.
type Standby struct {
	cfg     Config
	limits  limits
	metrics *metrics
	life    context.Context
	cancel  context.CancelFunc
	group   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	blocks  map[string]*v2.AddressBlock // of addresses with a standby
	leads   map[string]lead             // by block: addresses that this node has
	watches map[types.UID]*watch
	streams map[string]*stream // by node
	// follows are addresses of which routers here may have flows for another node, by block.
	follows map[string]floating.Address
}

// limits are the times and bounds of a Standby.
type limits struct {
	// settle is for how long events are collected. turn is the time between two messages to the other node, and beat the same if there is nothing to
	// say. answer is how long the other node may take.
	settle, turn, beat, answer time.Duration
	// whole is the time between two copies of all flows, and kept is for how long the other node keeps them at least.
	whole, kept time.Duration
	// retry and mostRetry are the times between two attempts.
	retry, mostRetry time.Duration
	// waiting is how many flows may wait for one node.
	waiting int
}

var defaults = limits{
	settle: 100 * time.Millisecond, turn: 200 * time.Millisecond, beat: 10 * time.Second, answer: 10 * time.Second, whole: 2 * time.Minute, kept: 5 * time.Minute,
	retry: time.Second, mostRetry: 30 * time.Second, waiting: 1 << 16,
}

// Events are changes of the flows of a router; see conntrack.Events.
type Events interface {
	Run(ctx context.Context, settle time.Duration, wanted func(netip.Addr) bool, each func(conntrack.Event), lost func()) error
	Close() error
}

// lead is an address that this node has, and the node that keeps its connections, with the router there.
type lead struct {
	floating.Address
	node   string
	router types.UID
}

// New returns a Standby, whose work ends by Finish.
func New(ctx context.Context, cfg Config, registry prometheus.Registerer) *Standby {
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &Standby{
		cfg: cfg, limits: defaults, life: life, cancel: cancel,
		blocks: map[string]*v2.AddressBlock{}, leads: map[string]lead{}, watches: map[types.UID]*watch{}, streams: map[string]*stream{}, follows: map[string]floating.Address{},
	}
	s.metrics = newMetrics(registry, s)
	return s
}

// Finish ends the copying, and waits until that is done.
func (s *Standby) Finish() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.cancel()
	s.group.Wait()
}

// Changed takes a change of an AddressBlock; nil is one that isn't there.
func (s *Standby) Changed(before, after *v2.AddressBlock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if before != nil && (after == nil || after.UID != before.UID) {
		s.forget(before.Name)
		s.lead(before.Name, lead{})
		delete(s.blocks, before.Name)
	}
	if after == nil {
		return
	}
	_, known := s.blocks[after.Name]
	// A condition may be of an earlier life of this program, or of another holder.
	said := known || meta.FindStatusCondition(after.Status.Conditions, v2.BlockStandbyInStep) != nil
	if f := after.Floating; s.cfg.Told != nil && f != nil && (said || f.Standby) && (f.Holding.Holder == s.cfg.Node || f.Holding.Holder == "") {
		defer s.cfg.Told(after.Name)
	}
	if after.Floating == nil || !after.Floating.Standby {
		if known {
			s.forget(after.Name)
			s.lead(after.Name, lead{})
			delete(s.blocks, after.Name)
		}
		return
	}
	s.blocks[after.Name] = after
	s.look(after)
	if _, stale := floating.Stale(s.cfg.Node, after); stale {
		s.forget(after.Name)
	}
	if after.Floating.Holding.Holder == s.cfg.Node {
		delete(s.follows, after.Name) // they live here now
	}
}

// PodsChanged says that Here may answer otherwise than before.
func (s *Standby) PodsChanged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.blocks {
		s.look(b)
	}
}

// look finds out to which node the connections of an address are copied.
func (s *Standby) look(b *v2.AddressBlock) {
	a, to, ok := floating.Follower(s.cfg.Node, b)
	if !ok || !s.cfg.Here(a.Pod) {
		s.lead(b.Name, lead{})
		return
	}
	s.lead(b.Name, lead{a, to.Node, to.PodUID})
}

// lead has the connections of an address copied to a node; the zero lead ends that.
func (s *Standby) lead(block string, next lead) {
	before := s.leads[block]
	if before == next || s.closed {
		return
	}
	delete(s.leads, block)
	if s.cfg.Told != nil {
		defer s.cfg.Told(block)
	}
	if before.node != "" {
		st, w := s.streams[before.node], s.watches[before.Pod]
		if st.drop(block) {
			st.cancel()
			delete(s.streams, before.node)
		}
		if w.drop(before.Address) {
			w.cancel()
			delete(s.watches, before.Pod)
		}
	}
	if next.node == "" {
		return
	}
	s.leads[block] = next
	st, w := s.streams[next.node], s.watches[next.Pod]
	if st == nil {
		st = s.newStream(next.node)
	}
	if w == nil {
		w = s.newWatch(next.Pod)
	}
	w.add(next, st)
}

// forget deletes the flows that a router here has for another node.
func (s *Standby) forget(block string) {
	a, ok := s.follows[block]
	if !ok || s.closed {
		return
	}
	delete(s.follows, block)
	s.group.Go(func() {
		if err := s.cfg.Tables.Forget(context.WithoutCancel(s.life), a.Pod, a.Addrs()); err != nil {
			klog.FromContext(s.life).V(2).Info("A router keeps connections of a floating address that another node keeps now", "block", block, "reason", err)
		}
	})
}

// Again has all flows of an address sent anew, if it is here: the kernel doesn't tell of those that were inserted.
func (s *Standby) Again(block string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l, ok := s.leads[block]; ok {
		s.streams[l.node].again(block)
	}
}

// following notes that a router here gets flows for another node.
func (s *Standby) following(a floating.Address) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follows[a.Block] = a
}

// Keeps says whether a router here has flows of the address for the node that has it.
func (s *Standby) Keeps(a floating.Address) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept, ok := s.follows[a.Block]
	return ok && kept == a
}

// State is how far the connections of an address are copied.
type State struct {
	// Node is the node to which they are copied.
	Node string
	// Since is since when that node has lacked connections of the address, for more than a moment; zero if it has all. Why says why.
	Since time.Time
	Why   string
}

// State returns how far the connections of a block's address are copied; ok is false if they aren't copied from here.
func (s *Standby) State(block string) (state State, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l, ok := s.leads[block]
	if !ok {
		return State{}, false
	}
	state = State{Node: l.node}
	state.Since, state.Why = s.streams[l.node].state(block)
	return state, true
}

// wait waits for some time, and says whether ctx goes on.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// Package floating lets the node hold floating addresses: it drives the protocol of package holding.
//
// It owns what the protocol needs on a node: records, which it reads from AddressBlocks and writes to them; time; and the order in which
// things are done. It must not know how messages travel, nor by what objects of the kernel the node answers for an address.
//
// One goroutine has the protocol's machine, and waits for nothing but events. Its actions go to others:
//
//	action   done by                            may be late because
//	Send     Messages, which may lose it        a lost message is like a node that isn't heard
//	Read     one request at a time              a read counts from its beginning on
//	Write    at most writers requests           a write of an older record fails
//	Answer   one call of Place for an address   the last one says for how long, and Place keeps to that
//	Stop     the same                           never: it ends a call for Answer, and is tried until it is done
//
// A Write comes after the Stop before it is done, since the next holder begins when it sees the record. If Place can't stop, the
// Write waits for the end of the time for which the node was to answer.
//
// The holder reads what it has by a label of the blocks. If somebody changes that, the holder writes it again.
//
// The node gives an address up if it isn't among its successors any more, if the pod there is another one than the record says, or if
// that pod can't take packets. A node that has an address of Services needs no pod. So whoever moves an address without a gap leaves the node among the successors until it has moved. As long as
// the pod is on the node, its connections are there, and the first successor that is heard is prepared before, within copyTime.
package floating

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	typed "github.com/coil-net/coil/generated/clientset/versioned/typed/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/holding"
)

const (
	// requestTimeout is that of a request to the API server. A read has to end within a lease.
	requestTimeout = time.Second
	// writers is how many records are written at once.
	writers = 32
	// backlog is how many messages may wait. More are lost.
	backlog = 1024
	// copyTime is how long an address that is given up waits for its connections to be copied.
	copyTime = 2 * time.Second
	// remembered is for how long a block that is gone is known to be.
	remembered = 10 * time.Minute
)

// Port is a port by which clients reach a Service.
type Port struct {
	// Protocol is the protocol of IP, such as unix.IPPROTO_TCP.
	Protocol uint8
	Port     uint16
}

// Order asks to answer for an address.
type Order struct {
	Address
	// Ports are those of Services at the address, sorted, each once.
	Ports []Port
	// Epoch is greater in each node that has the address than in the one before it.
	Epoch int64
	// Until is when the node has to have stopped.
	Until time.Time
	// Announce asks to tell so to all on the link.
	Announce bool
}

// Place makes the node answer for addresses. Of one address, one method is called at a time.
type Place interface {
	// Answer makes the node answer for an address, or go on with it. The kernel stops at the time Until by itself, whether this program
	// still runs or not. Answer returns when ctx ends, at the latest at that time, and changes nothing in the kernel afterwards.
	Answer(context.Context, Order) error
	// Stop makes the node stop at once, also if an earlier life of this program made it answer.
	Stop(context.Context, Address) error
}

// Targets are the pods of the node to which packets for addresses go, unless these are of Services. Its methods don't block.
type Targets interface {
	// Here says whether a pod is on the node, ready or not: its connections can be read.
	Here(pod types.UID) bool
	// Ready says whether the pod of an address could take packets for it now, and whether that is known yet.
	Ready(Address) (ready, known bool)
}

// Mover prepares another node for an address.
type Mover interface {
	// Move returns when the other node has all it needs, or when there is no more time to wait for that. ctx ends when the address has moved,
	// or isn't to move any more.
	Move(ctx context.Context, a Address, node string)
}

// Messages carries messages to other nodes. Its methods don't block.
type Messages interface {
	// Send sends a message to a node. It may be lost.
	Send(node string, m holding.Message)
	// Peers says where nodes are.
	Peers(map[string][]netip.Addr)
}

// Config is what a Driver is made of.
type Config struct {
	Node     string
	Blocks   typed.AddressBlockInterface
	Place    Place
	Targets  Targets
	Messages Messages
	// Mover may be nil: nodes need nothing then.
	Mover Mover
}

// Driver holds addresses. Its methods may be called concurrently.
type Driver struct {
	cfg      Config
	copyTime time.Duration
	orders   *orders
	metrics  *metrics
	writing  chan struct{} // has an element for each write
	// received are messages, done are functions for the goroutine that has the machine.
	received chan holding.Received
	done     chan func()
	wake     chan struct{}

	mu sync.Mutex // guards what wake tells of
	// seen has the newest block of each UID, nil for one that is gone. disputed are addresses that another host says are at it.
	// targets says that Targets may answer otherwise than before.
	seen     map[types.UID]*v2.AddressBlock
	disputed map[string]bool
	// blocked says of addresses whether the node drops their packets.
	blocked map[string]bool
	targets bool

	// All below belongs to the goroutine of Run.
	began   time.Time
	machine *holding.Machine
	group   sync.WaitGroup
	blocks  map[string]known
	// fed are the addresses that the machine knows.
	fed map[string]*fed
	// gone is when blocks were found to be gone. An answer of the API server, or the watch, may still show one for a while.
	gone map[string]time.Time
}

// fed is an address that the machine knows.
type fed struct {
	// told is what the machine was told of the target.
	told struct{ ready, known bool }
	// yields is there while the address is given up since its pod isn't ready: its end is that of the time to prepare another node.
	yields *time.Timer
	// moving is the node that is prepared for the address, and cancel ends that.
	moving string
	cancel context.CancelFunc
}

// New returns a Driver that doesn't run.
func New(cfg Config, registry prometheus.Registerer) *Driver {
	m := newMetrics(registry)
	return &Driver{
		cfg: cfg, copyTime: copyTime, metrics: m, orders: newOrders(cfg.Place, m),
		writing: make(chan struct{}, writers), received: make(chan holding.Received, backlog), done: make(chan func()), wake: make(chan struct{}, 1),
		seen: map[types.UID]*v2.AddressBlock{}, disputed: map[string]bool{}, blocked: map[string]bool{},
		blocks: map[string]known{}, fed: map[string]*fed{}, gone: map[string]time.Time{},
	}
}

// Changed takes a change of an AddressBlock from a watch of all floating ones; nil is one that isn't there.
func (d *Driver) Changed(before, after *v2.AddressBlock) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if before != nil && (after == nil || before.UID != after.UID) {
		d.seen[before.UID] = nil
	}
	if after != nil {
		d.seen[after.UID] = after
	}
	d.awake()
}

// TargetsChanged says that Targets may answer otherwise than before.
func (d *Driver) TargetsChanged() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.targets = true
	d.awake()
}

func (d *Driver) awake() {
	select {
	case d.wake <- struct{}{}:
	default: // it is told already
	}
}

// Receive takes a message of another node. It doesn't block.
func (d *Driver) Receive(from string, m holding.Message) {
	select {
	case d.received <- holding.Received{From: from, Message: m}:
	default:
		d.metrics.lost.Inc()
	}
}

// Disputed says that another host on the link says that an address is at it.
func (d *Driver) Disputed(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.disputed[id] = true
	d.awake()
}

// Blocked says whether the node drops packets of an address that it has, and should forward.
func (d *Driver) Blocked(id string, blocked bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.blocked[id] = blocked
	d.awake()
}

// tell lets do be called by the goroutine of Run.
func (d *Driver) tell(ctx context.Context, do func()) {
	select {
	case d.done <- do:
	case <-ctx.Done():
	}
}

// Run holds addresses until ctx ends. The kernel answers on for as long as it was told to.
func (d *Driver) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer d.orders.wait()
	defer d.group.Wait()
	defer cancel()
	d.began = time.Now()
	d.orders.began = d.began
	d.machine = holding.New(d.cfg.Node, rand.Uint64(), 0)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
			d.step(ctx, holding.Tick{})
		case m := <-d.received:
			d.step(ctx, m)
		case do := <-d.done:
			do()
		case <-d.wake:
			d.look(ctx)
		}
		timer.Reset(d.machine.Next() - time.Since(d.began))
	}
}

// step gives an event to the machine, and has its actions done.
func (d *Driver) step(ctx context.Context, e holding.Event) {
	for _, a := range d.machine.Step(time.Since(d.began), e) {
		switch a := a.(type) {
		case holding.Send:
			d.cfg.Messages.Send(a.To, a.Message)
		case holding.Read:
			d.read(ctx)
		case holding.Write:
			d.write(ctx, a.Record)
		case holding.Answer:
			k := d.blocks[a.ID]
			d.orders.answer(ctx, Order{Address: k.address, Ports: PortsOf(k.block), Epoch: a.Epoch, Until: d.began.Add(a.Until), Announce: a.Announce})
		case holding.Stop:
			d.orders.stop(ctx, d.blocks[a.ID].address)
		}
	}
}

// look takes what has changed since the last time.
func (d *Driver) look(ctx context.Context) {
	d.mu.Lock()
	seen, disputed, blocked, targets := d.seen, d.disputed, d.blocked, d.targets
	d.seen, d.disputed, d.blocked, d.targets = map[types.UID]*v2.AddressBlock{}, map[string]bool{}, map[string]bool{}, false
	d.mu.Unlock()
	for uid, b := range seen {
		if b == nil {
			d.lose(ctx, string(uid))
		} else {
			d.take(ctx, b)
		}
	}
	if len(seen) > 0 {
		d.cfg.Messages.Peers(d.peers())
		maps.DeleteFunc(d.gone, func(_ string, since time.Time) bool { return time.Since(since) > remembered })
	}
	for id, f := range d.fed {
		if targets {
			d.judge(ctx, f, d.blocks[id])
			d.move(ctx, f, d.blocks[id])
		}
		if disputed[id] {
			d.step(ctx, holding.Disputed{ID: id})
		}
		if is, ok := blocked[id]; ok {
			d.step(ctx, holding.Blocked{ID: id, Blocked: is})
		}
	}
}

// take takes a block if it is newer than the one that is known.
func (d *Driver) take(ctx context.Context, b *v2.AddressBlock) {
	k, err := parse(d.cfg.Node, b)
	if err != nil {
		klog.FromContext(ctx).Error(err, "A floating address isn't held")
		return
	}
	// Most addresses have nothing to do with most nodes.
	if d.note(k) && (d.fed[k.record.ID] != nil || k.concerns(d.cfg.Node)) {
		d.step(ctx, holding.Seen{Record: k.record})
		d.settle(ctx, k)
	}
}

// note remembers a block, and says whether it is newer than the one that was known.
func (d *Driver) note(k known) bool {
	id := k.record.ID
	if _, gone := d.gone[id]; gone || k.record.Version <= d.blocks[id].record.Version {
		return false
	}
	d.metrics.changed(d.cfg.Node, d.blocks[id], k)
	d.blocks[id] = k
	return true
}

// settle does what follows from the record of a block, which the machine knows.
func (d *Driver) settle(ctx context.Context, k known) {
	f := d.fed[k.record.ID]
	if f == nil {
		f = &fed{}
		d.fed[k.record.ID] = f
	}
	if !k.concerns(d.cfg.Node) {
		d.forget(ctx, k.record.ID)
		return
	}
	d.judge(ctx, f, k)
	d.move(ctx, f, k)
	d.label(ctx, k)
}

// lose forgets an address that isn't there any more.
func (d *Driver) lose(ctx context.Context, id string) {
	d.forget(ctx, id)
	d.metrics.gone(d.blocks[id])
	delete(d.blocks, id)
	d.gone[id] = time.Now()
}

// forget lets the machine forget an address.
func (d *Driver) forget(ctx context.Context, id string) {
	if f := d.fed[id]; f != nil {
		d.step(ctx, holding.Gone{ID: id})
		f.keep()
		f.stopMoving()
		delete(d.fed, id)
	}
}

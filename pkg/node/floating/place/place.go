// Package place makes the node answer for floating addresses: it leads them to pods of the node, or to the node itself if they are of Services, and tells
// routing daemons.
//
// It owns routes of the protocol dataplane.ProtocolFloating, and the tables dataplane.NftTableFloating. It must not know why the node answers for
// an address, nor how hosts of a link learn that (see Announcer).
//
//	to answer                                          to stop
//	1 packets from and to the address are dropped,       1 the element ends: packets are dropped
//	  and who asks for it on a link
//	2 the route to the pod, table 116,                   2 the Announcer
//	  or to the node, table local
//	3 an element, which ends by itself, lets them pass   3 the routes
//	4 the route for routing daemons, table 119           4 packets pass as those of any address
//	5 the Announcer, if that is asked for
//
// The node has stopped after 2: the next one need not wait for 3 and 4, which Sync repeats if they fail. Without all tables it has after 3.
//
// A transaction of nftables takes milliseconds, and a node may have a thousand addresses: what is asked for while one is made is done
// together with the next one. What fails for one address doesn't keep others from going on.
//
// What an earlier life of the program has left stays dropped by the table when its time is over. Its routes go when that is sure.
package place

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/plan/ruleset"
	"github.com/coil-net/coil/pkg/store"
)

// Pod is where packets for an address go: the link by which the node reaches a pod, the pod's own addresses, and its network namespace.
type Pod struct {
	Link int
	// Inside is the pod's end of its link, in its namespace; 0 for the other end of Link, a veth.
	Inside int
	ipam.Address
	store.Netns
}

// Announcer tells the hosts of links that addresses are at this node, and answers when they ask.
type Announcer interface {
	// Announce begins or goes on with it, and tells of each address of a family once again.
	Announce(context.Context, floating.Address) error
	// Withdraw ends it.
	Withdraw(context.Context, floating.Address) error
}

// Config is what a Place is made of.
type Config struct {
	Handle *rtnl.Handle
	Tables Tables
	// PodTable and ExportTable are the routing tables of pods, and for routing daemons. Loopback is the index of lo.
	PodTable, ExportTable, Loopback int
	// Pod returns the pod of a UID, if it is on the node and has its link.
	Pod func(types.UID) (Pod, bool)
	// Tracked lets the node track connections of Egresses' addresses; see ruleset.Floating.
	Tracked bool
	// Announcer may be nil.
	Announcer Announcer
	// Repaired counts objects of Kinds that others had destroyed, and that were made again.
	Repaired func(ctx context.Context, kind string, n int)
}

// localTable is the table of routes to the node itself. The kernel answers pings only for addresses that are in this one.
const localTable = unix.RT_TABLE_LOCAL

// Place implements floating.Place.
type Place struct {
	cfg    Config
	routes *route.Syncer
	began  time.Time

	mu   sync.Mutex // guards the three below
	jobs []*job
	busy bool
	used bool
	work sync.WaitGroup

	// All below belongs to the goroutine that is busy.
	held map[string]held
	// local are the node's own addresses, as they were when the kernel was looked at last.
	local []netip.Addr
	// left are addresses with routes of an earlier life, which may answer for them until it is over. Those of Services are in services, too.
	left     []netip.Addr
	services []ruleset.Service
	// dirty says that the kernel isn't known to be as it should be, and suspect that others may have changed it.
	dirty, suspect bool
}

// held is an address for which the node answers, and by which pod, if it isn't of Services.
type held struct {
	floating.Order
	pod Pod
}

// job is something that is to be done.
type job struct {
	ctx   context.Context
	order floating.Order
	kind  kind
	done  chan error
}

type kind int

const (
	answer kind = iota
	stop
	mend // what others have changed
)

var _ floating.Place = (*Place)(nil)

// New returns a Place that answers for nothing yet.
func New(ctx context.Context, cfg Config) (*Place, error) {
	p := &Place{
		cfg: cfg, routes: route.New(cfg.Handle, dataplane.ProtocolFloating, cfg.PodTable, cfg.ExportTable, localTable), began: time.Now(),
		held: map[string]held{}, dirty: true,
	}
	routes, err := p.read(ctx)
	if err != nil {
		return nil, err
	}
	ofServices := map[netip.Addr]bool{}
	for r := range routes {
		p.left = append(p.left, r.Dst.Addr())
		if r.Table == localTable {
			ofServices[r.Dst.Addr()] = true
		}
	}
	if p.services, err = cfg.Tables.services(ctx, ofServices); err != nil {
		return nil, err
	}
	exists, err := cfg.Tables.exist(ctx)
	if err != nil {
		return nil, err
	}
	p.used = exists || len(p.left) > 0
	return p, nil
}

// Adopt notes orders that an earlier life was given and that hold still, for addresses that the kernel answers for: nothing changes for these until they are
// given again, or are to end. It is for the time before all other calls.
func (p *Place) Adopt(orders []floating.Order) {
	for _, o := range orders {
		if o.OfServices && !slices.ContainsFunc(o.Addrs(), func(a netip.Addr) bool { return !slices.Contains(p.left, a) }) {
			p.held[o.ID] = held{Order: o}
		}
	}
}

// Answer implements floating.Place.
func (p *Place) Answer(ctx context.Context, o floating.Order) error {
	return p.do(&job{ctx: ctx, order: o, kind: answer})
}

// Stop implements floating.Place.
func (p *Place) Stop(ctx context.Context, a floating.Address) error {
	return p.do(&job{ctx: ctx, order: floating.Order{Address: a}, kind: stop})
}

// Sync makes the kernel as it should be, and counts it, if something has changed behind the Place's back. A lease after the start it removes what an
// earlier life has left.
func (p *Place) Sync(ctx context.Context) error { return p.do(&job{ctx: ctx, kind: mend}) }

// Used says whether the node has answered for an address, in this life or the one before: else there is nothing to keep in line.
func (p *Place) Used() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// Wait waits until nothing is done any more. No call may be in progress.
func (p *Place) Wait() { p.work.Wait() }

// do has a job done, together with others.
func (p *Place) do(j *job) error {
	j.done = make(chan error, 1)
	p.mu.Lock()
	p.jobs = append(p.jobs, j)
	p.used = p.used || j.kind == answer
	if !p.busy {
		p.busy = true
		// The context of one must not end the work for others.
		ctx := context.WithoutCancel(j.ctx)
		p.work.Go(func() { p.serve(ctx) })
	}
	p.mu.Unlock()
	return <-j.done
}

// serve does jobs until there are none.
func (p *Place) serve(ctx context.Context) {
	for {
		p.mu.Lock()
		jobs := p.jobs
		p.jobs = nil
		p.busy = len(jobs) > 0
		p.mu.Unlock()
		if len(jobs) == 0 {
			return
		}
		p.serveAll(ctx, jobs)
	}
}

// work is what is to be done at once.
type work struct {
	answers, stops, mends []*job
	// changed says that something else is wanted than before, mending that the kernel is to be looked at anyway.
	changed, mending bool
}

// sort notes what jobs ask for, each of another address.
func (p *Place) sort(jobs []*job) (w work) {
	w.changed, w.mending = p.dirty || p.earlier(), p.suspect
	for _, j := range jobs {
		was, known := p.held[j.order.ID]
		switch j.kind {
		case mend:
			w.mends = append(w.mends, j)
			w.mending = true
		case stop:
			w.stops = append(w.stops, j)
			delete(p.held, j.order.ID)
			w.changed = w.changed || known
		case answer:
			pod, there := Pod{}, true
			if !j.order.OfServices {
				pod, there = p.cfg.Pod(j.order.Pod)
			}
			if err := j.ctx.Err(); err != nil {
				j.done <- err
				continue
			}
			if !there {
				j.done <- fmt.Errorf("the pod %s to which packets for %s go isn't on this node", j.order.Pod, j.order.Address.Address)
				continue
			}
			w.answers = append(w.answers, j)
			w.changed = w.changed || !known || was.pod != pod || was.Epoch != j.order.Epoch || was.OfServices != j.order.OfServices || !slices.Equal(was.Ports, j.order.Ports)
			p.held[j.order.ID] = held{j.order, pod}
		}
	}
	return w
}

// serveAll does jobs, each of another address.
func (p *Place) serveAll(ctx context.Context, jobs []*job) {
	w := p.sort(jobs)
	at := func(take, give faultpoint.Point) {
		if len(w.answers) > 0 {
			faultpoint.At(take)
		}
		if len(w.stops) > 0 {
			faultpoint.At(give)
		}
	}
	silent, closed := p.cfg.Tables.close(ctx, w.stops)
	at("", faultpoint.GiveClosed)
	if silent && closed == nil {
		p.stopped(ctx, w.stops, nil)
	}
	sync := w.changed || w.mending
	var fixed repaired
	var led, settled error
	passing := w.answers
	if sync {
		complete, unknown := p.cfg.Tables.complete(ctx, p.addresses())
		if !complete {
			passing = p.passing(w.answers)
		}
		own, err := p.own(ctx)
		if err == nil {
			w.changed = w.changed || !slices.Equal(p.local, own)
			p.local = own
		}
		fixed, led = p.lead(ctx, w.stops)
		led = errors.Join(led, err, unknown)
		at(faultpoint.HoldLed, "")
	}
	var lacking map[netip.Addr]bool
	if led != nil {
		lacking = p.lacking(ctx)
	}
	if !silent || closed != nil {
		p.stopped(ctx, w.stops, errors.Join(closed, led))
	}
	opened := p.open(ctx, slices.DeleteFunc(slices.Clone(passing), func(j *job) bool { return isOf(j, lacking) }))
	at(faultpoint.HoldOpened, "")
	if sync {
		var more repaired
		more, settled = p.settle(ctx, lacking)
		at(faultpoint.HoldSettled, faultpoint.GiveSettled)
		fixed = fixed.plus(more)
	}
	if !w.changed {
		p.tell(ctx, fixed)
	}
	p.dirty, p.suspect = led != nil || settled != nil, opened != nil
	for _, j := range w.answers {
		err := errors.Join(opened, settled)
		if isOf(j, lacking) {
			err = errors.Join(led, err)
		}
		j.done <- errors.Join(err, p.announce(ctx, j))
	}
	for _, j := range w.mends {
		j.done <- errors.Join(led, settled)
	}
}

func (p *Place) announce(ctx context.Context, j *job) error {
	if p.cfg.Announcer == nil || !j.order.Announce {
		return nil
	}
	err := p.cfg.Announcer.Announce(ctx, j.order.Address)
	faultpoint.At(faultpoint.HoldAnnounced)
	return err
}

// stopped ends jobs to stop, which have failed if there is an error.
func (p *Place) stopped(ctx context.Context, stops []*job, err error) {
	for _, j := range stops {
		j.done <- errors.Join(err, p.withdraw(ctx, j))
	}
}

func (p *Place) withdraw(ctx context.Context, j *job) error {
	if p.cfg.Announcer == nil {
		return nil
	}
	err := p.cfg.Announcer.Withdraw(ctx, j.order.Address)
	faultpoint.At(faultpoint.GiveWithdrawn)
	return err
}

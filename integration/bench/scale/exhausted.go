package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/tools/cache"

	"github.com/coil-net/coil/generated/informers/externalversions"
	"github.com/coil-net/coil/integration/rig"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/blocks"
	"github.com/coil-net/coil/pkg/plan/pools"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/testkit"
)

const (
	fullPool      = "full"
	blockSizeBits = 5
	// refusedTimeout is how long the refusals of all nodes may take.
	refusedTimeout = 10 * time.Minute
)

// Kinds of keys that an exhausted pool writes.
const (
	kindRequest = "BlockRequest"
	kindEvent   = "Event"
	kindPool    = "AddressPool"
	kindBlock   = "AddressBlock"
)

func kindOfCoil(key string) string {
	for kind, prefix := range map[string]string{
		kindRequest: "coil.cybozu.com/blockrequests/", kindPool: "coil.cybozu.com/addresspools/", kindBlock: "coil.cybozu.com/addressblocks/", kindEvent: "events/",
	} {
		if strings.HasPrefix(key, registry+prefix) {
			return kind
		}
	}
	return ""
}

// measureExhausted runs coild's loop for blocks of many nodes, which all have less than a quarter of
// a block free and ask a pool that has none left. Nobody waits for an address.
func measureExhausted(ctx context.Context, o options, rep *report) (err error) {
	r, err := rig.New(ctx, rig.Options{Log: o.log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	f, err := newFleet(ctx, r, o.nodes, o.log)
	if err != nil {
		return err
	}
	if err := f.fill(ctx); err != nil {
		return err
	}
	l, err := watchEtcd(ctx, r.API, "", kindOfCoil)
	if err != nil {
		return err
	}
	defer l.close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	refused, done, err := f.askAll(ctx)
	if err != nil {
		return err
	}
	defer func() { cancel(); err = errors.Join(err, done()) }()
	began := time.Now()
	select {
	case <-refused:
	case <-time.After(testkit.Timeout(refusedTimeout)):
		return fmt.Errorf("not all nodes were refused within %s; the end of the controller's log:\n%s", refusedTimeout, r.Controller.Logs(20))
	case <-ctx.Done():
		return ctx.Err()
	}
	before, err := l.counts()
	if err != nil {
		return err
	}
	what := fmt.Sprintf("exhausted pool, %d nodes ask ahead", o.nodes)
	rep.Figures.Note(what+": until all are refused once", "s", time.Since(began).Seconds())
	rep.Figures.Note(what+": writes until then, of a node", "", float64(total(before).Count)/float64(o.nodes))
	return f.watchExhausted(ctx, l, before, rep, o)
}

// settleAfter is for how long the last of the first requests may still write.
const settleAfter = 30 * time.Second

// watchExhausted counts writes after all nodes were refused once. Pauses only grow from then on: the
// rate of a window in which each node's next turns come isn't less than that of any later one.
func (f *fleet) watchExhausted(ctx context.Context, l *ledger, before map[string]writes, rep *report, o options) error {
	settle := min(settleAfter, o.exhausted/4)
	if err := pass(settle)(ctx); err != nil {
		return err
	}
	first, err := l.counts()
	if err != nil {
		return err
	}
	what := fmt.Sprintf("exhausted pool, %d nodes ask ahead, the %s after these", o.nodes, o.exhausted)
	const minutes = time.Minute
	most, last, began := 0.0, first, time.Now()
	for time.Since(began) < o.exhausted {
		step := min(minutes, o.exhausted-time.Since(began))
		if err := pass(step)(ctx); err != nil {
			return err
		}
		now, err := l.counts()
		if err != nil {
			return err
		}
		most = max(most, float64(total(now).minus(total(last)).Count)/step.Seconds())
		last = now
	}
	seconds := time.Since(began).Seconds()
	for _, kind := range []string{kindRequest, kindEvent, kindPool, kindBlock} {
		rep.Figures.Note(what+": writes of "+kind+"s", "/s", float64(last[kind].minus(first[kind]).Count)/seconds)
	}
	rep.Figures.AtMost(what+": writes", "/s", float64(total(last).minus(total(first)).Count)/seconds, 10)
	rep.Figures.AtMost(what+": writes in the worst minute", "/s", most, 10)
	return nil
}

func total(kinds map[string]writes) (sum writes) {
	for _, w := range kinds {
		sum = writes{sum.Count + w.Count, sum.Bytes + w.Bytes}
	}
	return sum
}

// fill makes a pool of as many blocks as there are Nodes, or some more, and gives them all to Nodes.
func (f *fleet) fill(ctx context.Context) error {
	bits := 0
	for 1<<bits < len(f.nodes) {
		bits++
	}
	subnet := rig.Dual(fmt.Sprintf("100.64.0.0/%d", 32-blockSizeBits-bits), fmt.Sprintf("fd00:64::/%d", 128-blockSizeBits-bits))
	if err := f.rig.AddPool(ctx, fullPool, blockSizeBits, subnet); err != nil {
		return err
	}
	p, err := f.rig.Coil.CoilV2().AddressPools().Get(ctx, fullPool, metav1.GetOptions{})
	if err != nil {
		return err
	}
	spec, err := pools.Parse(p.Spec)
	if err != nil {
		return err
	}
	return each(ctx, 1<<bits, func(ctx context.Context, i int) error {
		b, err := spec.Block(int32(i))
		if err != nil {
			return err
		}
		n := f.nodes[i%len(f.nodes)]
		o := pools.NewBlock(p, int32(i), b, pools.Holder{NodeName: n.name, NodeUID: n.uid, RequestUID: uuid.NewUUID()})
		_, err = f.rig.Coil.CoilV2().AddressBlocks().Create(ctx, o, metav1.CreateOptions{})
		return err
	})
}

// askAll runs the loops of all nodes until ctx ends, for which done waits. refused is closed when each
// node's first request was refused.
func (f *fleet) askAll(ctx context.Context) (refused <-chan struct{}, done func() error, err error) {
	s := &shared{nodes: map[string]*inbox{}, refused: map[string]bool{}, all: make(chan struct{})}
	for _, n := range f.nodes {
		s.nodes[n.name] = &inbox{blocks: newPart(), requests: newPart()}
	}
	informers := externalversions.NewSharedInformerFactory(f.rig.Coil, 0)
	b, err := informers.Coil().V2().AddressBlocks().Informer().AddEventHandler(s.handler(func(i *inbox) *part { return i.blocks }))
	if err != nil {
		return nil, nil, err
	}
	r, err := informers.Coil().V2().BlockRequests().Informer().AddEventHandler(s.handler(func(i *inbox) *part { return i.requests }))
	if err != nil {
		return nil, nil, err
	}
	metrics := reconcile.NewMetrics(nil)
	group, groupCtx := errgroup.WithContext(ctx)
	for _, n := range f.nodes {
		i := s.nodes[n.name]
		i.blocks.registration, i.requests.registration = b, r
		m, err := blocks.New(blocks.Config{
			NodeName: n.name, NodeUID: n.uid, Uses: func(context.Context, *v2.AddressBlock) (bool, error) { return true, nil },
			Warn: func(string, string, ...any) {}, MinAge: time.Hour, StatusInterval: 30 * time.Second,
		}, f.rig.Coil.CoilV2(), i.blocks, i.requests, &busyRecord{}, noExport{}, metrics)
		if err != nil {
			return nil, nil, err
		}
		group.Go(func() error { return m.Run(groupCtx) })
	}
	informers.Start(ctx.Done())
	return s.all, func() error { informers.Shutdown(); return group.Wait() }, nil
}

// shared gives each node its part of one watch: thousands would be the API server's to carry, and
// aren't measured here.
type shared struct {
	nodes map[string]*inbox

	mu      sync.Mutex
	refused map[string]bool
	all     chan struct{}
}

// inbox is what a node's informers have.
type inbox struct{ blocks, requests *part }

// part is an informer of one node's objects, which a shared one feeds.
type part struct {
	cache.SharedIndexInformer // nil: what isn't below isn't used
	indexer                   cache.Indexer
	registration              cache.ResourceEventHandlerRegistration
	handlers                  []cache.ResourceEventHandler
}

func newPart() *part {
	return &part{indexer: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})}
}

func (p *part) GetIndexer() cache.Indexer { return p.indexer }

func (p *part) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	p.handlers = append(p.handlers, h)
	return p.registration, nil
}

// each calls do with all handlers.
func (p *part) each(do func(cache.ResourceEventHandler)) {
	for _, h := range p.handlers {
		do(h)
	}
}

func (s *shared) handler(of func(*inbox) *part) cache.ResourceEventHandler {
	at := func(obj any) *part {
		if o, ok := obj.(metav1.Object); ok {
			if i := s.nodes[o.GetLabels()[v2.LabelNode]]; i != nil {
				return of(i)
			}
		}
		return nil
	}
	return cache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(obj any, initial bool) {
			if p := at(obj); p != nil {
				_ = p.indexer.Add(obj) // it has a key
				p.each(func(h cache.ResourceEventHandler) { h.OnAdd(obj, initial) })
			}
			s.note(obj)
		},
		UpdateFunc: func(before, after any) {
			if p := at(after); p != nil {
				_ = p.indexer.Update(after)
				p.each(func(h cache.ResourceEventHandler) { h.OnUpdate(before, after) })
			}
			s.note(after)
		},
		DeleteFunc: func(obj any) {
			if t, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = t.Obj
			}
			if p := at(obj); p != nil {
				_ = p.indexer.Delete(obj)
				p.each(func(h cache.ResourceEventHandler) { h.OnDelete(obj) })
			}
		},
	}
}

// note notes a refusal.
func (s *shared) note(obj any) {
	r, ok := obj.(*v2.BlockRequest)
	if !ok || len(r.Status.Conditions) == 0 || r.Status.Conditions[0].Type != v2.BlockRequestFailed {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refused[r.Spec.NodeName] {
		return
	}
	s.refused[r.Spec.NodeName] = true
	if len(s.refused) == len(s.nodes) {
		close(s.all)
	}
}

// busyRecord has all blocks in use but for a few addresses.
type busyRecord struct {
	mu     sync.Mutex
	blocks map[string]store.Block
}

func (r *busyRecord) SetBlocks(_ context.Context, bs []store.Block) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.blocks = make(map[string]store.Block, len(bs))
	for _, b := range bs {
		r.blocks[b.Name] = b
	}
	return nil
}

func (r *busyRecord) ForgetBlock(context.Context, string) error { return store.ErrInUse }

func (r *busyRecord) Usage(context.Context) ([]store.Usage, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var us []store.Usage
	for _, b := range r.blocks {
		us = append(us, store.Usage{Block: b, Allocated: b.Size() - 1})
	}
	return us, nil
}

// noExport announces nothing.
type noExport struct{}

func (noExport) Export(context.Context, []routes.HeldBlock) error { return nil }

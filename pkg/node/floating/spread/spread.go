// Package spread lets the node answer for addresses of Services that several nodes announce by routes at once, beside the node that holds them.
//
// It owns which of these addresses the node has, and stands between the part that holds addresses and the one that makes the node answer. It must not know how a
// holder is found, nor by what objects of the kernel the node answers.
//
//	holder says   the node may announce it   the node
//	answer        yes, or no                 answers
//	stop, or -    yes                        answers
//	stop, or -    no                         stops
//
// Routers of the network send packets to each node that announces an address. So nothing depends on who has it, and a node answers on while this program
// is away, for as long as lasting.
package spread

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/reconcile"
)

// lasting is for how long the kernel answers without this program, and renewed how often that is prolonged.
const (
	lasting = time.Hour
	renewed = lasting / 3
)

// Config is what a Spread is made of.
type Config struct {
	Node string
	// Place makes the node answer.
	Place Place
	// Block returns a block of a cache by its name, nil if there is none.
	Block func(name string) *v2.AddressBlock
	// Serves says whether addresses of Services may be on the node.
	Serves func() bool
	// Begun is called when the node has begun to answer for an address that its block asks for. It doesn't block.
	Begun func()
}

// Place makes the node answer for addresses.
type Place interface {
	floating.Place
	// Adopt notes orders that an earlier life was given and that hold still; see place.Place.
	Adopt([]floating.Order)
}

// Spread implements floating.Place for the part that holds addresses.
type Spread struct {
	cfg  Config
	loop *reconcile.Loop[key]

	mu  sync.Mutex
	all map[string]*shared // by the address's ID
}

// key is an AddressBlock.
type key struct{ name, id string }

// shared is an address that was asked for.
type shared struct {
	// mu is held while the Place is called for the address.
	mu sync.Mutex
	// held is what the holder asks for, nil if it doesn't; own is what its block asks for, nil if it doesn't.
	held, own *floating.Order
	// gone says that there is no such block any more.
	gone bool
}

var _ floating.Place = (*Spread)(nil)

// New returns a Spread that has nothing answered yet.
func New(cfg Config, metrics *reconcile.Metrics, registry prometheus.Registerer) *Spread {
	s := &Spread{cfg: cfg, all: map[string]*shared{}}
	s.loop = reconcile.New("floating-spread", s.sync, metrics)
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "coil_floating_spread_addresses",
		Help: "Floating addresses of Services for which this node answers as others do, whether it holds them or not.",
	}, s.count))
	return s
}

// Start takes up what an earlier life has left, from the blocks that there are. Call it before Run, and before the Place is used.
func (s *Spread) Start(blocks []*v2.AddressBlock) {
	var orders []floating.Order
	for _, b := range blocks {
		if want, err := s.wants(b, false); err == nil && want != nil { // an error is told when the loop looks at the block
			a := s.of(want.ID)
			a.mu.Lock()
			a.own = want
			a.mu.Unlock()
			orders = append(orders, *want)
		}
	}
	s.cfg.Place.Adopt(orders)
	if len(orders) > 0 {
		s.cfg.Begun()
	}
	s.Look(blocks)
}

// Run has the node answer until ctx ends; then the kernel goes on with it.
func (s *Spread) Run(ctx context.Context) error { return s.loop.Run(ctx, 8) }

// Changed takes a change of a block.
func (s *Spread) Changed(before, after *v2.AddressBlock) {
	for _, b := range []*v2.AddressBlock{before, after} {
		if b != nil && (s.known(string(b.UID)) || announces(b)) {
			s.loop.Add(key{b.Name, string(b.UID)})
		}
	}
}

// announces says whether a block asks for nodes beside the holder.
func announces(b *v2.AddressBlock) bool {
	return b.Floating != nil && (b.Floating.Announcers.All || len(b.Floating.Announcers.Nodes) > 0)
}

// Look looks again at some blocks: whether the node may have addresses of Services has changed.
func (s *Spread) Look(blocks []*v2.AddressBlock) {
	for _, b := range blocks {
		s.Changed(nil, b)
	}
}

// Answer implements floating.Place.
func (s *Spread) Answer(ctx context.Context, o floating.Order) error {
	a := s.of(o.ID)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held = &o
	if a.own != nil {
		// The kernel answers on for the address, whoever holds it. Its route is as good as other nodes': else routers send all to the newest holder.
		o.Until, o.Epoch = time.Now().Add(lasting), a.own.Epoch
	}
	return s.cfg.Place.Answer(ctx, o)
}

// Stop implements floating.Place.
func (s *Spread) Stop(ctx context.Context, addr floating.Address) error {
	a := s.of(addr.ID)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held = nil
	if a.own != nil {
		return s.answer(ctx, *a.own)
	}
	if a.gone {
		s.forget(addr.ID)
	}
	return s.cfg.Place.Stop(ctx, addr)
}

// answer has the node answer for an address that its block asks for.
func (s *Spread) answer(ctx context.Context, o floating.Order) error {
	o.Until = time.Now().Add(lasting)
	return s.cfg.Place.Answer(ctx, o)
}

func (s *Spread) sync(ctx context.Context, k key) error {
	b := s.cfg.Block(k.name)
	gone := b == nil || string(b.UID) != k.id
	want, err := s.wants(b, gone)
	if err != nil || want == nil && !s.known(k.id) {
		return err
	}
	a := s.of(k.id)
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.own
	a.own, a.gone = want, gone
	switch {
	case want != nil:
		if was == nil {
			klog.FromContext(ctx).Info("Answering for an address of Services, as other nodes do", "block", k.name)
		}
		if err := s.answer(ctx, *want); err != nil {
			return fmt.Errorf("answer for the address of AddressBlock %s: %w", k.name, err)
		}
		if was == nil {
			s.cfg.Begun()
		}
		return reconcile.Later(renewed)
	case was == nil:
	case a.held != nil: // if the holder stops without this program, so does the kernel, from now on
		err = s.cfg.Place.Answer(ctx, *a.held)
	default:
		err = s.cfg.Place.Stop(ctx, was.Address)
	}
	switch {
	case err != nil:
		a.own = was
		return fmt.Errorf("stop answering for the address of AddressBlock %s: %w", k.name, err)
	case was != nil:
		klog.FromContext(ctx).Info("Stopped answering for an address of Services beside its holder", "block", k.name)
	}
	if gone && a.held == nil {
		s.forget(k.id)
	}
	return nil
}

// wants returns what the node is to answer for a block beside its holder, nil for nothing.
func (s *Spread) wants(b *v2.AddressBlock, gone bool) (*floating.Order, error) {
	if gone || !announces(b) || b.Labels[v2.LabelAnnounce] == string(v2.AnnounceNeighbor) {
		return nil, nil
	}
	if among := b.Floating.Announcers; !slices.Contains(among.Nodes, s.cfg.Node) && !(among.All && s.cfg.Serves()) {
		return nil, nil
	}
	o, offered, err := floating.OrderOf(s.cfg.Node, b)
	if err != nil || !offered || !o.OfServices {
		return nil, err
	}
	return &o, nil
}

func (s *Spread) known(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[id] != nil
}

func (s *Spread) of(id string) *shared {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all[id] == nil {
		s.all[id] = &shared{}
	}
	return s.all[id]
}

// forget forgets an address for which the node doesn't answer any more.
func (s *Spread) forget(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, id)
}

// Addresses returns the addresses for which the node answers since their blocks ask for it, whether it holds them or not.
func (s *Spread) Addresses() (addrs []floating.Address) {
	s.mu.Lock()
	all := make([]*shared, 0, len(s.all))
	for _, a := range s.all {
		all = append(all, a)
	}
	s.mu.Unlock()
	for _, a := range all {
		a.mu.Lock()
		if a.own != nil {
			addrs = append(addrs, a.own.Address)
		}
		a.mu.Unlock()
	}
	return addrs
}

func (s *Spread) count() float64 { return float64(len(s.Addresses())) }

package floating

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/holding"
)

const (
	// pause is the time before a call of Place that failed is repeated; it doubles up to longestPause.
	pause, longestPause = 20 * time.Millisecond, time.Second
	// patience is how long a call to stop may take.
	patience = time.Second
)

// orders has Place do what was asked last for each address, in an order that can't be turned round.
type orders struct {
	place   Place
	metrics *metrics
	// began is when this program began. An earlier life of it may have made the node answer for a lease from then on.
	began time.Time
	group sync.WaitGroup

	mu    sync.Mutex
	hands map[string]*hand
}

// hand works for one address.
type hand struct {
	orders *orders
	// next is what is wanted and hasn't begun; nil is nothing.
	next *wanted
	// until is the end of the time for which the node may answer now.
	until time.Time
	// untold says that an order asked to tell so to all on the link, and that none has been done since then in time.
	untold bool
	// stopping is the last order to stop, nil after one to answer.
	stopping *stopping
	// cancel ends the call of Place under way, changed is closed when there is a new order. Both are nil while nobody works.
	cancel  context.CancelFunc
	changed chan struct{}
}

// wanted is an order: to answer, or to stop.
type wanted struct {
	order Order
	stop  *stopping // nil to answer
}

// stopping is an order to stop, as seen by those who wait for it.
type stopping struct {
	ended chan struct{} // closed at the end
	done  bool          // it was done, and not replaced by another order; to be read after the end
	until time.Time     // when the node stops by itself
}

func newOrders(p Place, m *metrics) *orders {
	return &orders{place: p, metrics: m, hands: map[string]*hand{}}
}

// answer asks Place to answer for an address.
func (o *orders) answer(ctx context.Context, order Order) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.hand(order.ID)
	h.replaced()
	h.untold = h.untold || order.Announce
	h.until = order.Until
	h.want(ctx, wanted{order: order})
}

// stop asks Place to stop answering for an address.
func (o *orders) stop(ctx context.Context, a Address) {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.hand(a.ID)
	if h.stopping != nil && !h.stopping.over() {
		return
	}
	h.stopping, h.untold = &stopping{ended: make(chan struct{}), until: h.until}, false
	if h.cancel != nil {
		h.cancel()
	}
	h.want(ctx, wanted{order: Order{Address: a}, stop: h.stopping})
}

// stopped returns a function that waits until the node has stopped answering for an address, if that was the last order. It returns
// false if that order was replaced, or ctx ended.
func (o *orders) stopped(id string) func(context.Context) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	h := o.hands[id]
	if h == nil || h.stopping == nil {
		return func(ctx context.Context) bool { return ctx.Err() == nil }
	}
	s := h.stopping
	return func(ctx context.Context) bool {
		left := time.NewTimer(time.Until(s.until))
		defer left.Stop()
		select {
		case <-s.ended:
			return s.done
		case <-left.C:
			return true
		case <-ctx.Done():
			return false
		}
	}
}

// wait waits until nobody works any more, which is soon after the end of all contexts.
func (o *orders) wait() { o.group.Wait() }

// hand returns the hand of an address. It must be called with mu held.
func (o *orders) hand(id string) *hand {
	h := o.hands[id]
	if h == nil {
		h = &hand{orders: o, until: o.began.Add(holding.Lease)}
		o.hands[id] = h
	}
	return h
}

// replaced ends the last order to stop. It must be called with mu held, as want and rest.
func (h *hand) replaced() {
	if h.stopping != nil {
		h.stopping.end(false)
		h.stopping = nil
	}
}

func (s *stopping) end(done bool) {
	if !s.over() {
		s.done = done
		close(s.ended)
	}
}

func (s *stopping) over() bool {
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// want lets w be done next.
func (h *hand) want(ctx context.Context, w wanted) {
	h.next = &w
	if h.changed == nil {
		h.changed = make(chan struct{})
		h.orders.group.Go(func() { h.work(ctx) })
		return
	}
	close(h.changed)
	h.changed = make(chan struct{})
}

// work does what is wanted, until there is nothing more.
func (h *hand) work(ctx context.Context) {
	retry := pause
	for {
		h.orders.mu.Lock()
		w := h.next
		h.next = nil
		if w == nil || ctx.Err() != nil {
			h.rest(w)
			h.orders.mu.Unlock()
			return
		}
		if w.stop == nil {
			w.order.Announce, h.untold = h.untold, false
		}
		within, cancel := w.within(ctx)
		h.cancel = cancel
		changed := h.changed
		h.orders.mu.Unlock()

		err := h.call(within, *w)
		late := within.Err() != nil
		cancel()
		if err == nil {
			retry = pause
			continue
		}
		if w.stop == nil {
			h.tell(w.order)
			if late {
				continue // there is nothing more to answer for, or another order
			}
		}
		klog.FromContext(ctx).Error(err, "The kernel isn't as a floating address needs it, trying again", "block", w.order.Block, "stop", w.stop != nil)
		h.again(*w)
		select {
		case <-changed:
			retry = pause
		case <-ctx.Done():
		case <-time.After(retry):
			retry = min(2*retry, longestPause)
		}
	}
}

// within is how long an order may take.
func (w *wanted) within(ctx context.Context) (context.Context, context.CancelFunc) {
	if w.stop != nil {
		return context.WithTimeout(ctx, patience)
	}
	return context.WithDeadline(ctx, w.order.Until)
}

// call has an order done.
func (h *hand) call(ctx context.Context, w wanted) error {
	what := "answer"
	var err error
	switch {
	case w.stop != nil:
		what = "stop"
		if err = h.orders.place.Stop(ctx, w.order.Address); err == nil {
			h.stopped(w.stop)
		}
	case ctx.Err() == nil:
		err = h.orders.place.Answer(ctx, w.order)
	}
	if err != nil {
		h.orders.metrics.failures.WithLabelValues(what).Inc()
	}
	return err
}

// stopped notes that the node has stopped, unless it was to answer again meanwhile.
func (h *hand) stopped(s *stopping) {
	h.orders.mu.Lock()
	defer h.orders.mu.Unlock()
	s.end(true)
	if h.stopping == s {
		h.until = time.Time{}
	}
}

// again lets an order be done again, unless there is another one.
func (h *hand) again(w wanted) {
	h.orders.mu.Lock()
	defer h.orders.mu.Unlock()
	if h.next == nil {
		h.next = &w
	}
}

// tell passes the announcement of an order that wasn't done on to the next order, unless the node was to stop meanwhile.
func (h *hand) tell(o Order) {
	h.orders.mu.Lock()
	defer h.orders.mu.Unlock()
	h.untold = h.untold || o.Announce && h.stopping == nil
}

// rest ends the work. w is an order that isn't done since the program ends.
func (h *hand) rest(w *wanted) {
	if w != nil && w.stop != nil {
		w.stop.end(false)
	}
	h.cancel, h.changed = nil, nil
	if !time.Now().Before(h.until) {
		for id, other := range h.orders.hands {
			if other == h {
				delete(h.orders.hands, id)
			}
		}
	}
}

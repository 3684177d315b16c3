package standby

import (
	"context"
	"net/netip"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/kernel/conntrack"
	"github.com/coil-net/coil/pkg/node/floating"
)

// watch tells streams of the changes of flows of one router. It keeps the router's network namespace alive.
type watch struct {
	s      *Standby
	pod    types.UID
	cancel context.CancelFunc

	mu        sync.RWMutex
	listening bool
	to        map[netip.Addr]*stream
}

func (s *Standby) newWatch(pod types.UID) *watch {
	ctx, cancel := context.WithCancel(s.life)
	w := &watch{s: s, pod: pod, cancel: cancel, to: map[netip.Addr]*stream{}}
	s.watches[pod] = w
	s.group.Go(func() { w.run(ctx) })
	return w
}

// add lets a stream copy an address, and have its changes. Both are one step: the stream hears of whatever listens says next.
func (w *watch) add(l lead, st *stream) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, addr := range l.Addrs() {
		w.to[addr] = st
	}
	st.add(l, w.listening)
}

// drop undoes add, and says whether there is no address left.
func (w *watch) drop(a floating.Address) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, addr := range a.Addrs() {
		delete(w.to, addr)
	}
	return len(w.to) == 0
}

func (w *watch) run(ctx context.Context) {
	pause := w.s.limits.retry
	for {
		err := w.listen(ctx)
		w.listens(false)
		if ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, "Connections of a router can't be followed, trying again: they end if the node fails", "pod", w.pod)
		if !wait(ctx, pause) {
			return
		}
		pause = min(2*pause, w.s.limits.mostRetry)
	}
}

// listen hears of changes until ctx ends. What is there already is sent by the streams.
func (w *watch) listen(ctx context.Context) error {
	events, err := w.s.cfg.Follow(ctx, w.pod)
	if err != nil {
		return err
	}
	defer events.Close()
	w.listens(true)
	return events.Run(ctx, w.s.limits.settle, func(a netip.Addr) bool { return w.stream(a) != nil }, w.heard, w.lost)
}

func (w *watch) stream(a netip.Addr) *stream {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.to[a]
}

func (w *watch) heard(e conntrack.Event) {
	if st := w.stream(e.Translated.Addr()); st != nil {
		st.push(e)
	}
}

// lost lets all flows be sent anew.
func (w *watch) lost() {
	w.s.metrics.restarts.WithLabelValues("events_lost").Inc()
	w.listens(true)
}

// listens notes whether the changes are heard from now on.
func (w *watch) listens(listening bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.listening = listening
	told := map[*stream]bool{}
	for _, st := range w.to {
		if !told[st] {
			told[st] = true
			st.watched(w.pod, listening)
		}
	}
}

package reconcile

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

const (
	// minPause and maxPause bound the time between two repairs of one kind, which doubles
	// while another program keeps undoing them. Pods have no network meanwhile.
	minPause = 100 * time.Millisecond
	maxPause = time.Second
	// calm is for how long nothing had to be repaired when the next is the first again.
	calm = time.Minute
	// repeatedly is how many repairs within memory are reported.
	repeatedly = 3
	memory     = 10 * time.Minute
)

// Repairs counts the objects that others destroyed and that were restored, by kind. It says how long to wait
// before the next repair, so that two programs that don't agree don't keep a node busy, and
// reports kinds that are destroyed again and again. It is safe for concurrent use.
type Repairs struct {
	total  *prometheus.CounterVec
	report func(ctx context.Context, kind, message string)

	mu    sync.Mutex
	kinds map[string]*history
}

// history is that of one kind.
type history struct {
	pause    time.Duration
	recent   []time.Time // the last repairs, at most repeatedly
	reported time.Time
	seen     string // the last object that was destroyed
}

// NewRepairs returns a counter of repairs of the given kinds. report is told of kinds that are
// destroyed repeatedly, not more often than every ten minutes for each kind. It may be nil: the log has it.
func NewRepairs(reg prometheus.Registerer, report func(ctx context.Context, kind, message string), kinds ...string) *Repairs {
	r := &Repairs{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "coil_repairs_total",
			Help: "Kernel objects of Coil that others deleted or changed and that were restored, by kind.",
		}, []string{"kind"}),
		report: report,
		kinds:  map[string]*history{},
	}
	for _, k := range kinds {
		r.kinds[k] = &history{}
		r.total.WithLabelValues(k)
	}
	if reg != nil {
		reg.MustRegister(r.total)
	}
	return r
}

// Saw remembers an object that was destroyed, for the next report about the kind.
func (r *Repairs) Saw(kind, object string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kinds[kind].seen = object
}

// Done says that so many objects of a kind were restored just now.
func (r *Repairs) Done(ctx context.Context, kind string, n int) {
	if n == 0 {
		return
	}
	r.total.WithLabelValues(kind).Add(float64(n))
	first, message := r.note(kind)
	logger := klog.FromContext(ctx)
	if !first {
		logger = logger.V(2)
	}
	logger.Info("Restored what another program had destroyed", "kind", kind, "count", n)
	if message != "" {
		klog.FromContext(ctx).Info("Another program destroys again and again what is Coil's", "kind", kind, "observed", message)
		if r.report != nil {
			r.report(ctx, kind, message)
		}
	}
}

// note says whether it is the first repair for a while, and returns the message to report.
func (r *Repairs) note(kind string) (first bool, message string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h, now := r.kinds[kind], time.Now()
	first = len(h.recent) == 0 || now.Sub(h.recent[len(h.recent)-1]) > calm
	if first {
		h.pause = minPause
	} else {
		h.pause = min(2*h.pause, maxPause)
	}
	h.recent = append(h.recent, now)
	if len(h.recent) > repeatedly {
		h.recent = h.recent[1:]
	}
	if len(h.recent) < repeatedly || now.Sub(h.recent[0]) > memory || !h.reported.IsZero() && now.Sub(h.reported) < memory {
		return first, ""
	}
	h.reported = now
	message = fmt.Sprintf("restored %d times within %s", repeatedly, max(now.Sub(h.recent[0]).Round(time.Second), time.Second))
	if h.seen != "" {
		message += "; seen last: " + h.seen
	}
	return first, message
}

// Wait is for how long the next repair of any of these kinds should wait from now on.
func (r *Repairs) Wait(kinds ...string) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	var wait time.Duration
	for _, k := range kinds {
		if h := r.kinds[k]; len(h.recent) > 0 {
			wait = max(wait, time.Until(h.recent[len(h.recent)-1].Add(h.pause)))
		}
	}
	return wait
}

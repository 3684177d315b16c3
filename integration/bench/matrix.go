package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/coil-net/coil/integration/bench/figures"
)

// cell is what is the same for all systems that are compared.
type cell struct {
	concurrency int
	existing    int
	family      string
}

func (c cell) String() string {
	return fmt.Sprintf("%s, %d pods, %d at once", c.family, c.existing, c.concurrency)
}

// plan says what to measure.
type plan struct {
	families    []string
	existing    []int // ascending
	concurrency []int
	// rounds are what each figure is made of; each attaches so many pods.
	rounds int
	pods   func(concurrency int) int
	// budget is for how long a round attaches pods, at most.
	budget time.Duration
	// busy is how many processors others may use during a round that counts.
	busy float64
	// patience is how many times as many rounds are tried as are needed.
	patience int
}

// measured is a round of one system.
type measured struct {
	samples map[string]sample
	busy    float64 // processors that others used
}

// matrix measures systems side by side.
type matrix struct {
	plan
	systems []system
	log     io.Writer

	pool    spaces             // of the pods that are attached and detached again
	crowd   map[string][]*pod  // pods that stay, by system
	homes   map[string]*holder // of pods that stay, by system
	sandbox int                // so far

	rows  []Row
	cells []cellNote
}

// cellNote says under which conditions a cell was measured.
type cellNote struct {
	Cell    string `json:"cell"`
	Loadavg string `json:"loadavg"`
	// Busy is how many processors others used, by system: the most of the rounds that
	// count.
	Busy map[string]float64 `json:"busy_processors"`
	// Dropped are rounds that don't count because the machine was busy.
	Dropped int `json:"dropped_rounds"`
}

func newMatrix(p plan, systems []system, log io.Writer) *matrix {
	return &matrix{plan: p, systems: systems, log: log, crowd: map[string][]*pod{}, homes: map[string]*holder{}}
}

// run measures everything. Cells that are compared with each other are near in time, because
// the machine's speed changes within minutes.
func (m *matrix) run(ctx context.Context) error {
	for _, existing := range m.existing {
		for _, family := range m.families {
			if err := m.onto(ctx, existing, family); err != nil {
				return err
			}
		}
	}
	return nil
}

// onto measures the cells of nodes that have so many pods of a family.
func (m *matrix) onto(ctx context.Context, existing int, family string) error {
	for _, s := range m.systems {
		if err := m.populate(ctx, s, existing, family); err != nil {
			return err
		}
	}
	for _, n := range m.concurrency {
		if err := m.measure(ctx, cell{n, existing, family}); err != nil {
			return err
		}
	}
	for _, s := range m.systems {
		if err := m.empty(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// populate attaches pods that stay until there are so many.
func (m *matrix) populate(ctx context.Context, s system, n int, family string) error {
	have := m.crowd[s.name()]
	if n <= len(have) || !s.wires() {
		return nil
	}
	homes := m.homes[s.name()]
	if homes == nil {
		var err error
		if homes, err = newHolder(); err != nil {
			return err
		}
		m.homes[s.name()] = homes
	}
	if err := homes.grow(n); err != nil {
		return err
	}
	var more []*pod
	for i := len(have); i < n; i++ {
		m.sandbox++
		more = append(more, newPod(homes.held[i], i, m.sandbox, family))
	}
	got, _, err := batch(ctx, s, more, 8, time.Hour, s.add)
	if err != nil {
		return err
	}
	if got.failures > 0 {
		return fmt.Errorf("%s: attach %d pods that stay: %w", s.name(), len(more), got.firstErr)
	}
	m.crowd[s.name()] = append(have, more...)
	return nil
}

// empty detaches them.
func (m *matrix) empty(ctx context.Context, s system) error {
	crowd := m.crowd[s.name()]
	got, _, err := batch(ctx, s, crowd, 32, time.Hour, s.del)
	if err == nil {
		_, err = settle(ctx, s, crowd)
	}
	if err != nil {
		return err
	}
	if got.failures > 0 {
		return fmt.Errorf("%s: detach %d pods: %w", s.name(), len(crowd), got.firstErr)
	}
	m.crowd[s.name()] = nil
	return nil
}

// firstGuest is the number of the first pod that doesn't stay.
const firstGuest = 1 << 15

// sandboxes are pods that weren't attached before.
func (m *matrix) sandboxes(n int, family string) ([]*pod, error) {
	if err := m.pool.grow(n); err != nil {
		return nil, err
	}
	pods := make([]*pod, n)
	for i := range pods {
		m.sandbox++
		pods[i] = newPod(m.pool[i], firstGuest+i, m.sandbox, family)
	}
	return pods, nil
}

// measure fills one cell for all systems. Systems take turns, so that what else
// happens on the machine hits all of them.
func (m *matrix) measure(ctx context.Context, c cell) error {
	got := map[string][]measured{}
	note := cellNote{Cell: c.String(), Loadavg: figures.Load(), Busy: map[string]float64{}}
	quiet := func(s system) int {
		n := 0
		for _, r := range got[s.name()] {
			if r.busy <= m.busy {
				n++
			}
		}
		return n
	}
	for attempt := range m.rounds * m.patience {
		for i := range m.systems {
			s := m.systems[(attempt+i)%len(m.systems)]
			if quiet(s) >= m.rounds {
				continue
			}
			r, err := m.once(ctx, s, c)
			if err != nil {
				return fmt.Errorf("%s: %s: %w", c, s.name(), err)
			}
			got[s.name()] = append(got[s.name()], r)
		}
	}
	for _, s := range m.systems {
		rounds := got[s.name()]
		slices.SortStableFunc(rounds, func(a, b measured) int { return cmp.Compare(a.busy, b.busy) })
		note.Dropped += len(rounds[m.rounds:])
		rounds = rounds[:m.rounds]
		note.Busy[s.name()] = figures.Round(rounds[len(rounds)-1].busy, 2)
		for _, op := range ops {
			var all sample
			for _, r := range rounds {
				all.merge(r.samples[op])
			}
			if len(all.took)+all.failures == 0 {
				continue
			}
			m.rows = append(m.rows, all.row(s.name(), op, c))
			if all.firstErr != nil {
				fmt.Fprintf(m.log, "%s: %s: %s: %d failed: %v\n", c, s.name(), op, all.failures, all.firstErr)
			}
		}
	}
	m.cells = append(m.cells, note)
	fmt.Fprintf(m.log, "%s: busy %v, dropped %d, load %s\n", c, note.Busy, note.Dropped, note.Loadavg)
	return nil
}

// once is one round of one system.
func (m *matrix) once(ctx context.Context, s system, c cell) (measured, error) {
	pods, err := m.sandboxes(m.pods(c.concurrency), c.family)
	if err != nil {
		return measured{}, err
	}
	var r measured
	r.busy, err = disturbance(func() error {
		r.samples, err = round(ctx, s, pods, c.concurrency, m.budget)
		return err
	})
	return r, err
}

// warmUp runs everything once, so that files are cached and pools filled.
func (m *matrix) warmUp(ctx context.Context) error {
	for _, s := range m.systems {
		for _, family := range m.families {
			if _, err := m.once(ctx, s, cell{8, 0, family}); err != nil {
				return fmt.Errorf("warm up %s: %w", s.name(), err)
			}
		}
	}
	return nil
}

// close gives up all namespaces; what is in them goes with them.
func (m *matrix) close() error {
	err := m.pool.close()
	for _, h := range m.homes {
		if e := h.close(); err == nil {
			err = e
		}
	}
	return err
}

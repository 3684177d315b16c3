package flows

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Report is how flows fared since a moment.
type Report struct {
	// Flows is how many there are.
	Flows int
	// Broken are those that have ended, or have delivered what was never said.
	Broken []string
	// Sources are those that the server has seen, sorted.
	Sources []netip.Addr
	// Pauses has the longest of each flow, those first that are shortest in comparison with its own before.
	Pauses []Pause
}

// Over are the pauses that are longer than the flow's own before by more than a bound.
func (r Report) Over(bound time.Duration) []Pause {
	i := slices.IndexFunc(r.Pauses, func(p Pause) bool { return p.More() > bound })
	if i < 0 {
		return nil
	}
	return r.Pauses[i:]
}

// Longer is the pause of the flow that was silent longest in comparison with its own before.
func (r Report) Longer() Pause {
	if len(r.Pauses) == 0 {
		return Pause{}
	}
	return r.Pauses[len(r.Pauses)-1]
}

// Pause is how long a flow was silent at most.
type Pause struct {
	Flow string
	// Before is in the 10 s before the moment, and Since in the time since then.
	Before, Since time.Duration
}

// More is how much longer the pause is than the flow's own before.
func (p Pause) More() time.Duration { return p.Since - p.Before }

func (p Pause) String() string {
	return fmt.Sprintf("%s was silent for %s, and for %s before", p.Flow, p.Since.Round(time.Millisecond), p.Before.Round(time.Millisecond))
}

func (r Report) String() string {
	if r.Flows == 0 {
		return "no flows"
	}
	half := r.Pauses[r.Flows/2]
	return fmt.Sprintf("%d flows, of which %d are broken, from %v; half of them were silent for %s longer than before at most; %s", r.Flows, len(r.Broken), r.Sources, half.More().Round(time.Millisecond), r.Longer())
}

// before is how much of the time before a moment counts.
const before = 10 * time.Second

// all are the flows.
func (s *Set) all() []*flow {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.flows)
}

// Since reports how the flows have fared since a moment.
func (s *Set) Since(moment time.Time) Report {
	now := time.Now()
	var r Report
	sources := map[netip.Addr]bool{}
	for _, f := range s.all() {
		f.mu.Lock()
		r.Flows++
		sources[f.source.Addr()] = true
		p := f.pause(moment, now)
		if f.failed != nil {
			r.Broken = append(r.Broken, fmt.Sprintf("%s: %s", f, f.failed))
		}
		f.mu.Unlock()
		r.Pauses = append(r.Pauses, p)
	}
	slices.SortFunc(r.Pauses, func(a, b Pause) int { return cmp.Compare(a.More(), b.More()) })
	r.Sources = slices.SortedFunc(maps.Keys(sources), netip.Addr.Compare)
	return r
}

// pause returns the longest pauses before a moment and since; f.mu is held. The pause in which the moment is counts as one since.
func (f *flow) pause(moment, now time.Time) Pause {
	p := Pause{Flow: f.String()}
	last := now.Add(-time.Hour)
	if len(f.heard) > 0 {
		last = f.heard[0]
	}
	for _, t := range append(slices.Clip(f.heard), now) {
		gap := t.Sub(last)
		switch {
		case t.After(moment):
			p.Since = max(p.Since, gap)
		case t.After(moment.Add(-before)):
			p.Before = max(p.Before, gap)
		}
		last = t
	}
	return p
}

// String names the flow; f.mu is held.
func (f *flow) String() string {
	how := "asked by its client"
	if f.push {
		how = "pushed by the server"
	}
	return fmt.Sprintf("flow %d from %s as %s, %s", f.number, f.client, f.source, how)
}

// Talked returns an error unless each flow has delivered a word since a moment.
func (s *Set) Talked(since time.Time) error {
	silent, all := "", s.all()
	n := 0
	for _, f := range all {
		f.mu.Lock()
		if len(f.heard) == 0 || f.heard[len(f.heard)-1].Before(since) {
			if n++; n == 1 {
				silent = f.String()
				if f.failed != nil {
					silent += ": " + f.failed.Error()
				}
			}
		}
		f.mu.Unlock()
	}
	if n > 0 {
		return fmt.Errorf("%d of %d flows are silent, such as %s", n, len(all), silent)
	}
	return nil
}

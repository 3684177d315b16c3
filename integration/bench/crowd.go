package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/coil-net/coil/integration/bench/figures"
)

const (
	// crowdPairs is how often a node with crowdPods pods is compared with an empty one, in turns, and crowdRounds how many
	// rounds each turn has.
	crowdPairs, crowdPods, crowdRounds = 5, 1000, 2
)

// Crowd has the speed of Coil on a node with many pods, as a part of that on an empty node.
type Crowd struct {
	Ratios []CrowdRatio `json:"ratios,omitempty"`
}

// CrowdRatio has the pairs of one operation and one family.
type CrowdRatio struct {
	Op     string    `json:"op"`
	Family string    `json:"family"`
	Pairs  []float64 `json:"pairs"`
}

// crowded compares a node that has many pods with an empty one, in turns. The machine's speed changes within minutes,
// by more than the difference.
func (m *matrix) crowded(ctx context.Context, c *coil) (all Crowd, err error) {
	for _, family := range m.families {
		pairs := map[string][]float64{}
		for i := range crowdPairs {
			rates := map[int]map[string]float64{}
			order := []int{0, crowdPods}
			if i%2 == 1 {
				slices.Reverse(order)
			}
			for _, n := range order {
				if err := m.populate(ctx, c, n, family); err != nil {
					return all, err
				}
				if rates[n], err = m.rates(ctx, c, cell{8, n, family}); err != nil {
					return all, err
				}
				if err := m.empty(ctx, c); err != nil {
					return all, err
				}
			}
			for _, op := range []string{"ADD", "DEL"} {
				pairs[op] = append(pairs[op], figures.Round(rates[crowdPods][op]/rates[0][op], 3))
			}
		}
		for _, op := range []string{"ADD", "DEL"} {
			all.Ratios = append(all.Ratios, CrowdRatio{Op: op, Family: family, Pairs: pairs[op]})
		}
	}
	return all, nil
}

// rates are calls per second, by operation.
func (m *matrix) rates(ctx context.Context, s system, c cell) (map[string]float64, error) {
	var all measured
	for i := range crowdRounds {
		r, err := m.once(ctx, s, c)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c, err)
		}
		if i == 0 {
			all = r
			continue
		}
		for op, more := range r.samples {
			sum := all.samples[op]
			sum.merge(more)
			all.samples[op] = sum
		}
	}
	rates := map[string]float64{}
	for op, s := range all.samples {
		if s.failures > 0 {
			return nil, fmt.Errorf("%s: %s: %d failed: %w", c, op, s.failures, s.firstErr)
		}
		rates[op] = float64(len(s.took)) / s.elapsed.Seconds()
	}
	return rates, nil
}

// targets adds the ratios to the figures. Those of IPv4 have a target.
func (c Crowd) targets(all *figures.Figures) {
	for _, r := range c.Ratios {
		sorted := slices.Sorted(slices.Values(r.Pairs))
		name := fmt.Sprintf("%s, 8 at once, %s, onto %d pods by onto none, median of %d pairs", r.Op, r.Family, crowdPods, len(sorted))
		switch median := sorted[len(sorted)/2]; r.Family {
		case ipv4:
			all.AtLeast(name, "", median, 0.8)
		default:
			all.Note(name, "", median)
		}
	}
}

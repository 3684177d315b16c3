package main

import (
	"time"

	"github.com/coil-net/coil/integration/bench/figures"
)

// Row is one line of bench.json.
type Row struct {
	// System is kernel, exec, ptp or coil; Op is ADD, CHECK or DEL.
	System string `json:"system"`
	Op     string `json:"op"`
	// Concurrency is how many calls run at once, Existing how many pods the node has
	// already, Family ipv4 or dual.
	Concurrency int    `json:"concurrency"`
	Existing    int    `json:"existing"`
	Family      string `json:"family"`
	// N are the calls that were made, Failures those of them that failed. Only those that
	// succeeded are in the rest.
	N        int `json:"n"`
	Failures int `json:"failures"`
	// Quantiles of the duration of a call, in milliseconds.
	P50 float64 `json:"p50_ms"`
	P90 float64 `json:"p90_ms"`
	P99 float64 `json:"p99_ms"`
	Max float64 `json:"max_ms"`
	// Rate are the calls per second; for DEL until the last link is gone.
	Rate float64 `json:"rate"`
}

// sample is what one cell of the table was measured with, in one round or several.
type sample struct {
	took     []time.Duration // of the calls that succeeded
	failures int
	elapsed  time.Duration
	firstErr error
}

func (s *sample) merge(o sample) {
	s.took = append(s.took, o.took...)
	s.failures += o.failures
	s.elapsed += o.elapsed
	if s.firstErr == nil {
		s.firstErr = o.firstErr
	}
}

// row computes the figures of a cell.
func (s *sample) row(system, op string, c cell) Row {
	r := Row{
		System: system, Op: op, Concurrency: c.concurrency, Existing: c.existing, Family: c.family,
		N: len(s.took) + s.failures, Failures: s.failures,
		P50: figures.Quantile(s.took, 0.50), P90: figures.Quantile(s.took, 0.90), P99: figures.Quantile(s.took, 0.99), Max: figures.Quantile(s.took, 1),
	}
	if s.elapsed > 0 {
		r.Rate = figures.Round(float64(len(s.took))/s.elapsed.Seconds(), 1)
	}
	return r
}

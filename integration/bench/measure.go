package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// settleTimeout is for how long DELs may leave links behind that they promised to
// remove.
const settleTimeout = 30 * time.Second

// call does one operation for a pod.
type call func(ctx context.Context, p *pod) error

// batch calls do for each of the pods, so many at once, from threads in the system's
// node, and measures each. No call begins after the budget is used up. Returned are
// the pods for which it succeeded.
func batch(ctx context.Context, s system, pods []*pod, concurrency int, budget time.Duration, do call) (sample, []*pod, error) {
	type outcome struct {
		took []time.Duration
		done []*pod
		errs []error
	}
	outcomes := make([]outcome, concurrency)
	var next atomic.Int64
	var ready, workers sync.WaitGroup
	ready.Add(concurrency)
	start := make(chan struct{})
	var begin time.Time
	entered := make([]error, concurrency)
	for w := range concurrency {
		workers.Go(func() {
			var once sync.Once
			isReady := func() { once.Do(ready.Done) }
			defer isReady()
			entered[w] = s.node().Do(func() error {
				isReady()
				<-start
				o := &outcomes[w]
				for ctx.Err() == nil && time.Since(begin) < budget {
					i := int(next.Add(1)) - 1
					if i >= len(pods) {
						break
					}
					t := time.Now()
					err := do(ctx, pods[i])
					if took := time.Since(t); err == nil {
						o.took, o.done = append(o.took, took), append(o.done, pods[i])
					} else {
						o.errs = append(o.errs, err)
					}
				}
				return nil
			})
		})
	}
	ready.Wait()
	begin = time.Now()
	close(start)
	workers.Wait()
	sum := sample{elapsed: time.Since(begin)}
	var done []*pod
	for _, o := range outcomes {
		sum.took = append(sum.took, o.took...)
		sum.failures += len(o.errs)
		if sum.firstErr == nil && len(o.errs) > 0 {
			sum.firstErr = o.errs[0]
		}
		done = append(done, o.done...)
	}
	return sum, done, errors.Join(append(entered, ctx.Err())...)
}

// settle waits until none of the pods has a link any more, and returns how long that took.
func settle(ctx context.Context, s system, pods []*pod) (time.Duration, error) {
	if !s.wires() {
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	begin := time.Now()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for i := 0; i < len(pods); {
		there, err := pods[i].has(ifName)
		if err != nil {
			return 0, err
		}
		if !there {
			i++
			continue
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("%s still has the link of pod %d after %s", s.name(), pods[i].number, time.Since(begin))
		case <-tick.C:
		}
	}
	return time.Since(begin), nil
}

// ops are measured in this order.
var ops = []string{"ADD", "CHECK", "DEL"}

// round attaches pods, checks them, and detaches them.
func round(ctx context.Context, s system, pods []*pod, concurrency int, budget time.Duration) (map[string]sample, error) {
	const unlimited = time.Hour
	got := map[string]sample{}
	added, attached, err := batch(ctx, s, pods, concurrency, budget, s.add)
	if err != nil {
		return nil, err
	}
	got["ADD"] = added
	if s.checks() {
		if got["CHECK"], _, err = batch(ctx, s, attached, concurrency, budget, s.check); err != nil {
			return nil, err
		}
	}
	deleted, gone, err := batch(ctx, s, attached, concurrency, unlimited, s.del)
	if err != nil {
		return nil, err
	}
	rest, err := settle(ctx, s, gone)
	if err != nil {
		return nil, err
	}
	deleted.elapsed += rest
	got["DEL"] = deleted
	// A failed ADD may have left something: a runtime calls DEL after it.
	if len(gone) < len(pods) && (added.failures > 0 || deleted.failures > 0) {
		if _, _, err := batch(ctx, s, pods, concurrency, unlimited, s.del); err != nil {
			return nil, err
		}
		if _, err := settle(ctx, s, pods); err != nil {
			return nil, err
		}
	}
	return got, nil
}

package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// cpuTime is the processor time that all threads of a process have used, exact to the nanosecond, by
// its clock (clock_getcpuclockid(3)): /proc counts ticks of 10 ms, a tenth of what is looked for.
func cpuTime(pid int) (time.Duration, error) {
	const scheduled = 2 // CPUCLOCK_SCHED, linux/posix-timers.h
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|scheduled), &t); err != nil {
		return 0, fmt.Errorf("read the clock of process %d: %w", pid, err)
	}
	return time.Duration(t.Nano()), nil
}

// usage is the part of a processor that each of some processes uses while something is done.
func usage(ctx context.Context, pids []int, do func(context.Context) error) ([]float64, error) {
	read := func() ([]time.Duration, error) {
		var all []time.Duration
		for _, pid := range pids {
			t, err := cpuTime(pid)
			if err != nil {
				return nil, err
			}
			all = append(all, t)
		}
		return all, nil
	}
	before, err := read()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := do(ctx); err != nil {
		return nil, err
	}
	took := time.Since(began)
	after, err := read()
	if err != nil {
		return nil, err
	}
	parts := make([]float64, len(pids))
	for i := range pids {
		parts[i] = (after[i] - before[i]).Seconds() / took.Seconds()
	}
	return parts, nil
}

// pass lets time pass, which is what is measured.
func pass(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		}
	}
}

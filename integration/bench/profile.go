package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// profile attaches and detaches pods for a while and saves a CPU profile of coild of
// that time, and next to it, with ".allocs" at the end, one of what it allocated. It says
// what the calls cost, which says more than how long they take when others use the
// machine.
func (m *matrix) profile(ctx context.Context, c *coil, span time.Duration, path string, out io.Writer) error {
	fetched := make(chan error, 1)
	go func() { fetched <- c.fetch(ctx, fmt.Sprintf("profile?seconds=%d", int(span.Seconds())), path) }()
	type cost struct {
		calls          int
		daemon, plugin time.Duration
	}
	costs := map[string]cost{}
	for {
		pods, err := m.sandboxes(m.pods(8), m.families[0])
		if err != nil {
			return err
		}
		for _, op := range []struct {
			name string
			do   call
		}{{"ADD", c.add}, {"CHECK", c.check}, {"DEL", c.del}} {
			daemon, err := cpuTime(c.machine.Coild.PID())
			if err != nil {
				return err
			}
			plugin := c.spent.Load()
			got, _, err := batch(ctx, c, pods, 8, time.Hour, op.do)
			if err == nil && op.name == "DEL" {
				_, err = settle(ctx, c, pods)
			}
			if err != nil {
				return err
			}
			if got.firstErr != nil {
				fmt.Fprintf(m.log, "%s: %d failed: %v\n", op.name, got.failures, got.firstErr)
			}
			after, err := cpuTime(c.machine.Coild.PID())
			if err != nil {
				return err
			}
			sum := costs[op.name]
			costs[op.name] = cost{sum.calls + len(pods), sum.daemon + after - daemon, sum.plugin + time.Duration(c.spent.Load()-plugin)}
		}
		select {
		case err := <-fetched:
			for _, op := range ops {
				n := time.Duration(max(costs[op].calls, 1))
				fmt.Fprintf(out, "%-5s %5d calls, processor time of each: coild %s, plugin %s\n", op, n, costs[op].daemon/n, costs[op].plugin/n)
			}
			return errors.Join(err, c.fetch(ctx, "allocs", path+".allocs"))
		default:
		}
	}
}

// fetch saves one of coild's profiles; see package net/http/pprof.
func (c *coil) fetch(ctx context.Context, profile, path string) error {
	body, err := c.machine.Get(ctx, "/debug/pprof/"+profile)
	if err != nil {
		return err
	}
	return os.WriteFile(path, []byte(body), 0o644)
}

// cpuTime is the processor time that a process has used, by the scheduler's clock.
func cpuTime(pid int) (time.Duration, error) {
	var sum time.Duration
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return 0, err
	}
	for _, t := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, t.Name()))
		if err != nil {
			return 0, err
		}
		var ns time.Duration
		if _, err := fmt.Sscan(strings.Fields(string(b))[0], &ns); err != nil {
			return 0, fmt.Errorf("schedstat %q: %w", b, err)
		}
		sum += ns
	}
	return sum, nil
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// profile attaches and detaches pods for a while and saves a CPU profile of coild of
// that time. It says what the calls cost, which says more than how long they take
// when others use the machine.
func (m *matrix) profile(ctx context.Context, c *coil, span time.Duration, path string, out io.Writer) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	fetched := make(chan error, 1)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		fmt.Sprintf("http://127.0.0.1:9384/debug/pprof/profile?seconds=%d", int(span.Seconds())), nil)
	if err != nil {
		return err
	}
	go func() {
		resp, err := c.machine.HTTP().Do(req)
		if err == nil {
			_, err = io.Copy(f, resp.Body)
			err = errors.Join(err, resp.Body.Close())
		}
		fetched <- err
	}()
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
			return err
		default:
		}
	}
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

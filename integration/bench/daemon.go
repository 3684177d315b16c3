package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
)

const (
	// restingPods and restartPods are how many pods the node has when coild rests, and
	// when it is restarted.
	restingPods, restartPods = 250, 1000
	// restingAfter is how long nothing happens before coild is watched, so that the
	// cool-down of addresses is over; restingFor is for how long, in which everything that
	// it does at rest, the comparison with the kernel too, has its turn.
	restingAfter, restingFor = 75 * time.Second, 2 * time.Minute
	restarts                 = 5
	churned                  = 10000
)

// Daemon is what is measured of coild alone.
type Daemon struct {
	// RSS is its resident memory with 250 pods, after nothing has happened for a while.
	RSS float64 `json:"rss_250_pods_mib"`
	// Idle is the part of a processor that it uses then.
	Idle float64 `json:"idle_250_pods_processors"`
	// Restart is the median time from its start, with 1000 pods, to the end of the first
	// ADD.
	Restart float64 `json:"restart_1000_pods_ms"`
	// Churned are pods that were attached and detached, 8 at once onto 1000, while other
	// links came and went; so many links, and so many commands failed.
	Churned       int `json:"churned_pods"`
	ChurnedLinks  int `json:"churned_links"`
	ChurnFailures int `json:"churn_failures"`
}

// daemon measures coild with dual-stack pods.
func (m *matrix) daemon(ctx context.Context, c *coil) (d Daemon, err error) {
	// Memory that thousands of earlier pods have left isn't that of 250.
	if err := c.machine.Restart(ctx); err != nil {
		return d, err
	}
	if err := m.populate(ctx, c, restingPods, dual); err != nil {
		return d, err
	}
	if err := m.rest(ctx, c, &d); err != nil {
		return d, err
	}
	if err := m.populate(ctx, c, restartPods, dual); err != nil {
		return d, err
	}
	var took []time.Duration
	for range restarts {
		t, err := m.restart(ctx, c)
		if err != nil {
			return d, fmt.Errorf("restart coild: %w", err)
		}
		took = append(took, t)
	}
	d.Restart = figures.Quantile(took, 0.5)
	if err := m.churn(ctx, c, &d); err != nil {
		return d, err
	}
	return d, m.empty(ctx, c)
}

// rest measures a coild that has nothing to do.
func (m *matrix) rest(ctx context.Context, c *coil, d *Daemon) error {
	if err := pass(ctx, restingAfter); err != nil {
		return err
	}
	before, err := cpuTime(c.machine.Coild.PID())
	if err != nil {
		return err
	}
	if err := pass(ctx, restingFor); err != nil {
		return err
	}
	after, err := cpuTime(c.machine.Coild.PID())
	if err != nil {
		return err
	}
	d.Idle = figures.Round((after-before).Seconds()/restingFor.Seconds(), 5)
	rss, err := residentMemory(c.machine.Coild.PID())
	d.RSS = figures.Round(float64(rss)/(1<<20), 1)
	return err
}

// pass lets time pass, which is what is measured.
func pass(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// residentMemory is VmRSS of proc_pid_status(5), in bytes.
func residentMemory(pid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(b) {
		if f := bytes.Fields(line); len(f) == 3 && string(f[0]) == "VmRSS:" {
			kib, err := strconv.Atoi(string(f[1]))
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("status of process %d has no VmRSS", pid)
}

// restart returns the time from the start of coild to the end of the first ADD that is
// served; the runtime tries again at once.
func (m *matrix) restart(ctx context.Context, c *coil) (time.Duration, error) {
	c.machine.Coild.Stop()
	pods, err := m.sandboxes(1, dual)
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := c.machine.Coild.Start(); err != nil {
		return 0, err
	}
	for {
		err := c.node().Do(func() error { return c.add(ctx, pods[0]) })
		took := time.Since(begin)
		if err == nil {
			_, _, err := batch(ctx, c, pods, 1, time.Hour, c.del)
			return took, err
		}
		if ctx.Err() != nil || took > settleTimeout {
			return 0, fmt.Errorf("no ADD is served after %s: %w", took, err)
		}
	}
}

// churn attaches and detaches pods while links that aren't Coil's come and go on the
// node.
func (m *matrix) churn(ctx context.Context, c *coil, d *Daemon) error {
	g, ctx := errgroup.WithContext(ctx)
	done := make(chan struct{})
	g.Go(func() error {
		for {
			select {
			case <-done:
				return nil
			default:
			}
			if err := link(ctx, c.node()); err != nil {
				return err
			}
			d.ChurnedLinks++
		}
	})
	g.Go(func() error {
		defer close(done)
		for d.Churned < churned {
			pods, err := m.sandboxes(96, dual)
			if err != nil {
				return err
			}
			for _, do := range []call{c.add, c.del} {
				got, _, err := batch(ctx, c, pods, 8, time.Hour, do)
				if err != nil {
					return err
				}
				if d.ChurnFailures += got.failures; got.firstErr != nil {
					fmt.Fprintf(m.log, "while links come and go, %d failed: %v\n", got.failures, got.firstErr)
				}
			}
			if _, err := settle(ctx, c, pods); err != nil {
				return err
			}
			d.Churned += len(pods)
		}
		return nil
	})
	return g.Wait()
}

// link makes a pair of links and removes it.
func link(ctx context.Context, node *space) error {
	const name, peer = "churn0", "churn1"
	err := node.handle.Do(ctx, rtnl.AddVeth(rtnl.Veth{
		Name: name, MAC: net.HardwareAddr{2, 0xc0, 0, 0, 0, 0}, Up: true,
		PeerName: peer, PeerMAC: net.HardwareAddr{2, 0xc0, 0, 0, 0, 1}, PeerNetns: node.Fd(), MTU: 1500,
	}))
	if err != nil {
		return err
	}
	index, err := node.handle.IndexByName(name)
	if err != nil {
		return err
	}
	return node.handle.Do(ctx, rtnl.DelLink(index))
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/rig"
	"github.com/coil-net/coil/pkg/testkit"
)

// controller is coil-ipam-controller in a large cluster.
type controller struct {
	*fleet
	health string
}

// newController makes the cluster; blocks are left to the caller, and the controller
// isn't started.
func newController(ctx context.Context, o options) (c *controller, err error) {
	health, err := freeAddr()
	if err != nil {
		return nil, err
	}
	metrics, err := freeAddr()
	if err != nil {
		return nil, err
	}
	r, err := rig.New(ctx, rig.Options{NoController: true, Log: o.log, ControllerFlags: []string{
		"--health-addr=" + health, "--metrics-addr=" + metrics,
		// As in production: the shorter times of the rig could be missed on a busy machine.
		"--leader-election-lease-duration=30s", "--leader-election-renew-deadline=20s", "--leader-election-retry-period=5s",
	}})
	if err != nil {
		return nil, err
	}
	c = &controller{health: health}
	if c.fleet, err = newFleet(ctx, r, o.nodes, o.log); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return c, nil
}

func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// hold makes the cluster and waits for the end of ctx.
func hold(ctx context.Context, o options, out io.Writer) error {
	c, err := newController(ctx, o)
	if err != nil {
		return err
	}
	if err := c.addBlocks(ctx, o.blocks); err != nil {
		return errors.Join(err, c.rig.Close())
	}
	fmt.Fprintln(out, c.rig.Controller.Path, strings.Join(c.rig.Controller.Args, " "))
	<-ctx.Done()
	return c.rig.Close()
}

// measureController takes all figures of coil-ipam-controller.
func measureController(ctx context.Context, o options, rep *report) (err error) {
	c, err := newController(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.rig.Close()) }()
	if err := c.addBlocks(ctx, max(0, o.blocks-o.burst)); err != nil {
		return err
	}
	// The watch stands for the coilds of the nodes. It is open in all runs.
	w, err := c.watch(ctx)
	if err != nil {
		return err
	}
	defer w.close()
	// The bare client makes the last blocks. It runs again after each burst, since the machine's speed changes within
	// minutes.
	before, err := c.bareRate(ctx, o.burst)
	if err != nil {
		return err
	}
	var all []round
	for i := range rounds {
		ready, err := c.start(ctx)
		if err != nil {
			return err
		}
		first, err := c.ask(ctx, w, fmt.Sprintf("first-%d", i), 0)
		if err != nil {
			return c.withLog(err)
		}
		if i == 0 {
			rep.Figures.AtMost("controller: start to ready", "s", ready.Seconds(), 10)
			rep.Figures.Note("controller: ready to first answer", "ms", figures.Milliseconds(first))
			if err := c.singles(ctx, w, o.singles, rep); err != nil {
				return err
			}
		}
		r := round{}
		if r.served, err = c.serve(ctx, w, fmt.Sprintf("burst-%d", i), o.burst); err != nil {
			return c.withLog(err)
		}
		now, peak, err := memory(c.rig.Controller.PID())
		if err != nil {
			return err
		}
		c.rig.Controller.Stop()
		if i == 0 { // later there are more blocks
			rep.Figures.Note("controller: resident memory at the end", "MiB", now)
			rep.Figures.AtMost("controller: resident memory, most of the whole run", "MiB", peak, 150)
			c.skip()
		}
		after, err := c.bareRate(ctx, o.burst)
		if err != nil {
			return err
		}
		r.bare = 2 / (1/before + 1/after)
		before = after
		fmt.Fprintf(o.log, "%d BlockRequests: controller %.0f/s, bare client %.0f/s: %.2f\n", o.burst, r.rate, r.bare, r.rate/r.bare)
		all = append(all, r)
	}
	burst := fmt.Sprintf("%d BlockRequests at once", o.burst)
	rep.Figures.Note(burst+": time to make them", "s", median(all, func(r round) float64 { return r.making }))
	rep.Figures.Note(burst+", p50", "s", median(all, func(r round) float64 { return r.p50 }))
	rep.Figures.AtMost(burst+", p99", "s", median(all, func(r round) float64 { return r.p99 }), 7)
	rep.Figures.Note(burst+": bare client", "/s", median(all, func(r round) float64 { return r.bare }))
	rep.Figures.Note(burst+": controller", "/s", median(all, func(r round) float64 { return r.rate }))
	rep.Figures.AtLeast(burst+": controller by bare client", "", median(all, func(r round) float64 { return r.rate / r.bare }), 0.8)
	return nil
}

// rounds is how often the burst is measured, each time between two runs of the bare client. The figures are medians.
const rounds = 3

// round has the figures of one burst, and the rate of the bare client around it, per second.
type round struct {
	served
	bare float64
}

func median(all []round, figure func(round) float64) float64 {
	var values []float64
	for _, r := range all {
		values = append(values, figure(r))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// withLog adds the end of the controller's log to an error.
func (c *controller) withLog(err error) error {
	return fmt.Errorf("%w; the end of its log:\n%s", err, c.rig.Controller.Logs(20))
}

// start starts the program and returns how long it took to become ready.
func (c *controller) start(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	if err := c.rig.Controller.Start(); err != nil {
		return 0, err
	}
	err := wait.PollUntilContextTimeout(ctx, 10*time.Millisecond, testkit.Timeout(2*time.Minute), true, func(ctx context.Context) (bool, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.health+"/readyz", nil)
		if err != nil {
			return false, err
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return false, nil // it doesn't listen yet
		}
		return resp.StatusCode == http.StatusOK, resp.Body.Close()
	})
	if err != nil {
		return 0, c.withLog(fmt.Errorf("wait until the controller is ready: %w", err))
	}
	return time.Since(began), nil
}

// singles makes requests one after the other. They are deleted when they are answered,
// as coild does.
func (c *controller) singles(ctx context.Context, w *watcher, n int, rep *report) error {
	var took []time.Duration
	for i := range n {
		name := fmt.Sprintf("single-%d", i)
		d, err := c.ask(ctx, w, name, i)
		if err != nil {
			return err
		}
		took = append(took, d)
		if err := c.rig.Coil.CoilV2().BlockRequests().Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	rep.Figures.AtMost("one BlockRequest answered, p50", "ms", figures.Quantile(took, 0.5), 50)
	rep.Figures.Note("one BlockRequest answered, p99", "ms", figures.Quantile(took, 0.99))
	return nil
}

// memory returns the resident memory of a process, and the most that it ever had, in MiB.
func memory(pid int) (now, peak float64, err error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "VmRSS:" && f[0] != "VmHWM:" {
			continue
		}
		kib, err := strconv.ParseFloat(f[1], 64)
		if err != nil {
			return 0, 0, fmt.Errorf("malformed status %q: %w", line, err)
		}
		if f[0] == "VmRSS:" {
			now = kib / 1024
		} else {
			peak = kib / 1024
		}
	}
	return now, peak, nil
}

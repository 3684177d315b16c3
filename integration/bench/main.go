// Command bench measures how long it takes to attach pods to the network, and to
// detach them: the kernel alone, an empty plugin, the CNI project's ptp plugin and
// Coil, side by side in one run.
//
// It owns the method: namespaces are made before, the systems take turns, rounds in
// which others used the machine don't count, failures do. It must not know how any of
// the systems works inside.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/integration/bench/figures"
	"github.com/coil-net/coil/integration/lab/scratch"
)

// options are the command line.
type options struct {
	systems, families     []string
	existing, concurrency []int
	rounds                int
	busy                  float64
	patience              int
	daemon                bool
	guardPairs            int
	out                   string
	profile               string
	span                  time.Duration
	log                   io.Writer
}

func main() {
	playHolder()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	o := options{log: os.Stderr}
	pflag.StringSliceVar(&o.systems, "systems", []string{"kernel", "exec", "ptp", "coil"}, "what to measure")
	pflag.StringSliceVar(&o.families, "families", []string{ipv4, dual}, "address families of pods")
	pflag.IntSliceVar(&o.existing, "existing", []int{0, 1000}, "how many pods the node has already")
	pflag.IntSliceVar(&o.concurrency, "concurrency", []int{1, 8, 32}, "how many calls at once")
	pflag.IntVar(&o.rounds, "rounds", 5, "rounds of each figure")
	pflag.Float64Var(&o.busy, "busy", 0.1, "how many processors others may use in a round that counts")
	pflag.IntVar(&o.patience, "patience", 4, "how many times the rounds are tried to find enough of them")
	pflag.BoolVar(&o.daemon, "daemon", true, "measure coild's restart and memory too")
	pflag.IntVar(&o.guardPairs, "guard-pairs", 200, "how often each figure of the source guard is measured with and without it; 0 leaves them out")
	pflag.StringVar(&o.out, "out", "", "folder of the results; the default is integration/bench/out")
	pflag.StringVar(&o.profile, "profile", "", "only attach and detach with Coil, and save a CPU profile of coild in this file")
	pflag.DurationVar(&o.span, "span", 10*time.Second, "for how long to profile")
	pflag.Parse()
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	if o.out, err = figures.Folder(o.out); err != nil {
		return err
	}
	dir, err := scratch.New("coil-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Remove()) }()
	when := conditions{Conditions: figures.Now()}
	systems, c, err := start(ctx, o, dir)
	defer func() { err = errors.Join(err, closeAll(systems)) }()
	if err != nil {
		return err
	}
	slices.Sort(o.existing)
	m := newMatrix(plan{
		families: o.families, existing: o.existing, concurrency: o.concurrency, rounds: o.rounds,
		pods: podsOf, budget: 4 * time.Second, busy: o.busy, patience: o.patience,
	}, systems, o.log)
	defer func() { err = errors.Join(err, m.close()) }()
	if c != nil {
		families, staying := m.families, slices.Max(o.existing)
		if o.daemon {
			families, staying = []string{ipv4, dual}, max(staying, restartPods)
		}
		if err := m.announce(ctx, c, families, staying); err != nil {
			return err
		}
	}
	if err := m.warmUp(ctx); err != nil {
		return err
	}
	if o.profile != "" && c != nil {
		return m.profile(ctx, c, o.span, o.profile, out)
	}
	if err := m.run(ctx); err != nil {
		return err
	}
	when.Cells, when.LoadAtEnd = m.cells, figures.Load()
	fmt.Fprintln(out, when)
	if err := errors.Join(
		table(out, m.rows, o.systems),
		figures.Write(filepath.Join(o.out, "bench.json"), m.rows),
		figures.Write(filepath.Join(o.out, "conditions.json"), when),
	); err != nil {
		return err
	}
	var crowd Crowd
	if c != nil && slices.Contains(o.existing, crowdPods) {
		if crowd, err = m.crowded(ctx, c); err != nil {
			return err
		}
	}
	var d Daemon
	if o.daemon && c != nil {
		if d, err = m.daemon(ctx, c); err != nil {
			return err
		}
	}
	all := targets(m.rows, d)
	crowd.targets(&all)
	var g Guard
	if o.guardPairs > 0 {
		if g, err = measureGuard(ctx, o.guardPairs); err != nil {
			return fmt.Errorf("measure the source guard: %w", err)
		}
		g.targets(&all)
	}
	if err := errors.Join(figures.Write(filepath.Join(o.out, "crowd.json"), crowd), figures.Write(filepath.Join(o.out, "daemon.json"), d), figures.Write(filepath.Join(o.out, "guard.json"), g), figures.Write(filepath.Join(o.out, "targets.json"), all)); err != nil {
		return err
	}
	if err := all.Print(out); err != nil {
		return err
	}
	return all.Verdict()
}

// conditions are conditions.json.
type conditions struct {
	figures.Conditions
	Cells []cellNote `json:"cells,omitempty"`
}

// podsOf is how many pods a round attaches.
func podsOf(concurrency int) int {
	switch {
	case concurrency == 1:
		return 40
	case concurrency <= 8:
		return 96
	default:
		return 4 * concurrency
	}
}

// start starts the systems. The systems must be closed also after an error.
func start(ctx context.Context, o options, dir *scratch.Dir) (systems []system, c *coil, err error) {
	for _, name := range o.systems {
		var s system
		switch name {
		case "kernel":
			s, err = newKernel()
		case "exec":
			s, err = newEmpty(ctx, builder(o.log))
		case "ptp":
			s, err = newPTP(ctx, builder(o.log), dir.Path("ptp"))
		case "coil":
			c, err = newCoil(ctx, o.log)
			s = c
		default:
			err = errors.New("there is no such system")
		}
		if err != nil {
			return systems, nil, fmt.Errorf("start %s: %w", name, err)
		}
		systems = append(systems, s)
	}
	return systems, c, nil
}

// announce makes the Pod objects of all pods that there will be, so many of which stay.
func (m *matrix) announce(ctx context.Context, c *coil, families []string, staying int) error {
	for _, family := range families {
		most := 0
		for _, n := range append([]int{8}, m.concurrency...) {
			most = max(most, m.pods(n))
		}
		if err := errors.Join(
			c.announce(ctx, family, 0, staying),
			c.announce(ctx, family, firstGuest, firstGuest+most),
		); err != nil {
			return fmt.Errorf("create Pods: %w", err)
		}
	}
	return nil
}

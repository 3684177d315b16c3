// Command gotest runs the tests of the module and says what came of them: one line for each
// package, the whole output of each test that failed, and the sums at the end. It measures the
// machine, on which waits of tests depend, and runs failed tests again, to tell a fault from the
// weather. It owns how tests are run. It must not know what they test.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// options are the command line.
type options struct {
	tiers    string
	noSkips  bool
	race     bool
	run      string
	timeout  time.Duration
	packages []string

	// again is how long all repetitions of failed tests may take.
	again time.Duration
	// tolerated is how many unsteady tests don't fail the run.
	tolerated int
	measure   func(context.Context) (speed, error)
	history   string // path; empty for none
	waits     string // the value of scaleEnv for tests
}

// errFailed says that tests failed and that the report has named them.
var errFailed = errors.New("tests failed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	var o options
	flag.StringVar(&o.tiers, "tiers", "", "tiers to run besides unit tests, separated by commas: netns, apiserver, cluster, vm")
	flag.BoolVar(&o.noSkips, "no-skips", false, "count a skipped test as failed")
	flag.BoolVar(&o.race, "race", false, "detect data races in packages outside integration/")
	flag.StringVar(&o.run, "run", "", "as of go test")
	flag.DurationVar(&o.timeout, "timeout", time.Hour, "of one package")
	flag.Parse()
	o.packages = flag.Args()
	o.measure, o.again = measure, repeatFor
	if ci, _ := strconv.ParseBool(os.Getenv("CI")); ci {
		o.tolerated = toleratedByCI
	}
	var err error
	if o.history, err = historyPath(); err != nil {
		fmt.Fprintln(os.Stderr, "gotest: without a history:", err)
	}
	err = run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		if !errors.Is(err, errFailed) {
			fmt.Fprintln(os.Stderr, "gotest:", err)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, o options, out io.Writer) error {
	if len(o.packages) == 0 {
		o.packages = []string{"./..."}
	}
	o.waits = os.Getenv(scaleEnv)
	list, err := goCommand(ctx, o, how{}, append([]string{"list"}, o.packages...)...).Output()
	if err != nil {
		return fmt.Errorf("go list: %w", withStderr(err))
	}
	p := split(strings.Fields(string(list)))
	if err := compile(ctx, o, how{race: o.race}, slices.Concat(p.pure, p.timed, p.light)); err != nil {
		return err
	}
	if err := compile(ctx, o, how{}, slices.Concat(p.emulated, p.waiting, p.routing, p.heavy, p.late)); err != nil {
		return err
	}
	stopWatch, err := o.meet(ctx, out)
	if err != nil {
		return err
	}
	defer stopWatch()
	r := newReport(out, time.Now)
	// Packages that measure time come before those that wait for others most of the time, and these before
	// packages that compute all the time. With less than that their tests, which wait for seconds, get no processor in time.
	const measures, waits, computes = 0, 10, 15
	var lanes [3]error
	var wait sync.WaitGroup
	if !slices.Contains(strings.Split(o.tiers, ","), "vm") {
		// Nothing takes long in the first lane: all light packages come last.
		p.light, p.pure = append(p.light, p.pure...), nil
	}
	wait.Go(func() {
		lanes[0] = errors.Join(
			test(ctx, o, r, how{nice: computes}, p.emulated, "-p=1"),
			test(ctx, o, r, how{nice: measures}, p.routing, "-p=1"),
			test(ctx, o, r, how{nice: computes, race: o.race}, p.pure),
		)
	})
	wait.Go(func() {
		waitErr := test(ctx, o, r, how{nice: waits}, p.waiting, "-p=1")
		lanes[1] = errors.Join(waitErr, test(ctx, o, r, how{nice: waits}, p.late, "-p=1"))
	})
	wait.Go(func() {
		// Each of the heavy packages wants the whole machine, but most of the time uses one processor: the
		// others are left to the machines, which take longest. Light packages use all processors that they
		// find, so that they come last. Packages that make network namespaces never run beside those that measure
		// time: they hold locks of the kernel.
		lanes[2] = errors.Join(
			test(ctx, o, r, how{nice: measures, race: o.race}, p.timed, "-p=1"),
			test(ctx, o, r, how{nice: measures}, p.heavy, "-p=1"),
			test(ctx, o, r, how{nice: computes, race: o.race}, p.light),
		)
	})
	wait.Wait()
	err = errors.Join(append(lanes[:], ctx.Err())...)
	if err == nil {
		err = repeat(ctx, o, r, func(pkg string) how { return how{race: o.race && !strings.Contains(pkg, "/integration/")} })
	}
	var past *history
	if o.history != "" {
		past = r.remember(o)
	}
	stopWatch()
	ok := r.finish(o.noSkips, o.tolerated, past)
	if err != nil {
		return err
	}
	if !ok {
		return errFailed
	}
	return nil
}

// meet measures the machine, prints what it found in one line, and sets by how much waits of tests are
// scaled. It watches the clocks from then on; the function that it returns says at the end what it saw.
func (o *options) meet(ctx context.Context, out io.Writer) (stop func(), err error) {
	var clocks steps
	watching, cancel := context.WithCancel(ctx)
	var wait sync.WaitGroup
	wait.Go(func() { clocks.watch(watching, 100*time.Millisecond) })
	s, err := o.measure(ctx)
	if err != nil {
		cancel()
		wait.Wait()
		return nil, fmt.Errorf("measure the machine: %w", err)
	}
	waits := scaled(s.scale(), os.Getenv(scaleEnv))
	o.waits = strconv.FormatFloat(waits, 'g', 3, 64)
	fmt.Fprintf(out, "machine: %s, %s; %s=%s\n", s, &clocks, scaleEnv, o.waits)
	before, err := readProcessors()
	if err != nil {
		cancel()
		wait.Wait()
		return nil, err
	}
	return sync.OnceFunc(func() {
		cancel()
		wait.Wait()
		fmt.Fprintf(out, "\nsince the start: %s", &clocks)
		if now, err := readProcessors(); err == nil {
			fmt.Fprintf(out, ", processors busy for %.0f %% of the time", 100*now.busySince(before))
		}
		fmt.Fprintln(out)
	}), nil
}

// machines are the packages whose tests run in virtual machines above all.
var machines = []string{"/integration/egress", "/integration/lab/vm", "/integration/bench/egress", "/integration/gateway/machine"}

// lately are packages that a busy machine disturbs. They come last: kubelets in an emulated machine would be late, and pauses of connections are
// measured.
var lately = []string{"/integration/egress/cluster", "/integration/egress/native"}

// patient are the packages whose tests mostly wait for clusters.
var patient = []string{"/integration/cluster", "/integration/lab/cluster", "/integration/manifests", "/integration/migrate", "/integration/upgrade"}

// routed are the packages whose tests measure how soon routing daemons, neighbours and other nodes learn of a change. The bounds are seconds.
var routed = []string{"/integration/routes", "/integration/neighbours", "/integration/floating"}

// kernels are the packages outside integration/ whose tests make network namespaces.
var kernels = []string{"/pkg/kernel/", "/pkg/podnet", "/pkg/clientnet", "/pkg/node/", "/pkg/router", "/pkg/store/sqlite", "/pkg/testkit/netlab"}

// timed are the packages outside integration/ that hold a time of milliseconds to a bound.
var timed = []string{"/pkg/app/coil"}

// parts are packages by what their tests want of the machine.
type parts struct{ timed, light, pure, heavy, waiting, routing, late, emulated []string }

// split separates the packages of integration/ from the others, and of those the ones that
// wait, the ones that come after these, and the ones that run in machines. Of the others it
// separates the ones that measure, and the ones that make no network namespace.
func split(packages []string) (s parts) {
	for _, p := range packages {
		is := func(list []string) bool {
			return slices.ContainsFunc(list, func(m string) bool { return strings.HasSuffix(p, m) })
		}
		switch {
		case is(lately):
			s.late = append(s.late, p)
		case is(machines):
			s.emulated = append(s.emulated, p)
		case is(patient):
			s.waiting = append(s.waiting, p)
		case is(routed):
			s.routing = append(s.routing, p)
		case strings.Contains(p, "/integration/"):
			s.heavy = append(s.heavy, p)
		case is(timed):
			s.timed = append(s.timed, p)
		case slices.ContainsFunc(kernels, func(k string) bool { return strings.Contains(p+"/", k) }):
			s.light = append(s.light, p)
		default:
			s.pure = append(s.pure, p)
		}
	}
	return s
}

// how is the way that tests are run.
type how struct {
	// race detects data races.
	race bool
	// nice is as of nice(1): how much it leaves the processors to whoever else wants them.
	nice int
}

// flags are the build flags, the same for go test and go list.
func (h how) flags() []string {
	if h.race {
		// SQLite is translated from C. To watch each of its accesses makes its tests ten times as long.
		return []string{"-race", "-gcflags=modernc.org/...=-race=false"}
	}
	return nil
}

// compile compiles packages and their tests into the cache. With an empty cache that takes all processors for minutes, in which tests would be late.
// A package that doesn't compile is no error: its tests report it.
func compile(ctx context.Context, o options, h how, packages []string) error {
	if len(packages) == 0 {
		return nil
	}
	out, err := goCommand(ctx, o, h, slices.Concat([]string{"list", "-e", "-export", "-test", "-f", ""}, h.flags(), packages)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("go list -export: %w\n%s", err, out)
	}
	return nil
}

// test runs the tests of packages, if there are any, and reports them. That some fail is no
// error: the report has it.
func test(ctx context.Context, o options, r *report, h how, packages []string, flags ...string) error {
	if len(packages) == 0 {
		return nil
	}
	// Nobody debugs these programs, and without what debuggers need they are linked sooner.
	args := append([]string{"test", "-json", "-ldflags=-s", "-timeout=" + o.timeout.String()}, flags...)
	if o.run != "" {
		args = append(args, "-run="+o.run)
	}
	args = append(args, h.flags()...)
	if o.tiers != "" {
		args = append(args, "-count=1") // what these tests find isn't only in the files that go test knows
	}
	cmd := goCommand(ctx, o, h, append(args, packages...)...)
	cmd.Stderr = os.Stderr
	// Tests have things to clean up: they get an interrupt first, as from a terminal, which the go command doesn't pass on.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = time.Minute
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := read(stdout, r)
	err = cmd.Wait()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && r.failed() {
		err = nil
	}
	return errors.Join(readErr, err)
}

// read hands the events of go test to r. Now and then it says which tests run, so that a
// long silence isn't taken for a hang.
func read(stdout io.Reader, r *report) error {
	lines := make(chan []byte)
	failed := make(chan error, 1)
	go func() {
		defer close(lines)
		s := bufio.NewReader(stdout)
		for {
			line, err := s.ReadBytes('\n')
			if len(line) > 0 {
				lines <- line
			}
			if err != nil {
				if !errors.Is(err, io.EOF) {
					failed <- err
				}
				return
			}
		}
	}()
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	for {
		select {
		case line, ok := <-lines:
			if !ok {
				select {
				case err := <-failed:
					return fmt.Errorf("read the output of go test: %w", err)
				default:
					return nil
				}
			}
			var e event
			if json.Unmarshal(line, &e) != nil {
				r.stray(line)
				continue
			}
			r.add(e)
		case <-tick.C:
			r.heartbeat()
		}
	}
}

// goCommand prepares the go command. Like the programs, tests are built without cgo, which only
// the race detector needs: so both share what is compiled.
func goCommand(ctx context.Context, o options, h how, args ...string) *exec.Cmd {
	command := append([]string{"go"}, args...)
	if h.nice > 0 {
		command = append([]string{"nice", "-n", strconv.Itoa(h.nice)}, command...)
	}
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cgo := "CGO_ENABLED=0"
	if h.race {
		cgo = "CGO_ENABLED=1"
	}
	// Processes that tests start would wait for a second at their end, in case that others race.
	// Kubernetes' programs collect garbage less often; see integration/lab/proc.
	cmd.Env = append(os.Environ(), cgo, "GORACE=atexit_sleep_ms=0", "COIL_LAB_GOGC=400", "COIL_TEST_TIERS="+o.tiers)
	if o.waits != "" {
		cmd.Env = append(cmd.Env, scaleEnv+"="+o.waits)
	}
	return cmd
}

func withStderr(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w\n%s", err, exit.Stderr)
	}
	return err
}

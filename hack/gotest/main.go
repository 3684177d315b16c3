// Command gotest runs the tests of the module and says what came of them: one line for each
// package, the whole output of each test that failed, and the sums at the end. It owns how
// tests are run. It must not know what they test.
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
	"strings"
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
	err := run(ctx, o, os.Stdout)
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
	list, err := goCommand(ctx, o.tiers, false, append([]string{"list"}, o.packages...)...).Output()
	if err != nil {
		return fmt.Errorf("go list: %w", withStderr(err))
	}
	light, heavy := split(strings.Fields(string(list)))
	r := newReport(out, time.Now)
	var errs []error
	if len(light) > 0 {
		errs = append(errs, test(ctx, o, r, o.race, light))
	}
	// Each of these packages wants the whole machine.
	if len(heavy) > 0 {
		errs = append(errs, test(ctx, o, r, false, heavy, "-p=1"))
	}
	ok := r.finish(o.noSkips)
	if err := errors.Join(append(errs, ctx.Err())...); err != nil {
		return err
	}
	if !ok {
		return errFailed
	}
	return nil
}

// split separates the packages of integration/ from the others.
func split(packages []string) (light, heavy []string) {
	for _, p := range packages {
		if strings.Contains(p, "/integration/") {
			heavy = append(heavy, p)
		} else {
			light = append(light, p)
		}
	}
	return light, heavy
}

// test runs the tests of packages and reports them. That some fail is no error: the report
// has it.
func test(ctx context.Context, o options, r *report, race bool, packages []string, flags ...string) error {
	args := append([]string{"test", "-json", "-timeout=" + o.timeout.String()}, flags...)
	if o.run != "" {
		args = append(args, "-run="+o.run)
	}
	if race {
		args = append(args, "-race")
	}
	if o.tiers != "" {
		args = append(args, "-count=1") // what these tests find isn't only in the files that go test knows
	}
	cmd := goCommand(ctx, o.tiers, race, append(args, packages...)...)
	cmd.Stderr = os.Stderr
	// Tests have things to clean up: they get an interrupt first.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
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
func goCommand(ctx context.Context, tiers string, race bool, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cgo := "CGO_ENABLED=0"
	if race {
		cgo = "CGO_ENABLED=1"
	}
	cmd.Env = append(os.Environ(), cgo, "COIL_TEST_TIERS="+tiers)
	return cmd
}

func withStderr(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w\n%s", err, exit.Stderr)
	}
	return err
}

// Command fuzz runs the fuzz functions of packages, each for the same time and with one worker. As many run at once as there
// are processors. Each has one line of output. A failure has more: the output of the test, the file of the input, and the
// command that tries this input again.
//
// It owns the search for fuzz functions and their processes. It must not know what they test.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// options are the command line.
type options struct {
	time     time.Duration
	match    *regexp.Regexp
	packages []string
	// corpus is the folder of inputs that earlier runs found worth keeping.
	corpus string
}

// errFailed says that functions failed and that their lines have named them.
var errFailed = errors.New("fuzz functions failed")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	var o options
	flag.DurationVar(&o.time, "time", 5*time.Minute, "for how long to run each function")
	match := flag.String("run", "", "run only functions whose name matches this regular expression")
	flag.Parse()
	o.packages = flag.Args()
	var err error
	if o.match, err = regexp.Compile(*match); err == nil {
		err = run(ctx, o, os.Stdout)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}

// run runs the functions and writes their lines to out.
func run(ctx context.Context, o options, out io.Writer) error {
	began := time.Now()
	all, err := find(ctx, o)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		return errors.New("there is no fuzz function in these packages")
	}
	if o.corpus == "" {
		cache, err := goCommand(ctx, "env", "GOCACHE").Output()
		if err != nil {
			return withStderr(err)
		}
		o.corpus = filepath.Join(strings.TrimSpace(string(cache)), "fuzz") // that of "go test -fuzz"
	}
	dir, err := os.MkdirTemp("", "coil-fuzz-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := build(ctx, all, dir); err != nil {
		return err
	}
	built := time.Since(began)

	queue := make(chan function, len(all))
	for _, f := range all {
		queue <- f
	}
	close(queue)
	var mu sync.Mutex // of out and failed
	failed := 0
	var lanes sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		lanes.Go(func() {
			for f := range queue {
				if ctx.Err() != nil {
					return
				}
				line, ok := f.run(ctx, o)
				mu.Lock()
				if !ok {
					failed++
				}
				fmt.Fprintln(out, line)
				mu.Unlock()
			}
		})
	}
	lanes.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	fmt.Fprintf(out, "\n%d fuzz functions, %d failed, in %s, of which %s to build them\n",
		len(all), failed, time.Since(began).Round(time.Second), built.Round(time.Second))
	if failed > 0 {
		return errFailed
	}
	return nil
}

// build compiles the tests of each package into dir, with the instructions by which fuzzing sees which code an input
// reaches.
func build(ctx context.Context, all []function, dir string) error {
	programs := map[string]string{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0)) // most of a build is its link, which keeps one processor busy
	for i := range all {
		f := &all[i]
		if f.program = programs[f.pkg]; f.program != "" {
			continue
		}
		f.program = filepath.Join(dir, fmt.Sprintf("%d.test", len(programs)))
		programs[f.pkg] = f.program
		group.Go(func() error {
			// The go command fuzzes one package at a time. It is linked once for all its functions.
			cmd := goCommand(ctx, "test", "-c", "-vet=off", "-fuzz=.", "-ldflags=-s", "-o", f.program, f.pkg)
			if text, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("build the tests of %s: %w\n%s", f.pkg, err, text)
			}
			return nil
		})
	}
	return group.Wait()
}

// run runs the function for o.time. line is its output, and ok is false if it failed.
func (f function) run(ctx context.Context, o options) (line string, ok bool) {
	// A worker that is killed at the end leaves its temporary files.
	temp, err := os.MkdirTemp("", "coil-fuzz-")
	if err != nil {
		return fmt.Sprintf("--- FAIL %s: %v", f, err), false
	}
	defer os.RemoveAll(temp)
	began := time.Now()
	// By default an input may be made smaller for a minute: in a short time no other one would be tried.
	smaller := min(o.time/100, time.Minute)
	cmd := exec.CommandContext(ctx, f.program, "-test.run=^$", "-test.fuzz=^"+f.name+"$", "-test.fuzztime="+o.time.String(),
		"-test.fuzzminimizetime="+smaller.String(), "-test.fuzzcachedir="+filepath.Join(o.corpus, f.pkg), "-test.parallel=1", "-test.paniconexit0")
	cmd.Dir, cmd.Env = f.dir, append(os.Environ(), "TMPDIR="+temp)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it ends its worker, too
	cmd.WaitDelay = 10 * time.Second
	text, err := cmd.CombinedOutput()
	took := time.Since(began).Round(time.Second)
	if err == nil || expired(string(text)) {
		return fmt.Sprintf("ok   %s %s%s", f, took, sums(string(text))), true
	}
	line = fmt.Sprintf("--- FAIL %s %s\n%s", f, took, indent(string(text)))
	if input := failingInput.FindStringSubmatch(string(text)); input != nil {
		line += fmt.Sprintf("\n    the input is in %s\n    once more: go test -run='^%s$/^%s$' %s", filepath.Join(f.dir, input[1]), f.name, filepath.Base(input[1]), f.pkg)
	}
	return line, false
}

var (
	// progress is a line of the testing package while it fuzzes.
	progress = regexp.MustCompile(`(?m)^fuzz: elapsed: \S+, execs: (\d+) .*new interesting: (\d+) `)
	// failingInput is its line about the input that failed, after it was made as small as it could.
	failingInput = regexp.MustCompile(`(?m)^\s*Failing input written to (\S+)$`)
	timeIsUp     = regexp.MustCompile(`(?m)^\s*` + regexp.QuoteMeta(context.DeadlineExceeded.Error()) + `$`)
)

// expired says whether nothing failed but that the time was up, which the testing package takes for an error when it
// notices it at the wrong moment.
func expired(text string) bool {
	return timeIsUp.MatchString(text) && !failingInput.MatchString(text) && strings.Count(text, "--- FAIL") == 1
}

// sums returns the number of inputs that were tried, and of those that reached new code.
func sums(text string) string {
	all := progress.FindAllStringSubmatch(text, -1)
	if len(all) == 0 {
		return ", none but the known inputs: they took all the time"
	}
	last := all[len(all)-1]
	return fmt.Sprintf(", %s inputs, %s of them new", last[1], last[2])
}

// indent returns the text without the lines about progress.
func indent(text string) string {
	lines := slices.DeleteFunc(strings.Split(strings.TrimSpace(text), "\n"), func(l string) bool { return strings.HasPrefix(l, "fuzz: ") })
	return "    " + strings.Join(lines, "\n    ")
}

// goCommand prepares the go command. Like the programs, tests are built without cgo.
func goCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	return cmd
}

func withStderr(err error) error {
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return fmt.Errorf("%w\n%s", err, exit.Stderr)
	}
	return err
}

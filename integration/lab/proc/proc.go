// Package proc runs a helper program as a child that can't outlive its parent: its output goes
// to a file, its end is observable, and it dies when the parent does, however that dies. It
// knows nothing of what it runs.
package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// GarbageEnv in the environment is the GOGC of Kubernetes' programs, which hack/gotest sets for tests: they wait for kube-apiserver, and that uses a fifth of its
// processor time to collect garbage. Benchmarks have the programs as users have them.
const GarbageEnv = "COIL_LAB_GOGC"

// Thrifty is what to add to the environment of these programs. Memory is bounded (https://pkg.go.dev/runtime#hdr-Environment_Variables).
func Thrifty() []string {
	if gogc := os.Getenv(GarbageEnv); gogc != "" {
		return []string{"GOGC=" + gogc, "GOMEMLIMIT=2GiB"}
	}
	return nil
}

// Command says what to run.
type Command struct {
	Path string
	Args []string // without the program's name
	Env  []string // nil: the parent's
	Log  string   // file that stdout and stderr are appended to
}

// Process is a running or ended child.
type Process struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{}
	err  error // valid once done is closed
}

// Start starts the child.
func Start(c Command) (*Process, error) {
	log, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &Process{name: filepath.Base(c.Path), log: c.Log, done: make(chan struct{})}
	p.cmd = exec.Command(c.Path, c.Args...)
	p.cmd.Env = c.Env
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error, 1)
	go func() {
		// The kernel sends the parent-death signal when the thread that forked ends, so that
		// thread has to stay for as long as the child lives (prctl(2), PR_SET_PDEATHSIG).
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Path, err)
	}
	return p, nil
}

// Done is closed when the child has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// PID returns the child's process ID.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Kill kills the child and waits for its end.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // fails only when the child has ended already
	<-p.done
}

// ErrEnded is wrapped by what WaitFor returns when the child ended before it was ready.
var ErrEnded = errors.New("ended before it was ready")

// WaitFor polls ready until it returns nil. It gives up when the child or ctx ends, with the last
// reason and the tail of the child's log.
func (p *Process) WaitFor(ctx context.Context, ready func(context.Context) error) error {
	t := time.NewTicker(50 * time.Millisecond)
	defer t.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s %w (%v); the end of %s:\n%s", p.name, ErrEnded, p.err, p.log, Tail(p.log, 15))
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %w; the end of %s:\n%s", p.name, ctx.Err(), err, p.log, Tail(p.log, 15))
		case <-t.C:
		}
	}
}

// Tail returns the last n lines of the file at path, or why it can't be read.
func Tail(path string, n int) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	const window = 64 << 10
	if fi, err := f.Stat(); err == nil && fi.Size() > window {
		if _, err := f.Seek(-window, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

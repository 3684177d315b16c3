package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/machine"
	"github.com/coil-net/coil/integration/lab/proc"
)

const (
	restartDelay = time.Second
	afterPoll    = 50 * time.Millisecond
	path         = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

var errNoComponent = errors.New("no such component")

// supervisor keeps the components running. PID 1 is the parent of every orphan, so it waits for
// all processes in one place and must not let anything else wait for its children.
type supervisor struct {
	mu    sync.Mutex // guards units
	units []*unit
}

type unit struct {
	machine.Component
	log      *os.File
	env      []string
	wanted   bool
	pid      int
	restarts int
	ended    chan struct{} // closed when pid has ended
}

func newSupervisor(spec machine.Spec, logs map[string]*os.File) *supervisor {
	search := path
	for _, dir := range spec.Programs {
		search += ":" + machine.ProgramDir + "/" + filepath.Base(dir)
	}
	s := &supervisor{}
	for _, c := range spec.Components {
		s.units = append(s.units, &unit{
			Component: c, log: logs[c.Name], wanted: !c.Manual,
			env: slices.Concat([]string{"PATH=" + search, "HOME=/root"}, proc.Thrifty(), c.Env),
		})
	}
	return s
}

func (s *supervisor) startAll() {
	for _, u := range s.units {
		if !u.Manual {
			go s.launch(u)
		}
	}
}

// launch starts u as soon as what it needs is there, and again when that fails, until
// it runs or isn't wanted any more.
func (s *supervisor) launch(u *unit) {
	for {
		wait := afterPoll
		if available(u.After) {
			started, err := s.tryStart(u)
			if started {
				return
			}
			if err != nil {
				fmt.Fprintf(u.log, "labinit: start %s: %v\n", u.Path, err)
				wait = restartDelay
			}
		}
		s.mu.Lock()
		wanted := u.wanted
		s.mu.Unlock()
		if !wanted {
			return
		}
		<-time.After(wait)
	}
}

// tryStart reports whether u runs now. The lock is held over the fork, so that reap can't see
// the child's end before its PID is known.
func (s *supervisor) tryStart(u *unit) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !u.wanted || u.pid != 0 {
		return u.pid != 0, nil
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return false, err
	}
	defer null.Close()
	pid, err := syscall.ForkExec(u.Path, append([]string{u.Path}, u.Args...), &syscall.ProcAttr{
		Dir:   "/",
		Env:   u.env,
		Files: []uintptr{null.Fd(), u.log.Fd(), u.log.Fd()},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return false, err
	}
	u.pid, u.ended = pid, make(chan struct{})
	return true, nil
}

// reap waits for every child for as long as the machine lives.
func (s *supervisor) reap() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGCHLD)
	for range signals {
		// Signals merge, so one may stand for many children.
		for {
			s.mu.Lock()
			var status syscall.WaitStatus
			pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
			if pid > 0 {
				s.ended(pid, status)
			}
			s.mu.Unlock()
			if pid <= 0 && !errors.Is(err, syscall.EINTR) {
				break
			}
		}
	}
}

// ended notes the end of a process and restarts it when it should run. s.mu is held.
func (s *supervisor) ended(pid int, status syscall.WaitStatus) {
	i := slices.IndexFunc(s.units, func(u *unit) bool { return u.pid == pid })
	if i < 0 {
		return // an orphan
	}
	u := s.units[i]
	u.pid = 0
	close(u.ended)
	fmt.Fprintf(u.log, "labinit: %s ended: %s\n", u.Name, describe(status))
	if u.wanted {
		u.restarts++
		time.AfterFunc(restartDelay, func() { s.launch(u) })
	}
}

// start makes a component run.
func (s *supervisor) start(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.find(name)
	if u == nil {
		return errNoComponent
	}
	if !u.wanted {
		u.wanted = true
		go s.launch(u)
	}
	return nil
}

// kill makes a component not run; it has ended when kill returns.
func (s *supervisor) kill(name string) error {
	s.mu.Lock()
	u := s.find(name)
	if u == nil {
		s.mu.Unlock()
		return errNoComponent
	}
	u.wanted = false
	running, ended := u.pid != 0, u.ended
	if running {
		// Under the lock the PID can't have been reaped and given to another process.
		_ = unix.Kill(u.pid, unix.SIGKILL)
	}
	s.mu.Unlock()
	if running {
		<-ended
	}
	return nil
}

// find returns the unit of a component; s.mu is held.
func (s *supervisor) find(name string) *unit {
	for _, u := range s.units {
		if u.Name == name {
			return u
		}
	}
	return nil
}

func (s *supervisor) list() []machine.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []machine.Status
	for _, u := range s.units {
		all = append(all, machine.Status{Name: u.Name, PID: u.pid, Wanted: u.wanted, Restarts: u.restarts})
	}
	return all
}

func describe(status syscall.WaitStatus) string {
	if status.Signaled() {
		return status.Signal().String()
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus())
}

// available reports whether what a component waits for is there.
func available(after string) bool {
	if after == "" {
		return true
	}
	if filepath.IsAbs(after) {
		_, err := os.Stat(after)
		return err == nil
	}
	conn, err := net.DialTimeout("tcp", after, time.Second)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

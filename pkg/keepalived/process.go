package keepalived

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ErrNotRunning: there is no keepalived. Whoever starts it has it read what is in place. One that was killed leaves its
// addresses on the links, where they are until it is started again, although another gateway has them by then.
var ErrNotRunning = errors.New("keepalived isn't running: start it (systemctl start keepalived)")

// process is a running keepalived.
type process struct {
	*os.Process
	proc string // its folder of /proc
}

// find returns the process that a pid file names; ErrNotRunning if there is none, or if its pid is another program's by
// now, for a keepalived that is killed leaves its file. The caller releases it.
func find(pidFile string) (*process, error) {
	text, err := os.ReadFile(pidFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: there is no %s", ErrNotRunning, pidFile)
	}
	if err != nil {
		return nil, fmt.Errorf("read the pid file of keepalived: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return nil, fmt.Errorf("%w: %s has no process ID: %.20q", ErrNotRunning, pidFile, text)
	}
	// It stays this process: Linux has handles of processes, and a pid that is used anew has another one.
	p, err := os.FindProcess(pid)
	if err != nil {
		return nil, fmt.Errorf("find process %d of %s: %w", pid, pidFile, err)
	}
	proc := fmt.Sprintf("/proc/%d", pid)
	exe, err := os.Readlink(proc + "/exe")
	// An upgrade of the package removes the file of the program that runs.
	if err == nil && strings.TrimSuffix(filepath.Base(exe), " (deleted)") == "keepalived" {
		return &process{p, proc}, nil
	}
	p.Release()
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
		return nil, fmt.Errorf("tell what process %d of %s is: %w", pid, pidFile, err)
	}
	return nil, fmt.Errorf("%w: %s names process %d, which isn't keepalived", ErrNotRunning, pidFile, pid)
}

// signal sends a signal to the keepalived of the pid file.
func (d *Daemon) signal(s os.Signal) error {
	p, err := find(d.o.PIDFile)
	if err != nil {
		return err
	}
	defer p.Release()
	return p.send(s)
}

func (p *process) send(s os.Signal) error {
	err := p.Signal(s)
	if errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("%w: it has just ended", ErrNotRunning)
	}
	if err != nil {
		return fmt.Errorf("signal keepalived: %w", err)
	}
	return nil
}

const (
	// dumpName is the file that SIGUSR1 has the process of VRRP write. The file of SIGRTMIN+2 is JSON, but 2.2.7 writes
	// none when there are no instances, and it lacks sources and peers.
	dumpName = "keepalived.data"
	// parentDumpName is what the daemon itself writes then.
	parentDumpName = "keepalived_parent.data"
	// dumpTime is how long the daemon may take to write it, and dumpPause is between two looks at it. A daemon that reloads
	// loses signals: there is one for each looksPerSignal.
	dumpTime       = time.Second
	dumpPause      = 2 * time.Millisecond
	looksPerSignal = 50
	// statePause is between two states: to write one takes time from the reload that is waited for.
	statePause = 50 * time.Millisecond
	// maxDump is more than an instance of 100,000 addresses has.
	maxDump = 64 << 20
)

// dump returns the instances of the daemon.
func (d *Daemon) dump(ctx context.Context) ([]InstanceState, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	p, err := find(d.o.PIDFile)
	if err != nil {
		return nil, err
	}
	defer p.Release()
	// The daemon may have a /tmp of its own, such as systemd's PrivateTmp.
	folder := filepath.Join(p.proc, "root", d.o.DumpFolder)
	path, parent := filepath.Join(folder, dumpName), filepath.Join(folder, parentDumpName)
	for _, f := range []string{path, parent} {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the daemon's former state: %w", err)
		}
	}
	var states []InstanceState
	looks := 0
	err = wait(ctx, dumpTime, dumpPause, func() (bool, error) {
		if looks++; looks%looksPerSignal == 1 {
			if err := p.send(syscall.SIGUSR1); err != nil {
				return true, err
			}
		}
		text, err := p.read(path)
		if errors.Is(err, fs.ErrNotExist) {
			if p.childless(parent) {
				return true, nil
			}
			return false, fmt.Errorf("keepalived doesn't write its state to %s: it is busy, or global_defs has data_use_instance, or its TMPDIR isn't %s",
				path, d.o.DumpFolder)
		}
		if err != nil {
			return true, fmt.Errorf("read the daemon's state: %w", err)
		}
		all, complete := parseDump(text)
		if states = all; !complete {
			return false, fmt.Errorf("keepalived doesn't end to write %s", path)
		}
		return true, nil
	})
	return states, err
}

// Mark returns a text that changes when keepalived is started anew, and when addresses come to this machine or leave it: an instance that becomes the master, or ceases to be
// it, has them do so. keepalived notices nothing of this, while it writes two lines into its log whenever it is asked for its states.
func (d *Daemon) Mark() (string, error) {
	p, err := find(d.o.PIDFile)
	if err != nil {
		return "", err
	}
	defer p.Release()
	file, err := os.Stat(d.o.PIDFile)
	if err != nil {
		return "", fmt.Errorf("look at the pid file of keepalived: %w", err)
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("list the addresses of this machine: %w", err)
	}
	all := make([]string, len(addrs))
	for i, a := range addrs {
		all[i] = a.String()
	}
	slices.Sort(all)
	return fmt.Sprintf("%d %d %s", p.Pid, file.ModTime().UnixNano(), strings.Join(all, " ")), nil
}

// childless tells whether the daemon has no process of VRRP, since no instance was ever configured: it has written its own
// part of the state, so that it isn't about to start one, and it has no child.
func (p *process) childless(parent string) bool {
	if _, err := os.Lstat(parent); err != nil {
		return false
	}
	children, err := os.ReadFile(fmt.Sprintf("%s/task/%d/children", p.proc, p.Pid))
	return err == nil && len(children) == 0
}

// read reads a file that must be the process's: anybody can make one in /tmp.
func (p *process) read(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	file, err := f.Stat()
	if err != nil {
		return nil, err
	}
	owner, err := os.Stat(p.proc)
	if err != nil {
		return nil, err
	}
	if !file.Mode().IsRegular() || uid(file) != uid(owner) {
		return nil, fmt.Errorf("%s isn't a file of keepalived: remove it", path)
	}
	return io.ReadAll(io.LimitReader(f, maxDump))
}

// uid is the owner of a file; -1 is nobody.
func uid(info fs.FileInfo) int64 {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return int64(s.Uid)
	}
	return -1
}

// wait calls a function until it says that it is done, with pauses, for at most a time, and returns its last error.
func wait(ctx context.Context, most, pause time.Duration, f func() (done bool, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		done, err := f()
		if done {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

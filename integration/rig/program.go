package rig

import (
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/pkg/faultpoint"
)

// Program is one that can be started, killed and started again. Its methods aren't
// safe for concurrent use.
type Program struct {
	Path string
	Args []string
	// Netns is the path of the network namespace that it runs in; "" is this process's own.
	Netns string
	// Env is added to the environment of this process.
	Env []string
	// Faults are the fault points of the next start, as package faultpoint wants them.
	Faults string
	// Log has the output of all starts.
	Log string

	running *proc.Process
}

// Start starts it; it isn't ready yet. One that runs must have been stopped.
func (p *Program) Start() (err error) {
	env := append(os.Environ(), p.Env...)
	if p.Faults != "" {
		env = append(env, faultpoint.Env+"="+p.Faults)
	}
	path, args := p.Path, p.Args
	if p.Netns != "" {
		path, args = "nsenter", append([]string{"--net=" + p.Netns, "--", path}, args...)
	}
	p.running, err = proc.Start(proc.Command{Path: path, Args: args, Env: env, Log: p.Log})
	return err
}

// Running says whether it was started and hasn't ended.
func (p *Program) Running() bool {
	if p.running == nil {
		return false
	}
	select {
	case <-p.running.Done():
		return false
	default:
		return true
	}
}

// Ended is closed when the program has ended that was started last.
func (p *Program) Ended() <-chan struct{} {
	if p.running == nil {
		ended := make(chan struct{})
		close(ended)
		return ended
	}
	return p.running.Done()
}

// PID is the ID of the process, 0 if it was never started.
func (p *Program) PID() int {
	if p.running == nil {
		return 0
	}
	return p.running.PID()
}

// Kill ends it by SIGKILL and waits.
func (p *Program) Kill() {
	if p.running != nil {
		p.running.Kill()
	}
}

// Stop ends it by SIGTERM, as an update does, and waits. One that takes longer than
// Kubernetes grants is killed.
func (p *Program) Stop() {
	if !p.Running() {
		return
	}
	// It may have ended by itself meanwhile, and is what Ended tells.
	_ = syscall.Kill(p.running.PID(), syscall.SIGTERM)
	grace := time.NewTimer(30 * time.Second)
	defer grace.Stop()
	select {
	case <-p.running.Done():
	case <-grace.C:
		p.running.Kill()
	}
}

// Logs returns the last n lines of its output.
func (p *Program) Logs(n int) string { return proc.Tail(p.Log, n) }

// CountLogs returns how many lines of its output contain a text.
func (p *Program) CountLogs(text string) int {
	b, err := os.ReadFile(p.Log)
	if err != nil {
		return 0
	}
	n := 0
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/coil-net/coil/integration/lab/proc"
)

// Marker is the environment variable of every labinit: its machine's directory. It finds
// machines that no record knows.
const Marker = "COIL_LAB_MACHINE"

// Descriptors that labinit inherits.
const (
	GoFD        = 3 // a pipe: one byte means go, its end means that the parent has gone
	FirstListen = 4
)

// Init identifies the PID 1 of a machine from outside, for ever: a recycled PID has another
// start time.
type Init struct {
	PID       int
	StartTime uint64 // clock ticks after boot, from /proc/PID/stat
}

// Alive reports whether the machine is still on. A zombie is not.
func (i Init) Alive() bool {
	start, state, err := stat(i.PID)
	return err == nil && start == i.StartTime && state != 'Z' && state != 'X'
}

// Options of Start.
type Options struct {
	Program string // of labinit
	Dir     Dir
	Cgroup  Cgroup
	Spec    Spec
	// Listeners are sockets of the caller's network namespace, see Spec.Forward.
	Listeners []*os.File
	// Prepare is called when the namespaces exist and nothing runs in them yet: it records the
	// machine and connects it. When it fails, or when the caller dies, the machine goes away.
	Prepare func(context.Context, Init) error
}

// Start powers a machine on. It returns when its root file system is in place and its components
// are being started. On an error nothing is left running.
func Start(ctx context.Context, o Options) (_ Init, err error) {
	if err := o.Spec.Validate(); err != nil {
		return Init{}, fmt.Errorf("machine %s: %w", o.Spec.Hostname, err)
	}
	if len(o.Listeners) != len(o.Spec.Forward) {
		return Init{}, fmt.Errorf("machine %s: %d listeners for %d addresses", o.Spec.Hostname, len(o.Listeners), len(o.Spec.Forward))
	}
	if err := o.writeFiles(); err != nil {
		return Init{}, err
	}
	goRead, goWrite, err := os.Pipe()
	if err != nil {
		return Init{}, err
	}
	defer goWrite.Close()
	p, err := o.fork(goRead)
	goRead.Close()
	if err != nil {
		return Init{}, err
	}
	committed := false
	defer func() {
		if !committed {
			p.kill()
			err = errors.Join(err, o.Cgroup.Remove(context.WithoutCancel(ctx)))
		}
	}()
	if err := o.Cgroup.create(p.init.PID); err != nil {
		return Init{}, err
	}
	if err := o.Prepare(ctx, p.init); err != nil {
		return Init{}, err
	}
	if _, err := goWrite.Write([]byte{1}); err != nil {
		return Init{}, fmt.Errorf("start machine %s: %w", o.Spec.Hostname, err)
	}
	if err := p.waitUp(ctx, o.Dir); err != nil {
		return Init{}, err
	}
	committed = true
	return p.init, nil
}

// writeFiles stores the spec and everything else that labinit reads.
func (o Options) writeFiles() error {
	dirs := []string{o.Dir.join("log"), o.Dir.join("shadow"), o.Dir.Disk("")}
	for _, d := range SystemDirs {
		dirs = append(dirs, o.Dir.Upper(d), o.Dir.Work(d))
	}
	for _, d := range dirs {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(o.Dir.Shadow("boot_id"), []byte(o.Spec.BootID+"\n"), 0o444); err != nil {
		return err
	}
	for name, content := range o.Spec.Shadow {
		if err := os.WriteFile(o.Dir.Shadow(ShadowName(name)), []byte(content+"\n"), 0o644); err != nil {
			return err
		}
	}
	if err := os.Remove(o.Dir.ControlSocket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return o.Dir.writeSpec(o.Spec)
}

// ShadowName returns the file name for a shadowed path.
func ShadowName(path string) string { return strings.ReplaceAll(strings.Trim(path, "/"), "/", ".") }

// process is labinit as a child of this process. It outlives its parent.
type process struct {
	cmd  *exec.Cmd
	init Init
	done chan struct{}
}

func (o Options) fork(goRead *os.File) (*process, error) {
	log, err := os.OpenFile(o.Dir.Log("init"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &process{cmd: exec.Command(o.Program, string(o.Dir)), done: make(chan struct{})}
	p.cmd.Env = []string{Marker + "=" + string(o.Dir), "PATH=" + os.Getenv("PATH"), proc.GarbageEnv + "=" + os.Getenv(proc.GarbageEnv)}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.ExtraFiles = append([]*os.File{goRead}, o.Listeners...)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET,
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s in new namespaces: %w", o.Program, err)
	}
	p.init.PID = p.cmd.Process.Pid
	// It can't be recycled before Wait, so this is the child's start time.
	start, _, err := stat(p.init.PID)
	p.init.StartTime = start
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	if err != nil {
		p.kill()
		return nil, err
	}
	return p, nil
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails only when it has ended
	<-p.done
}

// waitUp waits until labinit answers.
func (p *process) waitUp(ctx context.Context, dir Dir) error {
	t := time.NewTicker(20 * time.Millisecond)
	defer t.Stop()
	for {
		if _, err := dir.Components(ctx); err == nil {
			return nil
		}
		select {
		case <-p.done:
			b, err := os.ReadFile(dir.Log("init"))
			lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
			return errors.Join(fmt.Errorf("machine %s did not start: %s", filepath.Base(string(dir)), lines[len(lines)-1]), err)
		case <-ctx.Done():
			return fmt.Errorf("start machine %s: %w", filepath.Base(string(dir)), ctx.Err())
		case <-t.C:
		}
	}
}

// pollPause is the pause between two looks at processes and cgroups that the kernel removes.
const pollPause = 10 * time.Millisecond

// Kill cuts the power of a machine and returns when all its processes are gone; their
// namespaces and mounts go with them.
func Kill(ctx context.Context, i Init) error {
	// A pidfd can't hit another process that got the same number in the meantime.
	fd, err := unix.PidfdOpen(i.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", i.PID, err)
	}
	defer unix.Close(fd)
	if !i.Alive() {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", i.PID, err)
	}
	// PID 1 of a namespace becomes a zombie only after the kernel has killed and reaped all
	// others in it (zap_pid_ns_processes).
	return wait.PollUntilContextCancel(ctx, pollPause, true, func(context.Context) (bool, error) { return !i.Alive(), nil })
}

// Find returns the machines whose directory is below prefix, whether recorded or not.
func Find(prefix string) ([]Init, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var found []Init
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err != nil {
			continue // it has ended
		}
		if !marked(env, prefix) {
			continue
		}
		if start, _, err := stat(pid); err == nil {
			found = append(found, Init{PID: pid, StartTime: start})
		}
	}
	return found, nil
}

func marked(environ []byte, prefix string) bool {
	for v := range bytes.SplitSeq(environ, []byte{0}) {
		if dir, ok := strings.CutPrefix(string(v), Marker+"="); ok {
			return strings.HasPrefix(dir, strings.TrimSuffix(prefix, "/")+"/")
		}
	}
	return false
}

// stat reads the start time and the state of a process.
func stat(pid int) (start uint64, state byte, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	return parseStat(b)
}

// parseStat parses proc(5)'s stat. The second field is the program's name in parentheses and may
// contain anything, so fields are counted from the last parenthesis.
func parseStat(b []byte) (start uint64, state byte, err error) {
	i := bytes.LastIndexByte(b, ')')
	fields := strings.Fields(string(b[i+1:]))
	if i < 0 || len(fields) < 20 {
		return 0, 0, fmt.Errorf("parse /proc/PID/stat: %q", b)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	return start, fields[0][0], err
}

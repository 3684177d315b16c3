// Command vminit is PID 1 of the lab's virtual machines: it puts a tmpfs or a disk over the host's files,
// runs one command there and switches the machine off. If it is told to, it leaves PID 1 to another program,
// and runs the command in a process of its own. See package protocol; it knows nothing of what it runs.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/vm/protocol"
)

const (
	portTimeout = 30 * time.Second
	portPoll    = 20 * time.Millisecond
	// flushTimeout is how long a busy host may take nothing of the command's last output, flushLimit for how long all of it may take, also
	// until the lab has it.
	flushTimeout = 10 * time.Second
	flushLimit   = 10 * flushTimeout
)

func main() {
	beside := os.Args[0] == besideName
	var err error
	if beside {
		err = runBeside()
	} else {
		err = run()
	}
	if err != nil {
		// The console is the only place left.
		fmt.Fprintf(os.Stderr, "vminit: %v\n", err)
	}
	if !beside {
		unix.Sync()
	}
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Fprintf(os.Stderr, "vminit: power off: %v\n", err)
	}
}

func run() error {
	if os.Getpid() != 1 {
		return errors.New("vminit is PID 1 of a machine that the lab starts")
	}
	// As systemd has it; the kernel's own is 4096 open files at most.
	files := unix.Rlimit{Cur: 1024, Max: 524288}
	if err := errors.Join(
		unix.Setrlimit(unix.RLIMIT_NOFILE, &files),
		mount("devtmpfs", "/dev", "devtmpfs", 0, ""),
		mount("proc", "/proc", "proc", 0, ""),
		mount("sysfs", "/sys", "sysfs", 0, ""),
		loadModules(),
	); err != nil {
		return err
	}
	ports, err := openPorts()
	if err != nil {
		return err
	}
	control := ports[protocol.Control]
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err
	}
	release := unix.ByteSliceToString(uts.Release[:])
	if err := json.NewEncoder(control).Encode(protocol.Up{Release: release}); err != nil {
		return fmt.Errorf("say that the machine is up: %w", err)
	}
	var spec protocol.Spec
	if err := json.NewDecoder(control).Decode(&spec); err != nil {
		return fmt.Errorf("read what to run: %w", err)
	}
	var exit protocol.Exit
	if err := makeRoot(spec); err != nil {
		exit.Error = err.Error()
	} else if len(spec.Init) > 0 {
		exit.Error = handOver(spec, ports).Error()
	} else if exit, err = execute(spec, ports); err != nil {
		exit.Error = err.Error()
	}
	return end(control, exit)
}

// end says how the command ended, and waits until the lab has its output, or is gone.
func end(control *os.File, exit protocol.Exit) error {
	if err := json.NewEncoder(control).Encode(exit); err != nil {
		return err
	}
	received := make(chan error, 1)
	go func() { received <- json.NewDecoder(control).Decode(new(protocol.Received)) }()
	select {
	case err := <-received:
		return err
	case <-time.After(flushLimit):
		return errors.New("the lab didn't say that it has the output")
	}
}

// loadModules loads what the initramfs brings, in the order of the names.
func loadModules() error {
	files, err := filepath.Glob(protocol.ModuleDir + "/*")
	if err != nil {
		return err
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

// openPorts waits for the virtio ports, which appear while the driver probes, and opens them.
func openPorts() (map[string]*os.File, error) {
	wanted := []string{protocol.Control, protocol.Stdin, protocol.Stdout, protocol.Stderr}
	ports := map[string]*os.File{}
	deadline := time.Now().Add(portTimeout)
	for {
		files, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			name := strings.TrimSpace(string(b))
			if name == "" || ports[name] != nil {
				continue
			}
			device := "/dev/" + filepath.Base(filepath.Dir(file))
			fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return nil, fmt.Errorf("open %s: %w", device, err)
			}
			ports[name] = os.NewFile(uintptr(fd), device)
		}
		missing := ""
		for _, name := range wanted {
			if ports[name] == nil {
				missing = name
			}
		}
		if missing == "" {
			return ports, nil
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("virtio port %s didn't appear", missing)
		}
		<-time.After(portPoll)
	}
}

// makeRoot makes the host's files the root directory.
func makeRoot(spec protocol.Spec) error {
	for _, d := range []string{"/lower", "/changes", "/newroot"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	share := "trans=virtio,version=9p2000.L,cache=loose,msize=1048576"
	changes := func() error { return mount("tmpfs", "/changes", "tmpfs", 0, "size=75%") }
	if spec.Disk {
		changes = mountDisk
	}
	if err := errors.Join(
		mount(protocol.MountTag, "/lower", "9p", unix.MS_RDONLY, share),
		changes(),
		os.MkdirAll("/changes/upper", 0o755),
		os.MkdirAll("/changes/work", 0o755),
	); err != nil {
		return err
	}
	if err := mount("overlay", "/newroot", "overlay", 0, "lowerdir=/lower,upperdir=/changes/upper,workdir=/changes/work"); err != nil {
		return err
	}
	// Mounts of the host are not mounts here: what the kernel shows is mounted again.
	if err := errors.Join(
		mount("proc", "/newroot/proc", "proc", 0, ""),
		mount("sysfs", "/newroot/sys", "sysfs", 0, ""),
		mount("cgroup2", "/newroot/sys/fs/cgroup", "cgroup2", 0, ""),
		mount("devtmpfs", "/newroot/dev", "devtmpfs", 0, ""),
		os.MkdirAll("/newroot/dev/pts", 0o755),
		os.MkdirAll("/newroot/dev/shm", 0o1777),
		mount("devpts", "/newroot/dev/pts", "devpts", 0, "ptmxmode=0666"),
		mount("tmpfs", "/newroot/dev/shm", "tmpfs", 0, ""),
		mount("tmpfs", "/newroot/run", "tmpfs", 0, "mode=0755"),
		// An overlay can't be the upper layer of another one, and the lab's clusters need those.
		os.MkdirAll("/newroot/var/lib/coil-lab", 0o755),
		mount("tmpfs", "/newroot/var/lib/coil-lab", "tmpfs", 0, "mode=0755,size=75%"),
		os.MkdirAll("/newroot/lib/modules", 0o755),
		mount(filepath.Join("/newroot", spec.Modules), "/newroot/lib/modules", "", unix.MS_BIND, ""),
	); err != nil {
		return err
	}
	// As switch_root(8): pivot_root(2) doesn't work on an initramfs.
	if err := unix.Chdir("/newroot"); err != nil {
		return err
	}
	if err := mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := errors.Join(unix.Chroot("."), unix.Chdir("/")); err != nil {
		return fmt.Errorf("enter the root directory: %w", err)
	}
	return errors.Join(unix.Sethostname([]byte("coil-lab-vm")), linkUp("lo"))
}

// mountDisk mounts the disk, which appears while its driver probes.
func mountDisk() error {
	for deadline := time.Now().Add(portTimeout); ; <-time.After(portPoll) {
		err := mount(protocol.DiskDevice, "/changes", "ext4", 0, "")
		if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENXIO) || time.Now().After(deadline) {
			return err
		}
	}
}

// linkUp sets a link up.
func linkUp(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("set %s up: %w", name, err)
	}
	return nil
}

// execute runs the command and returns how it ended, with its exit status as a shell has it. It reaps everything that
// is left to PID 1 meanwhile.
func execute(spec protocol.Spec, ports map[string]*os.File) (exit protocol.Exit, err error) {
	path, err := lookPath(spec.Args[0], spec.Env)
	if err != nil {
		return exit, err
	}
	s, err := newStreams(ports)
	if err != nil {
		return exit, err
	}
	p, err := os.StartProcess(path, spec.Args, &os.ProcAttr{Dir: spec.Dir, Env: spec.Env, Files: s.child})
	s.closeChild()
	if err != nil {
		return exit, err
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return exit, fmt.Errorf("wait: %w", err)
		}
		if pid != p.Pid {
			continue
		}
		s.flush()
		exit.Stdout, exit.Stderr = s.written[0].Load(), s.written[1].Load()
		if exit.Status = status.ExitStatus(); status.Signaled() {
			exit.Status = 128 + int(status.Signal())
		}
		return exit, nil
	}
}

// lookPath finds the command as a shell would, by the command's own PATH.
func lookPath(name string, env []string) (string, error) {
	if strings.Contains(name, "/") {
		return name, nil
	}
	for _, v := range env {
		list, ok := strings.CutPrefix(v, "PATH=")
		if !ok {
			continue
		}
		for dir := range strings.SplitSeq(list, ":") {
			file := filepath.Join(dir, name)
			if fi, err := os.Stat(file); err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0 {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("%s is not in PATH", name)
}

// streams connect the command with the ports by pipes: a port can't be opened twice, as a command
// does that opens /dev/stderr.
type streams struct {
	child   []*os.File
	copied  chan struct{}
	moved   chan struct{}   // has a token when a port has taken something
	written [2]atomic.Int64 // bytes that the ports of the outputs have taken
}

func newStreams(ports map[string]*os.File) (*streams, error) {
	s := &streams{copied: make(chan struct{}, 2), moved: make(chan struct{}, 1)}
	stdin, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s.child = append(s.child, stdin)
	go func() {
		// It ends when the host closes its side; nobody waits for it.
		_, _ = io.Copy(in, ports[protocol.Stdin])
		in.Close()
	}()
	for i, name := range []string{protocol.Stdout, protocol.Stderr} {
		out, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		s.child = append(s.child, w)
		go func() {
			_, _ = io.Copy(progress{ports[name], s.moved, &s.written[i]}, out) // the host is gone: so is this machine
			s.copied <- struct{}{}
		}()
	}
	return s, nil
}

func (s *streams) closeChild() {
	for _, f := range s.child {
		f.Close()
	}
}

// flush waits until the ports have all output. Processes that the command left running may hold the
// pipes open; they aren't waited for.
func (s *streams) flush() {
	limit := time.After(flushLimit)
	idle := time.NewTimer(flushTimeout)
	for left := cap(s.copied); left > 0; {
		select {
		case <-s.copied:
			left--
		case <-s.moved:
			idle.Reset(flushTimeout)
		case <-idle.C:
			return
		case <-limit:
			return
		}
	}
}

// progress is a port that tells when it has taken something, and how much.
type progress struct {
	io.Writer
	moved chan<- struct{}
	bytes *atomic.Int64
}

func (p progress) Write(b []byte) (int, error) {
	n, err := p.Writer.Write(b)
	p.bytes.Add(int64(n))
	select {
	case p.moved <- struct{}{}:
	default:
	}
	return n, err
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s at %s: %w", source, target, err)
	}
	return nil
}

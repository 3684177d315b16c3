// Package vm runs a command in a virtual machine that has another kernel and the host's own files:
// the root directory is the host's, over 9p and read only, below a tmpfs that takes all changes
// and goes with the machine. It owns the kernels in the cache; it knows nothing of what it runs.
//
//	err := vm.Run(ctx, vm.Options{
//		Kernel: "6.1", Args: []string{"ip", "fou", "add", "port", "5555", "ipproto", "4"},
//		Stdout: os.Stdout, Stderr: os.Stderr,
//	})
//
// Unless Options ask for more, the command has no network but lo, and all of the kernel's modules. Without hardware support
// programs run about ten times slower: COIL_TEST_TIMEOUT_SCALE and COIL_TEST_LIMIT_SCALE are multiplied accordingly.
package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/build"
	"github.com/coil-net/coil/integration/lab/cache"
	"github.com/coil-net/coil/integration/lab/preflight"
	"github.com/coil-net/coil/integration/lab/proc"
	"github.com/coil-net/coil/integration/lab/scratch"
	"github.com/coil-net/coil/integration/lab/vm/protocol"
	"github.com/coil-net/coil/pkg/testkit"
)

// Accelerations.
const (
	Auto = "auto" // KVM when a kernel boots with it, else TCG
	KVM  = "kvm"
	TCG  = "tcg"
)

// Link is that of a machine with Options.Network.
const Link = "eth0"

// Addresses that qemu gives to the ends of Link.
var (
	LinkAddr = netip.MustParsePrefix("10.0.2.15/24")
	HostAddr = netip.MustParseAddr("10.0.2.2")
)

const (
	kvmTimeout = 15 * time.Second
	tcgTimeout = 90 * time.Second
	// endTimeout is for the power-off.
	endTimeout = 15 * time.Second

	// waitEnv and limitEnv are the scales of testkit.Timeout and testkit.Limit.
	waitEnv  = "COIL_TEST_TIMEOUT_SCALE"
	limitEnv = "COIL_TEST_LIMIT_SCALE"
	tcgScale = 10

	// consoleLines of a machine that died are shown: what led to a panic, and where.
	consoleLines = 100

	// kernelArgs end the machine at once after a fault of the kernel, and leave out what protects a
	// kernel from its users: nobody attacks this one, and emulated it costs much.
	kernelArgs = "console=ttyS0 oops=panic panic=-1 loglevel=4 random.trust_cpu=on no_timer_check tsc=reliable nowatchdog " +
		"mitigations=off init_on_alloc=0 init_on_free=0 audit=0 apparmor=0 hardened_usercopy=off randomize_kstack_offset=off"
	// emulatedCPU has no vectors, without which programs are faster than with emulated ones, and
	// neither a fifth level of page tables nor guards of memory, which make each access slower.
	emulatedCPU = "max,avx=off,avx2=off,la57=off,smap=off,smep=off,pku=off,umip=off"
)

// Options of Run.
type Options struct {
	Kernel string // "6.1" or "6.12"; default "6.1"
	Args   []string
	Env    []string // default: the caller's
	Dir    string   // default: the caller's
	CPUs   int      // default 2; emulated ones take turns on one of the host's
	Memory int      // MiB, also for what is written to disk; default 2048
	Accel  string   // default Auto
	// Network gives the machine Link, by which the host's loopback is HostAddr for the address
	// LinkAddr; the command configures it, with the module virtio_net.
	Network bool
	// Forward is a TCP port of the host's 127.0.0.1 that leads to the same one of LinkAddr, if there is a Network. 0 is none.
	Forward uint16
	// Counted has an emulated machine's clock count the instructions of its processors: nothing
	// else on the host changes what it measures. It is slower then, and a kernel 6.1 doesn't
	// boot.
	Counted bool
	// Init is a program that becomes PID 1, such as systemd, with its arguments. The command runs beside it. When the command
	// ends, the machine loses its power: nothing is stopped, and what wasn't written to the disk is lost.
	Init []string
	// Disk is a file with a file system of type ext4, for changes: the next machine with that file has them. Default: a
	// tmpfs takes them.
	Disk string

	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Log            io.Writer // progress; nil discards it
}

func (o *Options) defaults() error {
	if o.Kernel == "" {
		o.Kernel = "6.1"
	}
	if o.CPUs == 0 {
		o.CPUs = 2
	}
	if o.Memory == 0 {
		o.Memory = 2048
	}
	if o.Accel == "" {
		o.Accel = Auto
	}
	if o.Env == nil {
		o.Env = os.Environ()
	}
	for _, w := range []*io.Writer{&o.Stdout, &o.Stderr, &o.Log} {
		if *w == nil {
			*w = io.Discard
		}
	}
	if o.Stdin == nil {
		o.Stdin = strings.NewReader("")
	}
	if o.Dir == "" {
		var err error
		if o.Dir, err = os.Getwd(); err != nil {
			return err
		}
	}
	if len(o.Args) == 0 {
		return errors.New("no command")
	}
	if o.Forward != 0 && !o.Network {
		return errors.New("nothing is forwarded to a machine without a network")
	}
	if o.Counted && o.Kernel == "6.1" {
		return errors.New("a kernel 6.1 doesn't boot with a clock that counts: take 6.12")
	}
	if !slices.Contains([]string{Auto, KVM, TCG}, o.Accel) {
		return fmt.Errorf("acceleration %q: want auto, kvm or tcg", o.Accel)
	}
	return nil
}

// ExitError is a command's exit status other than 0; 128 and more is a signal, as in a shell.
type ExitError struct{ Status int }

// Error implements error.
func (e *ExitError) Error() string { return fmt.Sprintf("exit status %d", e.Status) }

// ExitCode returns the status.
func (e *ExitError) ExitCode() int { return e.Status }

// errNoBoot is wrapped when a machine ended, or its time, before its kernel had booted.
var errNoBoot = errors.New("no kernel booted")

// Run boots a machine, runs the command in it and removes the machine. It returns nil when the
// command succeeded and an ExitError when it didn't.
func Run(ctx context.Context, o Options) error {
	if err := o.defaults(); err != nil {
		return err
	}
	if err := preflight.Check(preflight.VM); err != nil {
		return err
	}
	b := &build.Builder{Log: o.Log}
	k, err := findKernel(ctx, o.Kernel, o.Log)
	if err != nil {
		return err
	}
	vminit, err := b.Own(ctx, "integration/lab/vm/vminit")
	if err != nil {
		return err
	}
	dir, err := scratch.New("coil-lab-vm-")
	if err != nil {
		return err
	}
	defer dir.Remove()
	modules := bootModules
	if o.Disk != "" {
		modules = slices.Concat(modules, diskModules)
	}
	if err := writeInitramfs(ctx, dir.Path("initramfs"), vminit, k, modules); err != nil {
		return err
	}
	accels, err := accelerations(o.Accel)
	if err != nil {
		return err
	}
	for i, accel := range accels {
		err = (&machine{Options: o, kernel: k, dir: dir, accel: accel}).run(ctx)
		if !errors.Is(err, errNoBoot) || i == len(accels)-1 {
			return err
		}
		fmt.Fprintf(o.Log, "kernel %s doesn't boot with %s here; from now on without\n", k.release, accel)
		if err := rememberNoKVM(); err != nil {
			return err
		}
	}
	return err
}

// accelerations returns what to try, in this order.
func accelerations(want string) ([]string, error) {
	if want != Auto {
		return []string{want}, nil
	}
	marker, err := noKVMMarker()
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(marker); err == nil {
		return []string{TCG}, nil
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		return []string{TCG}, nil
	}
	return []string{KVM, TCG}, nil
}

// noKVMMarker is a file that says that KVM was tried in vain on the running host kernel.
func noKVMMarker() (string, error) {
	dir, err := cache.Dir()
	if err != nil {
		return "", err
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return "", err
	}
	return filepath.Join(dir, "no-kvm-"+unix.ByteSliceToString(uts.Release[:])), nil
}

func rememberNoKVM() error {
	marker, err := noKVMMarker()
	if err != nil {
		return err
	}
	return os.WriteFile(marker, nil, 0o644)
}

// machine is one attempt.
type machine struct {
	Options
	kernel kernel
	dir    *scratch.Dir
	accel  string
}

var ports = []string{protocol.Control, protocol.Stdin, protocol.Stdout, protocol.Stderr}

func (m *machine) run(ctx context.Context) error {
	listeners := map[string]*net.UnixListener{}
	for _, name := range ports {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: m.socket(name)})
		if err != nil {
			return err
		}
		defer l.Close()
		listeners[name] = l
	}
	qemu, err := proc.Start(proc.Command{
		Path: "qemu-system-x86_64", Args: m.qemuArgs(), Log: m.dir.Path("qemu.log"),
	})
	if err != nil {
		return err
	}
	defer qemu.Kill()
	stop := context.AfterFunc(ctx, qemu.Kill)
	defer stop()
	conns := map[string]net.Conn{}
	for _, name := range ports {
		conn, err := accept(listeners[name], qemu)
		if err != nil {
			return errors.Join(fmt.Errorf("start qemu with %s: %w: %s", m.accel, errNoBoot, proc.Tail(m.dir.Path("qemu.log"), 5)), ctx.Err())
		}
		defer conn.Close()
		conns[name] = conn
	}
	exit, err := m.talk(conns, qemu)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	switch {
	case err != nil:
		return err
	case exit.Error != "":
		return fmt.Errorf("run %s in the machine: %s", m.Args[0], exit.Error)
	case exit.Status != 0:
		return &ExitError{exit.Status}
	}
	return nil
}

// accept waits for qemu's connection, which it makes before it starts the machine.
func accept(l *net.UnixListener, qemu *proc.Process) (net.Conn, error) {
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-qemu.Done():
			l.Close()
		case <-done:
		}
	}()
	return l.Accept()
}

// talk leads the machine through its life and returns how the command ended.
func (m *machine) talk(conns map[string]net.Conn, qemu *proc.Process) (protocol.Exit, error) {
	var (
		up   protocol.Up
		exit protocol.Exit
	)
	control := conns[protocol.Control]
	timeout := tcgTimeout
	if m.accel == KVM {
		timeout = kvmTimeout
	}
	if err := control.SetReadDeadline(time.Now().Add(testkit.Timeout(timeout))); err != nil {
		return exit, err
	}
	in := json.NewDecoder(control)
	if err := in.Decode(&up); err != nil {
		return exit, fmt.Errorf("boot %s with %s: %w (%w); the end of its console:\n%s",
			m.kernel.release, m.accel, errNoBoot, err, proc.Tail(m.console(), consoleLines)+proc.Tail(m.dir.Path("qemu.log"), 5))
	}
	if err := control.SetReadDeadline(time.Time{}); err != nil {
		return exit, err
	}
	fmt.Fprintf(m.Log, "Linux %s is up (%s)\n", up.Release, m.accel)
	var output sync.WaitGroup
	stdout, stderr := newCounted(m.Stdout), newCounted(m.Stderr)
	output.Go(func() { stdout.copy(conns[protocol.Stdout]) })
	output.Go(func() { stderr.copy(conns[protocol.Stderr]) })
	// Not waited for: it ends with the caller's input or with the machine.
	go func() {
		io.Copy(conns[protocol.Stdin], m.Stdin)
		conns[protocol.Stdin].Close()
	}()
	if err := json.NewEncoder(control).Encode(m.spec()); err != nil {
		return exit, err
	}
	if err := in.Decode(&exit); err != nil {
		return exit, fmt.Errorf("the machine died (%w); the end of its console:\n%s", err, proc.Tail(m.console(), consoleLines))
	}
	stdout.await(exit.Stdout)
	stderr.await(exit.Stderr)
	if err := json.NewEncoder(control).Encode(protocol.Received{}); err != nil {
		return exit, fmt.Errorf("the machine died before its output had come: %w", err)
	}
	select {
	case <-qemu.Done():
	case <-time.After(testkit.Timeout(endTimeout)):
		qemu.Kill()
	}
	output.Wait()
	return exit, nil
}

// counted is a writer that counts its bytes.
type counted struct {
	io.Writer
	bytes atomic.Int64
	more  chan struct{} // has a token when there is more
	ended chan struct{}
}

func newCounted(w io.Writer) *counted {
	return &counted{Writer: w, more: make(chan struct{}, 1), ended: make(chan struct{})}
}

// copy copies until the machine has ended, or the writer takes no more.
func (c *counted) copy(r io.Reader) {
	io.Copy(c, r)
	close(c.ended)
}

func (c *counted) Write(b []byte) (int, error) {
	n, err := c.Writer.Write(b)
	c.bytes.Add(int64(n))
	select {
	case c.more <- struct{}{}:
	default:
	}
	return n, err
}

// await waits until there are so many bytes, or nothing more comes.
func (c *counted) await(bytes int64) {
	for c.bytes.Load() < bytes {
		select {
		case <-c.more:
		case <-c.ended:
			return
		}
	}
}

func (m *machine) spec() protocol.Spec {
	s := protocol.Spec{Args: m.Args, Env: m.Env, Dir: m.Dir, Modules: m.kernel.modules, Init: m.Init, Disk: m.Disk != ""}
	if m.accel == TCG {
		s.Env = emulated(s.Env)
	}
	return s
}

// emulated is an environment whose scales are tcgScale times those of the host.
func emulated(env []string) []string {
	scales := map[string]float64{waitEnv: 1, limitEnv: 1}
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		if f, err := strconv.ParseFloat(value, 64); err == nil && f > 0 && scales[name] != 0 {
			scales[name] = f
		}
	}
	env = slices.Clone(env)
	for _, name := range []string{waitEnv, limitEnv} { // of several values the last one counts
		env = append(env, name+"="+strconv.FormatFloat(tcgScale*scales[name], 'g', -1, 64))
	}
	return env
}

func (m *machine) socket(port string) string { return m.dir.Path(port) }

func (m *machine) console() string { return m.dir.Path("console.log") }

func (m *machine) qemuArgs() []string {
	kernelArgs := kernelArgs
	if khz := tscKHz(); m.accel == TCG && !m.Counted && khz > 0 {
		kernelArgs += fmt.Sprintf(" tsc_early_khz=%d", khz)
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-serial", "file:" + m.console(),
		"-smp", strconv.Itoa(m.CPUs), "-m", strconv.Itoa(m.Memory),
		"-kernel", m.kernel.image, "-initrd", m.dir.Path("initramfs"),
		"-append", kernelArgs,
		"-virtfs", "local,path=/,mount_tag=" + protocol.MountTag + ",security_model=none,readonly=on,multidevs=remap",
		"-device", "virtio-serial-pci",
	}
	if m.Network {
		netdev := "user,id=host"
		if m.Forward != 0 {
			netdev += fmt.Sprintf(",hostfwd=tcp:127.0.0.1:%d-%s:%d", m.Forward, LinkAddr.Addr(), m.Forward)
		}
		args = append(args, "-netdev", netdev, "-device", "virtio-net-pci,netdev=host,romfile=")
	}
	if m.Disk != "" {
		// Of what the machine has flushed nothing is lost as long as the host runs.
		args = append(args, "-drive", "if=virtio,format=raw,cache=writeback,file="+strings.ReplaceAll(m.Disk, ",", ",,"))
	}
	if m.accel == KVM {
		args = append(args, "-accel", "kvm", "-cpu", "host")
	} else {
		if m.Counted {
			// 2^3 ns for each instruction is what they take on the host, too.
			args = append(args, "-icount", "shift=3,sleep=off")
		}
		// With a thread for each processor, QEMU 7.2 now and then runs code that another one has just
		// changed (jump labels: arch/x86/kernel/alternative.c, text_poke_bp) as it was before, and the
		// kernel dies: "Oops: int3".
		args = append(args, "-accel", "tcg,thread=single", "-cpu", emulatedCPU)
	}
	for i, name := range ports {
		id := fmt.Sprintf("port%d", i)
		args = append(args,
			"-chardev", "socket,id="+id+",path="+m.socket(name),
			"-device", "virtserialport,chardev="+id+",name="+name,
		)
	}
	return args
}

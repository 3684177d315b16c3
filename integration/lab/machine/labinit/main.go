// Command labinit is PID 1 of a machine of the lab. It makes the machine's root file system,
// starts its programs, restarts those that end, reaps orphans and answers on a control socket.
// Its orders are in the machine's directory, see package machine; it knows nothing of Kubernetes.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/machine"
)

// inside is the second argument of the second stage.
const inside = "inside"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if os.Getpid() != 1 || len(args) == 0 {
		return errors.New("labinit is started by the lab, as PID 1 of a new namespace")
	}
	if len(args) == 1 {
		return enter(args[0])
	}
	dir := machine.Dir(args[0])
	spec, err := dir.ReadSpec()
	if err != nil {
		return err
	}
	// Both are opened while the host's files are still in sight.
	control, err := net.Listen("unix", dir.ControlSocket())
	if err != nil {
		return err
	}
	proxies, err := openProxies(spec.Forward)
	if err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.Hostname)); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	logs, err := openLogs(dir, spec)
	if err != nil {
		return err
	}
	if err := makeRoot(dir, spec); err != nil {
		return err
	}
	s := newSupervisor(spec, logs)
	go s.reap()
	s.startAll()
	for _, p := range proxies {
		go p.serve()
	}
	return serveControl(control, s)
}

// enter is the first stage: it waits for its parent's word, while it is moved into its cgroup,
// and then starts itself again in a cgroup namespace whose root is that cgroup.
func enter(dir string) error {
	pipe := os.NewFile(machine.GoFD, "go")
	if n, err := pipe.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("the lab died before the machine was ready to start (%v)", err)
	}
	pipe.Close()
	// unshare(2) changes the calling thread only; execve(2) makes that thread the process.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare the cgroup namespace: %w", err)
	}
	return unix.Exec("/proc/self/exe", []string{"labinit", dir, inside}, os.Environ())
}

// openLogs opens the log of every component, since the machine can't see the directory later.
func openLogs(dir machine.Dir, spec machine.Spec) (map[string]*os.File, error) {
	logs := map[string]*os.File{}
	for _, c := range spec.Components {
		f, err := os.OpenFile(dir.Log(c.Name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return nil, err
		}
		logs[c.Name] = f
	}
	return logs, nil
}

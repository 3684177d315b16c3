package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"

	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/sysctl"
)

// holder is a process that makes network namespaces and keeps them open. A process with thousands of open files starts
// another one more slowly: clone(2) copies the table of them, and execve(2) closes each. Container runtimes have none.
type holder struct {
	program *exec.Cmd
	wanted  io.WriteCloser
	made    *bufio.Scanner
	held    []held
}

// held is a namespace of a holder.
type held struct{ path string }

func (h held) Path() string { return h.path }

func (h held) has(link string) (bool, error) {
	s, err := spaceOf(netns.Open(h.path))
	if err != nil {
		return false, err
	}
	there, err := s.has(link)
	return there, errors.Join(err, s.close())
}

const holdEnv = "COIL_BENCH_HOLD"

// noDAD spares pods that stay IPv6's duplicate address detection, for which ptp waits up to two seconds: nobody measures
// how they are attached.
var noDAD = sysctl.Setting{Key: "net/ipv6/conf/default/accept_dad", Value: "0"}

// playHolder is the process: it makes as many namespaces as each line of standard input says, prints their paths, and ends
// with the input.
func playHolder() {
	if os.Getenv(holdEnv) == "" {
		return
	}
	var all []*netns.NS
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		n, err := strconv.Atoi(lines.Text())
		for i := 0; err == nil && i < n; i++ {
			var ns *netns.NS
			if ns, err = netns.New(); err == nil {
				all = append(all, ns)
				_, err = sysctl.Set(ns, noDAD)
			}
			if err == nil {
				fmt.Printf("/proc/%d/fd/%d\n", os.Getpid(), ns.Fd())
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "hold network namespaces:", err)
			os.Exit(1)
		}
	}
	runtime.KeepAlive(all)
	os.Exit(0)
}

// newHolder starts a holder, which ends with this process.
func newHolder() (*holder, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	h := &holder{program: exec.Command(self)}
	h.program.Env = append(os.Environ(), holdEnv+"=1")
	h.program.Stderr = os.Stderr
	h.program.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for this process
	out, err := h.program.StdoutPipe()
	if err != nil {
		return nil, err
	}
	h.made = bufio.NewScanner(out)
	if h.wanted, err = h.program.StdinPipe(); err != nil {
		return nil, err
	}
	if err := h.program.Start(); err != nil {
		return nil, fmt.Errorf("start the holder of network namespaces: %w", err)
	}
	return h, nil
}

// grow makes more namespaces until there are n.
func (h *holder) grow(n int) error {
	if n <= len(h.held) {
		return nil
	}
	if _, err := fmt.Fprintln(h.wanted, n-len(h.held)); err != nil {
		return err
	}
	for len(h.held) < n {
		if !h.made.Scan() {
			return errors.Join(errors.New("the holder of network namespaces has ended"), h.made.Err())
		}
		h.held = append(h.held, held{h.made.Text()})
	}
	return nil
}

// close ends the holder, and the namespaces with it.
func (h *holder) close() error { return errors.Join(h.wanted.Close(), h.program.Wait()) }

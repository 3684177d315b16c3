package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// runnerEnv is set for a program that is to be a runner: the command line is that of another program.
const runnerEnv = "COIL_SCALE_RUNNER"

// usageOf is what a program has used.
type usageOf struct {
	Took time.Duration
	// Busy is its time of processors.
	Busy time.Duration
	// MaxRSS is in KiB.
	MaxRSS int64
}

// playRunner runs another program if the environment asks for it, and never returns then. It writes what the program has used to the file that it was started with. The kernel counts
// the memory of a process from before it was another program's: of one that this process started itself, it would be at least that of this process, which has grown.
func playRunner() {
	if os.Getenv(runnerEnv) == "" {
		return
	}
	code, err := runAs(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "runner:", err)
		code = 1
	}
	os.Exit(code)
}

func runAs(args []string) (code int, err error) {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	began := time.Now()
	err = cmd.Run()
	u := usageOf{Took: time.Since(began)}
	if failed := (*exec.ExitError)(nil); errors.As(err, &failed) {
		err = nil // the code tells
	}
	if err != nil {
		return 0, err
	}
	used, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	if !ok {
		return 0, errors.New("the kernel doesn't say what the program has used")
	}
	u.Busy, u.MaxRSS = time.Duration(used.Utime.Nano()+used.Stime.Nano()), used.Maxrss
	return cmd.ProcessState.ExitCode(), json.NewEncoder(os.NewFile(3, "usage")).Encode(u)
}

// runMeasured runs a program and returns its output and what it has used. If it fails, it is an error beside these.
func runMeasured(ctx context.Context, args ...string) (out []byte, u usageOf, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, u, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, u, err
	}
	defer r.Close()
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Env = append(os.Environ(), runnerEnv+"=1")
	cmd.ExtraFiles = []*os.File{w}
	out, err = cmd.CombinedOutput()
	w.Close()
	return out, u, errors.Join(err, json.NewDecoder(r).Decode(&u))
}

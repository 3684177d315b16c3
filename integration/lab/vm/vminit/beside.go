package main

import (
	"encoding/json"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/integration/lab/vm/protocol"
)

// besideName is the process that runs the command of a machine with another PID 1. The "@" has systemd spare it.
const besideName = "@vminit"

// portOrder is that of the descriptors, from 3 on, by which that process has the ports.
var portOrder = []string{protocol.Control, protocol.Stdin, protocol.Stdout, protocol.Stderr}

// handOver starts the process that runs the command, and leaves PID 1 to the program of the spec. It returns only if that
// fails.
func handOver(spec protocol.Spec, ports map[string]*os.File) error {
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	path, err := lookPath(spec.Init[0], spec.Env)
	if err != nil {
		return err
	}
	// Not by an argument, which may have 128 KiB at most.
	in, out, err := os.Pipe()
	if err != nil {
		return err
	}
	files := []*os.File{in, os.Stdout, os.Stderr}
	for _, name := range portOrder {
		files = append(files, ports[name])
	}
	if _, err := os.StartProcess("/proc/self/exe", []string{besideName}, &os.ProcAttr{Files: files}); err != nil {
		return fmt.Errorf("start what runs the command: %w", err)
	}
	if _, err := out.Write(text); err != nil {
		return err
	}
	out.Close()
	return fmt.Errorf("become %s: %w", path, unix.Exec(path, spec.Init, spec.Env))
}

// runBeside runs the command that handOver has left to it.
func runBeside() error {
	ports := map[string]*os.File{}
	for i, name := range portOrder {
		unix.CloseOnExec(3 + i)
		ports[name] = os.NewFile(uintptr(3+i), name)
	}
	var (
		spec protocol.Spec
		exit protocol.Exit
	)
	err := json.NewDecoder(os.Stdin).Decode(&spec)
	if err == nil {
		exit, err = execute(spec, ports)
	}
	if err != nil {
		exit.Error = err.Error()
	}
	return end(ports[protocol.Control], exit)
}

// Package coil is the program coil, the CNI plugin that container runtimes run for
// each command.
//
// It owns the outermost layer of that process: its versions, its output and exit
// code. It must not know the commands, and links only the packages of cniplugin:
// the process lives for a millisecond.
package coil

import (
	"cmp"
	"fmt"
	"os"
	"runtime/debug"
	"strings"

	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/cniplugin"
)

// version is that of a release, such as v3.0.0. The linker sets it (hack/pack).
var version string

// Main does the command in the environment variable CNI_COMMAND and returns the exit
// code of the process: 0, or 1 with a CNI error on standard output. Without a command it
// prints what it is. args are those of the process without its name: container runtimes
// give none.
func Main(args []string) int {
	if os.Getenv("CNI_COMMAND") == "" {
		about(args)
		return 0
	}
	err := cniplugin.Plugin{Stdout: os.Stdout}.Main(os.Getenv, os.Stdin)
	if err == nil {
		return 0
	}
	if _, err := os.Stdout.Write(err.JSON()); err != nil {
		fmt.Fprintln(os.Stderr, "coil: write the error to standard output:", err)
	}
	return 1
}

// about prints that this is a CNI plugin; with the argument --version, only the version.
func about(args []string) {
	v := cmp.Or(version, "unknown")
	if info, ok := debug.ReadBuildInfo(); ok && version == "" {
		v = info.Main.Version
	}
	if len(args) == 1 && args[0] == "--version" {
		fmt.Println("coil", v)
		return
	}
	fmt.Fprintf(os.Stderr, "CNI plugin coil %s; it is run by the container runtime\nCNI protocol versions supported: %s\n",
		v, strings.Join(spec.Versions(), ", "))
}

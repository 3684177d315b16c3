// Package coil is the program coil, the CNI plugin that container runtimes run for
// each command.
//
// It owns the outermost layer of that process: its versions, its output and exit
// code. It must not know the commands, and links only the packages of cniplugin:
// the process lives for a millisecond.
package coil

import (
	"fmt"
	"os"
	"runtime/debug"
	"strings"

	"github.com/coil-net/coil/pkg/cniconf/spec"
	"github.com/coil-net/coil/pkg/cniplugin"
)

// Main does the command in the environment variable CNI_COMMAND and returns the exit
// code of the process: 0, or 1 with a CNI error on standard output.
func Main() int {
	if os.Getenv("CNI_COMMAND") == "" {
		about()
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

// about tells a human that this is a CNI plugin.
func about() {
	v := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		v = info.Main.Version
	}
	fmt.Fprintf(os.Stderr, "CNI plugin coil %s; it is run by the container runtime\nCNI protocol versions supported: %s\n",
		v, strings.Join(spec.Versions(), ", "))
}

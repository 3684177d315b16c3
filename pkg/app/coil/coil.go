// Package coil is the program coil, the CNI plugin that container runtimes run for
// each command.
//
// It owns the outermost layer of that process: its versions, its output and exit
// code. It must not know what the commands do, and links only what cniplugin does:
// the process lives for a millisecond.
package coil

import (
	"context"
	"fmt"
	"os"
	"runtime/debug"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/coil-net/coil/pkg/cniconf/netconf"
	"github.com/coil-net/coil/pkg/cniplugin"
)

// Main does the command in the environment variable CNI_COMMAND and returns the exit
// code of the process: 0, or 1 with a CNI error on standard output.
func Main() int {
	plugin := cniplugin.Plugin{Stdout: os.Stdout, Timeouts: cniplugin.DefaultTimeouts()}
	err := skel.PluginMainFuncsWithError(
		plugin.Funcs(context.Background()),
		version.PluginSupports(netconf.SupportedVersions()...),
		about(),
	)
	if err == nil {
		return 0
	}
	if err := err.Print(); err != nil {
		fmt.Fprintln(os.Stderr, "coil: write the error to standard output:", err)
	}
	return 1
}

// about is what a human sees who runs the plugin; it is worked out only then.
func about() string {
	if os.Getenv("CNI_COMMAND") != "" {
		return ""
	}
	v := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		v = info.Main.Version
	}
	return "CNI plugin coil " + v + "; it is run by the container runtime"
}

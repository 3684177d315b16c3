package coild

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/node/cleanup"
	"github.com/coil-net/coil/pkg/podnet"
)

// cleanupCommand is the first argument that asks for the removal of everything that coild leaves on a node.
const cleanupCommand = "cleanup"

// cleanupOptions are the flags of "coild cleanup". Flags of coild mean the same here, so that
// both can be given the same ones.
type cleanupOptions struct {
	Options
	CNIBinDir      string
	RouterProtocol int
	Force          bool
	State          bool
	Stay           bool
}

// AddFlags implements program.Options.
func (o *cleanupOptions) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs)
	fs.StringVar(&o.CNIBinDir, "cni-bin-dir", "/host/opt/cni/bin", "folder of the plugin coil")
	// The installer's environment says where it put things.
	for flag, env := range map[string]string{"cni-conf-dir": "CNI_ETC_DIR", "cni-conf-name": "CNI_CONF_NAME", "cni-bin-dir": "CNI_BIN_DIR"} {
		if v := os.Getenv(env); v != "" {
			f := fs.Lookup(flag)
			_ = f.Value.Set(v) // strings take any value
			f.DefValue = v
		}
	}
	fs.IntVar(&o.RouterProtocol, "router-protocol-id", dataplane.ProtocolRouter, "protocol number that marks the routes of coil-router")
	fs.BoolVar(&o.Force, "force", false, "go on though pods lose their network")
	fs.BoolVar(&o.State, "state", false, "remove the record of addresses, too: a later Coil won't know which of them must still cool down")
	fs.BoolVar(&o.Stay, "stay", false, "don't end after success, but wait for a signal")
}

// Validate implements program.Options.
func (o *cleanupOptions) Validate() error {
	if o.NodeName == "" {
		o.NodeName = "any" // the node is the one that it runs on
	}
	errs := []error{
		o.Options.Validate(),
		program.Protocol("--router-protocol-id", o.RouterProtocol),
		program.Absolute("--cni-bin-dir", o.CNIBinDir),
		program.Absolute("--cni-conf-dir", o.CNIConfDir),
	}
	if o.CNIConfName != "" {
		if err := cniconf.CheckName(o.CNIConfName); err != nil {
			errs = append(errs, fmt.Errorf("--cni-conf-name: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (o *cleanupOptions) run(ctx context.Context) error {
	err := cleanup.Run(ctx, cleanup.Config{
		Kernel:      o.networkOptions(),
		ExportTable: o.ExportTable, RouterProtocol: o.RouterProtocol,
		Socket: o.Socket, DebugSocket: o.debugSocket(), Database: o.database(), DelQueueDir: o.delQueueDir(), APIServers: o.apiServersFile(),
		CNIConfDir: o.CNIConfDir, CNIConfName: o.CNIConfName, CNIBinDir: o.CNIBinDir,
		Force: o.Force, State: o.State, Out: os.Stdout,
	})
	if err == nil && o.Stay {
		<-ctx.Done()
	}
	return err
}

// networkOptions are those of the pods' network.
func (o *Options) networkOptions() podnet.Options {
	return podnet.Options{
		PodTable: o.PodTable, RulePriority: o.PodRulePrio, Protocol: o.Protocol, CompatCalico: o.CompatCalico, MTU: o.MTU,
		// Without IPAM another program wires pods, and their addresses aren't known.
		SourceGuard: o.SourceGuard && o.IPAM, StragglersTracked: !o.FloatingNotrack,
		SysctlRecord: filepath.Join(o.StateDir, "sysctl.json"),
	}
}

// debugSocket is where people ask what is wrong, beside the socket of the plugin.
func (o *Options) debugSocket() string {
	dir, name := filepath.Split(o.Socket)
	ext := filepath.Ext(name)
	return dir + strings.TrimSuffix(name, ext) + "-debug" + ext
}

// database is the record of addresses.
func (o *Options) database() string { return filepath.Join(o.StateDir, "coild.db") }

// delQueueDir has the deletions that came while coild was away.
func (o *Options) delQueueDir() string { return filepath.Join(o.StateDir, "del-queue") }

// apiServersFile has the addresses of the API servers.
func (o *Options) apiServersFile() string { return filepath.Join(o.StateDir, "api-servers.json") }

package coild

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/kernel/module"
	"github.com/coil-net/coil/pkg/plan/probe"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

// probeCommand is the first argument that asks for what coil-migrator preflight wants to know of a node.
const probeCommand = "probe"

// Kernel modules that the tables of nftables need (pkg/kernel/nft): on every node, and on those with clients or routers of
// Egresses. The kernel loads them itself.
var (
	nodeModules   = []string{"nf_tables", "nft_fib", "nft_fib_ipv4", "nft_fib_ipv6", "nft_fib_inet"}
	egressModules = []string{"nft_ct", "nft_nat", "nft_chain_nat", "nft_connlimit", "nft_numgen"}
)

// probeOptions are the flags of "coild probe", of which those of coild have the same names.
type probeOptions struct {
	ModuleDir, CNIConfDir, StateDir string
}

// AddFlags implements program.Options.
func (o *probeOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.ModuleDir, "module-dir", "/host/lib/modules", "folder of the modules of kernels")
	fs.StringVar(&o.CNIConfDir, "cni-conf-dir", "/host/etc/cni/net.d", "folder of network configurations")
	fs.StringVar(&o.StateDir, "state-dir", "/host/var/lib/coil", "folder of the node's record of addresses")
}

// Validate implements program.Options.
func (o *probeOptions) Validate() error {
	return errors.Join(
		program.Absolute("--module-dir", o.ModuleDir),
		program.Absolute("--cni-conf-dir", o.CNIConfDir),
		program.Absolute("--state-dir", o.StateDir),
	)
}

// run prints the result as one line of JSON.
func (o *probeOptions) run(context.Context) error {
	r, err := o.look()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// look finds out what the node has, and changes nothing. What it can't find out is a problem of the result.
func (o *probeOptions) look() (probe.Result, error) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return probe.Result{}, fmt.Errorf("uname: %w", err)
	}
	r := probe.Result{Kernel: unix.ByteSliceToString(uts.Release[:])}
	missing := func(names []string) []string {
		absent, err := module.Missing(o.ModuleDir, names...)
		if errors.Is(err, fs.ErrNotExist) {
			r.ModulesUnlisted = true
		} else if err != nil {
			r.Problems = append(r.Problems, err.Error())
		}
		return absent
	}
	r.MissingModules = missing(nodeModules)
	r.MissingEgressModules = missing(slices.Concat(fouModules, egressModules))

	files, err := cniconf.List(o.CNIConfDir)
	if err != nil {
		r.Problems = append(r.Problems, err.Error())
	}
	for _, f := range files {
		r.CNI = append(r.CNI, probe.CNIFile(f))
	}

	version, known, err := sqlite.Peek(filepath.Join(o.StateDir, "coild.db"))
	switch damaged := errors.Is(err, sqlite.ErrDamaged); {
	case err == nil || damaged:
		r.Record = &probe.Record{Version: version, Known: known, Damaged: damaged}
	case !errors.Is(err, fs.ErrNotExist):
		r.Problems = append(r.Problems, err.Error())
	}
	return r, nil
}

// Package installer is the program coil-installer: the init container of coild that
// puts the CNI plugin on the node and stages the network configuration.
//
// It owns the order of these steps. It touches no file but the plugin and the staged
// configuration: the one in use is coild's, those of others are theirs. It must not
// know when coild is ready.
package installer

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/atomicfile"
	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/cniconf/spec"
)

const pluginMode = 0o755

// Main runs the program and returns its exit code.
func Main(args []string) int {
	o := FromEnv(os.Getenv)
	return program.Main("coil-installer", args, o, func(ctx context.Context) error { return Run(ctx, o) })
}

// Run installs the plugin and stages the configuration. It can be repeated, and
// changes nothing the second time. A configuration that isn't valid changes nothing
// at all.
func Run(ctx context.Context, o *Options) error {
	logger := klog.FromContext(ctx)
	var conf []byte
	if !o.pluginOnly() {
		var err error
		if conf, err = o.netConf(); err != nil {
			return err
		}
		notes, err := cniconf.Validate(conf)
		if err != nil {
			return err
		}
		for _, n := range notes {
			logger.Info("Network configuration can be better", "note", n)
		}
	}
	for _, dir := range []string{o.BinDir, o.EtcDir} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}

	plugin := filepath.Join(o.BinDir, spec.PluginType)
	changed, err := installPlugin(o.CoilPath, plugin)
	if err != nil {
		return err
	}
	logger.Info("Plugin is installed", "file", plugin, "changed", changed)
	if o.pluginOnly() {
		logger.Info("No network configuration is staged: another network's has to name the plugin", "dir", o.EtcDir)
		return nil
	}
	return stage(logger, o, conf)
}

// stage stages the configuration and names the files that keep runtimes from using it.
func stage(logger klog.Logger, o *Options, conf []byte) error {
	changed, err := cniconf.Stage(o.EtcDir, o.ConfName, conf)
	if err != nil {
		return err
	}
	logger.Info("Network configuration is staged; coild puts it in place when it can serve",
		"file", filepath.Join(o.EtcDir, o.ConfName), "changed", changed)

	others, err := cniconf.Preferred(o.EtcDir, o.ConfName)
	if err != nil {
		return err
	}
	if len(others) > 0 {
		logger.Info("The container runtime will not use Coil: it prefers configurations whose names sort before Coil's; remove them",
			"dir", o.EtcDir, "files", others, "coil", o.ConfName)
	}
	return nil
}

// installPlugin makes dst a copy of the program src. A plugin that runs at the moment
// keeps its file; one that starts finds the old or the new program.
func installPlugin(src, dst string) (changed bool, err error) {
	program, err := os.ReadFile(src)
	if err != nil {
		return false, fmt.Errorf("read the plugin (COIL_PATH): %w", err)
	}
	if !bytes.HasPrefix(program, []byte("\x7fELF")) {
		return false, fmt.Errorf("plugin %s (COIL_PATH) is not a program", src)
	}
	if changed, err = atomicfile.Ensure(dst, program, pluginMode); err != nil {
		return false, fmt.Errorf("install the plugin: %w", err)
	}
	return changed, nil
}

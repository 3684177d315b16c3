package installer

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/cniconf"
)

// NoNetConf as the conflist says that the admin adds the plugin to the conflist of
// another network.
const NoNetConf = "none"

// Options are the settings of the program, from its environment. It has no flags.
type Options struct {
	// ConfName is the file name of the conflist: CNI_CONF_NAME.
	ConfName string
	// EtcDir is the folder of network configurations: CNI_ETC_DIR.
	EtcDir string
	// BinDir is the folder of plugins: CNI_BIN_DIR.
	BinDir string
	// CoilPath is the plugin to install: COIL_PATH.
	CoilPath string
	// NetConf is the conflist: CNI_NETCONF. With NoNetConf only the plugin is installed.
	NetConf string
	// NetConfFile is a file with the conflist: CNI_NETCONF_FILE. It wins.
	NetConfFile string
}

// FromEnv returns the options that an environment gives, with defaults.
func FromEnv(getenv func(string) string) *Options {
	return &Options{
		ConfName:    cmp.Or(getenv("CNI_CONF_NAME"), cniconf.DefaultName),
		EtcDir:      cmp.Or(getenv("CNI_ETC_DIR"), "/host/etc/cni/net.d"),
		BinDir:      cmp.Or(getenv("CNI_BIN_DIR"), "/host/opt/cni/bin"),
		CoilPath:    cmp.Or(getenv("COIL_PATH"), "/coil"),
		NetConf:     getenv("CNI_NETCONF"),
		NetConfFile: getenv("CNI_NETCONF_FILE"),
	}
}

// AddFlags adds none.
func (o *Options) AddFlags(*pflag.FlagSet) {}

// Validate returns all problems at once.
func (o *Options) Validate() error {
	errs := []error{program.Absolute("CNI_ETC_DIR", o.EtcDir), program.Absolute("CNI_BIN_DIR", o.BinDir), program.Absolute("COIL_PATH", o.CoilPath)}
	if err := cniconf.CheckName(o.ConfName); err != nil {
		errs = append(errs, fmt.Errorf("CNI_CONF_NAME: %w", err))
	}
	if o.NetConf == "" && o.NetConfFile == "" {
		errs = append(errs, errors.New("CNI_NETCONF or CNI_NETCONF_FILE must give the network configuration, or CNI_NETCONF must be "+NoNetConf))
	}
	return errors.Join(errs...)
}

// pluginOnly reports whether there is no configuration to stage.
func (o *Options) pluginOnly() bool { return o.NetConfFile == "" && o.NetConf == NoNetConf }

// netConf returns the network configuration.
func (o *Options) netConf() ([]byte, error) {
	if o.NetConfFile == "" {
		return []byte(o.NetConf), nil
	}
	content, err := os.ReadFile(o.NetConfFile)
	if err != nil {
		return nil, fmt.Errorf("read CNI_NETCONF_FILE: %w", err)
	}
	return content, nil
}

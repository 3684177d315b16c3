package lbagent

import (
	"errors"
	"os"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/keepalived"
	"github.com/coil-net/coil/pkg/observe"
)

// Options are the flags of coil-lb-agent.
type Options struct {
	// Name is that of the machine's LoadBalancerGateway.
	Name       string
	Kubeconfig string
	// StateDir has what the machine did last, and the kernel's settings before the program.
	StateDir string
	// Forwarding has the kernel forward packets.
	Forwarding bool
	// Keepalived is the machine's, if pools have spec.vrrp.
	Keepalived keepalived.Options
	// Cleanup takes away what the program has made, instead of running it.
	Cleanup bool
	Observe observe.Options
}

// AddFlags implements program.Options.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	host, _ := os.Hostname() // an empty name is refused
	fs.StringVar(&o.Name, "name", host, "name of the machine's LoadBalancerGateway; default: the machine's host name")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "/etc/coil/lb-agent.kubeconfig", "path of a kubeconfig; empty: the pod's own account")
	fs.StringVar(&o.StateDir, "state-dir", "/var/lib/coil-lb-agent", "directory of what the machine did last, which it does after a start until it reaches the API server")
	fs.BoolVar(&o.Forwarding, "forwarding", true, "set net.ipv4.ip_forward and net.ipv6.conf.all.forwarding to 1; --cleanup sets them to what they were")
	fs.StringVar(&o.Keepalived.Program, "keepalived", "/usr/sbin/keepalived", "program that checks keepalived's configuration")
	fs.StringVar(&o.Keepalived.Main, "keepalived-config", "/etc/keepalived/keepalived.conf", "configuration with which keepalived was started; it includes the folder of the next one")
	fs.StringVar(&o.Keepalived.Fragment, "keepalived-fragment", "/etc/keepalived/coil/coil.conf", "the program's own part of keepalived's configuration")
	fs.StringVar(&o.Keepalived.PIDFile, "keepalived-pid-file", "/run/keepalived.pid", "names keepalived's process")
	fs.StringVar(&o.Keepalived.DumpFolder, "keepalived-dump-dir", "/tmp", "where keepalived writes its state when it is asked")
	fs.BoolVar(&o.Cleanup, "cleanup", false, "take back what the program has done to the kernel, remove its state, and end")
	fs.StringVar(&o.Observe.MetricsAddr, "metrics-addr", ":9400", "listen here for /metrics and /debug/pprof; empty: nowhere")
	fs.StringVar(&o.Observe.HealthAddr, "health-addr", ":9401", "listen here for /healthz and /readyz; empty: nowhere")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	return errors.Join(
		program.Required("--name", o.Name, "the name of the machine's LoadBalancerGateway"),
		program.Required("--state-dir", o.StateDir, "a directory of the program's own"),
	)
}

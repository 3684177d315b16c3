// Package coild composes the node daemon coild.
package coild

import (
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/observe"
)

// Options are the flags and environment of coild.
type Options struct {
	NodeName   string // env COIL_NODE_NAME
	Kubeconfig string

	Socket          string
	StateDir        string
	BootIDFile      string
	MachineIDFile   string
	CNIConfDir      string
	CNIConfName     string
	PodTable        int
	PodRulePrio     int
	ExportTable     int
	Protocol        int
	EgressPort      int
	FloatingPort    int
	FloatingNotrack bool
	CompatCalico    bool
	SourceGuard     bool
	IPAM            bool
	Egress          bool
	Floating        bool
	OriginateOnly   bool
	ModuleDir       string
	CoolDown        time.Duration
	BlockTimeout    time.Duration
	BlockMinAge     time.Duration
	SweepInterval   time.Duration
	MTU             int
	Observe         observe.Options
}

// AddFlags implements program.Options.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.NodeName = os.Getenv("COIL_NODE_NAME")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig file, for use outside a cluster")
	fs.StringVar(&o.Socket, "socket", "/run/coild.sock", "unix socket at which the CNI plugin is served")
	fs.StringVar(&o.StateDir, "state-dir", "/var/lib/coil", "folder of the node's record of addresses and of the queue of deletions")
	fs.StringVar(&o.BootIDFile, "boot-id-file", "/proc/sys/kernel/random/boot_id", "file whose content is another one after each boot")
	fs.StringVar(&o.MachineIDFile, "machine-id-file", "/etc/machine-id", "file with the ID of the machine, which must be that of the Node; empty checks nothing")
	fs.StringVar(&o.CNIConfDir, "cni-conf-dir", "/host/etc/cni/net.d", "folder in which the network configuration is put in place")
	fs.StringVar(&o.CNIConfName, "cni-conf-name", "10-coil.conflist", "name of the network configuration; empty puts none in place")
	fs.IntVar(&o.PodTable, "pod-table-id", dataplane.TablePods, "routing table with a route to each pod of the node")
	fs.IntVar(&o.PodRulePrio, "pod-rule-prio", dataplane.PriorityPods, "priority of the rule to that table; the next one is used too")
	fs.IntVar(&o.ExportTable, "export-table-id", dataplane.TableExport, "routing table from which routing daemons import the node's blocks")
	fs.IntVar(&o.Protocol, "protocol-id", dataplane.ProtocolNode, "protocol number that marks the routes and rules of coild")
	fs.IntVar(&o.EgressPort, "egress-port", dataplane.FouPort, "UDP port of Foo-over-UDP")
	fs.IntVar(&o.FloatingPort, "floating-port", 9391, "UDP and TCP port at which nodes ask each other who has floating addresses, and hand them over; the same on all nodes")
	fs.BoolVar(&o.FloatingNotrack, "floating-notrack", true, "track no connections of floating addresses of Egresses on the host; false if rules of other programs need that")
	fs.BoolVar(&o.CompatCalico, "compat-calico", false, "name the host's ends of veths as Calico does")
	fs.BoolVar(&o.SourceGuard, "source-guard", true, "drop what pods send from addresses that aren't theirs")
	fs.BoolVar(&o.IPAM, "enable-ipam", true, "give addresses to pods; false to chain coil behind another plugin")
	fs.BoolVar(&o.Egress, "enable-egress", true, "obey annotations that ask for an Egress")
	fs.BoolVar(&o.Floating, "enable-floating", false, "hold floating addresses of Egresses behind another plugin (--enable-ipam=false); if Coil gives pods their addresses, it does so anyway")
	fs.BoolVar(&o.OriginateOnly, "enable-originating-only", false, "use all Egresses for connections that the pod opens only, whatever their specification says")
	fs.StringVar(&o.ModuleDir, "module-dir", "/lib/modules", "folder of the modules of kernels, of which Egresses need fou, fou6, ipip and ip6_tunnel")
	fs.DurationVar(&o.CoolDown, "cool-down", time.Minute, "time before a freed address is given again")
	fs.DurationVar(&o.BlockTimeout, "block-timeout", 15*time.Second, "time that a pod waits for an AddressBlock before it fails and is tried again")
	fs.DurationVar(&o.BlockMinAge, "block-min-age", time.Minute, "time for which an AddressBlock is kept at least, used or not")
	fs.DurationVar(&o.SweepInterval, "sweep-interval", 30*time.Second, "how often the record is compared with the kernel; what is found without a link twice is released")
	fs.IntVar(&o.MTU, "mtu", 0, "MTU of pods; 0 is the smallest of the node's uplinks, and follows it")
	fs.StringVar(&o.Observe.MetricsAddr, "metrics-addr", ":9384", "address of /metrics")
	fs.StringVar(&o.Observe.HealthAddr, "health-addr", ":9385", "address of /healthz and /readyz")
}

// Validate implements program.Options.
func (o *Options) Validate() error {
	errs := []error{
		program.Required("COIL_NODE_NAME", o.NodeName, "the name of the Node"),
		program.Within("--pod-rule-prio", o.PodRulePrio, 1, 32764),
		program.Protocol("--protocol-id", o.Protocol),
		program.Within("--egress-port", o.EgressPort, 1, math.MaxUint16),
		program.Within("--floating-port", o.FloatingPort, 1, math.MaxUint16),
		program.NotNegative("--cool-down", o.CoolDown),
		program.NotNegative("--block-min-age", o.BlockMinAge),
		program.Positive("--block-timeout", o.BlockTimeout),
		program.Positive("--sweep-interval", o.SweepInterval),
		program.Absolute("--socket", o.Socket),
		program.Absolute("--state-dir", o.StateDir),
	}
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !o.IPAM && !o.Egress {
		bad("--enable-ipam=false and --enable-egress=false leave nothing to do")
	}
	if o.Floating && !o.Egress {
		bad("--enable-floating is for addresses of Egresses, and there is --enable-egress=false")
	}
	if o.FloatingPort == o.EgressPort {
		bad("--floating-port=%d is that of --egress-port", o.FloatingPort)
	}
	tables := map[int]string{dataplane.TableUnassigned: "the table of unassigned addresses", 0: "unspecified", 253: "default", 254: "main", 255: "local"}
	for _, t := range []struct {
		flag string
		id   int
	}{{"--pod-table-id", o.PodTable}, {"--export-table-id", o.ExportTable}} {
		if other, ok := tables[t.id]; ok {
			bad("%s=%d is %s", t.flag, t.id, other)
		}
		tables[t.id] = "that of " + t.flag
	}
	if o.MTU != 0 && (o.MTU < 1280 || o.MTU > 65535) {
		bad("--mtu=%d is not within 1280 (what IPv6 needs) and 65535", o.MTU)
	}
	return errors.Join(errs...)
}

// Main runs coild and returns the exit code. With the first argument "cleanup", "probe", "debug" or "selftest" it runs that command instead.
func Main(args []string) int {
	if len(args) > 0 && args[0] == selftestCommand {
		return selftestMain(args[1:])
	}
	if len(args) > 0 && args[0] == probeCommand {
		var o probeOptions
		return program.Main("coild "+probeCommand, args[1:], &o, o.run)
	}
	if len(args) > 0 && args[0] == debugCommand {
		return debugMain(args[1:])
	}
	if len(args) > 0 && args[0] == cleanupCommand {
		var o cleanupOptions
		return program.Main("coild "+cleanupCommand, args[1:], &o, o.run)
	}
	var o Options
	return program.Main("coild", args, &o, o.run)
}

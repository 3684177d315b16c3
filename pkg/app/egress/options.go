package egress

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/natgateway"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/plan/gateway"
)

// Options are the flags and environment of coil-egress.
type Options struct {
	// PodAddresses has the pod's addresses, separated by commas: env COIL_POD_ADDRESSES.
	PodAddresses string
	// NodeAddresses has those of the pod's node, alike: env COIL_NODE_ADDRESSES. Without them
	// kubelet's probes fail when no more connections can be tracked.
	NodeAddresses string
	Namespace     string // env COIL_POD_NAMESPACE
	Pod           string // env COIL_POD_NAME
	Egress        string // env COIL_EGRESS_NAME

	Kubeconfig     string
	Port           int
	SourcePortAuto bool
	DrainPeriod    time.Duration
	ResyncInterval time.Duration
	// MetricsFrom are ranges beside the cluster from which the addresses of Observe answer.
	MetricsFrom []string
	// DebugSocket is the unix socket at which people ask; empty for none.
	DebugSocket string
	Observe     observe.Options
}

// AddFlags implements program.Options.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.PodAddresses = os.Getenv(podAddresses)
	o.NodeAddresses = os.Getenv(nodeAddresses)
	o.Namespace = os.Getenv("COIL_POD_NAMESPACE")
	o.Pod = os.Getenv("COIL_POD_NAME")
	o.Egress = os.Getenv("COIL_EGRESS_NAME")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig file, for use outside a cluster")
	fs.IntVar(&o.Port, "fou-port", dataplane.FouPort, "UDP port of Foo over UDP")
	fs.BoolVar(&o.SourcePortAuto, "enable-sport-auto", false, "let the kernel choose the UDP source ports to clients, whatever the Egress says")
	fs.DurationVar(&o.DrainPeriod, "drain-period", 20*time.Second, "for how long to go on after SIGTERM, so that clients change to another router")
	fs.DurationVar(&o.ResyncInterval, "resync-interval", time.Minute, "longest time between two comparisons with the kernel")
	fs.StringSliceVar(&o.MetricsFrom, "metrics-from", nil, "ranges beside the cluster and private addresses from which metrics and health are answered")
	fs.StringVar(&o.DebugSocket, "debug-socket", defaultSocket, "unix socket at which \"coil-egress debug\" asks; empty: nobody can")
	fs.StringVar(&o.Observe.MetricsAddr, "metrics-addr", ":8080", "address of /metrics")
	fs.StringVar(&o.Observe.HealthAddr, "health-addr", ":8081", "address of /healthz and /readyz")
}

// Validate implements program.Options.
func (o *Options) Validate() error {
	_, err := o.config()
	return errors.Join(
		program.Required("COIL_POD_NAMESPACE", o.Namespace, "the namespace of the pod"),
		program.Required("COIL_POD_NAME", o.Pod, "the name of the pod"),
		program.Required("COIL_EGRESS_NAME", o.Egress, "the name of the Egress"),
		program.Within("--fou-port", o.Port, 1, math.MaxUint16),
		program.NotNegative("--drain-period", o.DrainPeriod),
		program.Positive("--resync-interval", o.ResyncInterval),
		err,
	)
}

// config returns the configuration of the router.
func (o *Options) config() (natgateway.Config, error) {
	addrs, addrErr := o.addresses()
	probers, proberErr := parseAddresses(nodeAddresses, o.NodeAddresses)
	health, healthErr := portOf("--health-addr", o.Observe.HealthAddr)
	metrics, metricsErr := portOf("--metrics-addr", o.Observe.MetricsAddr)
	askers, askerErr := program.Prefixes("--metrics-from", o.MetricsFrom)
	return natgateway.Config{
		Namespace: o.Namespace, Egress: o.Egress,
		Config: gateway.Config{
			Pod: o.Pod, Addresses: addrs, Port: uint16(o.Port), SourcePortAuto: o.SourcePortAuto, Probers: probers, HealthPort: health,
			Ports:      slices.Compact(slices.DeleteFunc([]uint16{metrics, health}, func(p uint16) bool { return p == 0 })),
			AlsoAskers: askers,
		},
		Resync: o.ResyncInterval,
	}, errors.Join(addrErr, proberErr, healthErr, metricsErr, askerErr)
}

// Environment variables with addresses.
const (
	podAddresses  = "COIL_POD_ADDRESSES"
	nodeAddresses = "COIL_NODE_ADDRESSES"
)

// addresses returns the pod's addresses, at most one of each family.
func (o *Options) addresses() ([]netip.Addr, error) {
	if err := program.Required(podAddresses, o.PodAddresses, "the addresses of the pod, separated by commas"); err != nil {
		return nil, err
	}
	all, err := parseAddresses(podAddresses, o.PodAddresses)
	seen := map[dataplane.Family]bool{}
	for _, a := range all {
		f := dataplane.FamilyOf(a)
		if seen[f] {
			return nil, fmt.Errorf("environment variable %s: two addresses of %s", podAddresses, f)
		}
		seen[f] = true
	}
	return all, err
}

// parseAddresses reads addresses that are separated by commas; there are none in a variable that isn't set.
func parseAddresses(variable, text string) ([]netip.Addr, error) {
	var all []netip.Addr
	if text == "" {
		return nil, nil
	}
	for text := range strings.SplitSeq(text, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil {
			return nil, fmt.Errorf("environment variable %s: %w", variable, err)
		}
		all = append(all, a.Unmap())
	}
	return all, nil
}

// portOf is the port of an address, 0 of none; flag names it in errors.
func portOf(flag, addr string) (uint16, error) {
	if addr == "" {
		return 0, nil
	}
	_, text, err := net.SplitHostPort(addr)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", flag, err)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%s=%s: its port isn't a number of 16 bits", flag, addr)
	}
	return uint16(port), nil
}

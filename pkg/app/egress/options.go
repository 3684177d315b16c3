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

	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/observe"
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
	// MetricsFrom are ranges of who may ask at the addresses of Observe beside the cluster.
	MetricsFrom []string
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
	fs.StringVar(&o.Observe.MetricsAddr, "metrics-addr", ":8080", "address of /metrics")
	fs.StringVar(&o.Observe.HealthAddr, "health-addr", ":8081", "address of /healthz and /readyz")
}

// Validate implements program.Options.
func (o *Options) Validate() error {
	_, podErr := o.addresses()
	_, nodeErr := o.probers()
	_, portErr := o.healthPort()
	_, metricsErr := o.metricsPort()
	_, fromErr := o.askers()
	errs := []error{podErr, nodeErr, portErr, metricsErr, fromErr}
	for _, v := range []struct{ name, value string }{
		{"COIL_POD_NAMESPACE", o.Namespace}, {"COIL_POD_NAME", o.Pod}, {"COIL_EGRESS_NAME", o.Egress},
	} {
		if v.value == "" {
			errs = append(errs, fmt.Errorf("environment variable %s is not set", v.name))
		}
	}
	if o.Port < 1 || o.Port > math.MaxUint16 {
		errs = append(errs, fmt.Errorf("--fou-port=%d is not within 1 and %d", o.Port, math.MaxUint16))
	}
	if o.DrainPeriod < 0 {
		errs = append(errs, fmt.Errorf("--drain-period=%s is negative", o.DrainPeriod))
	}
	if o.ResyncInterval <= 0 {
		errs = append(errs, fmt.Errorf("--resync-interval=%s is not positive", o.ResyncInterval))
	}
	return errors.Join(errs...)
}

// Environment variables with addresses.
const (
	podAddresses  = "COIL_POD_ADDRESSES"
	nodeAddresses = "COIL_NODE_ADDRESSES"
)

// addresses returns the pod's addresses, at most one of each family.
func (o *Options) addresses() ([]netip.Addr, error) {
	if o.PodAddresses == "" {
		return nil, fmt.Errorf("environment variable %s is not set", podAddresses)
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

// probers returns the addresses of the pod's node, if they are known.
func (o *Options) probers() ([]netip.Addr, error) {
	if o.NodeAddresses == "" {
		return nil, nil
	}
	return parseAddresses(nodeAddresses, o.NodeAddresses)
}

// parseAddresses reads addresses that are separated by commas.
func parseAddresses(variable, text string) ([]netip.Addr, error) {
	var all []netip.Addr
	for text := range strings.SplitSeq(text, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil {
			return nil, fmt.Errorf("environment variable %s: %w", variable, err)
		}
		all = append(all, a.Unmap())
	}
	return all, nil
}

// healthPort is that of --health-addr; 0 if there is none.
func (o *Options) healthPort() (uint16, error) { return portOf("health-addr", o.Observe.HealthAddr) }

// metricsPort is that of --metrics-addr; 0 if there is none.
func (o *Options) metricsPort() (uint16, error) {
	return portOf("metrics-addr", o.Observe.MetricsAddr)
}

// portOf is the port of an address, 0 of none; flag names it in errors.
func portOf(flag, addr string) (uint16, error) {
	if addr == "" {
		return 0, nil
	}
	_, text, err := net.SplitHostPort(addr)
	if err != nil {
		return 0, fmt.Errorf("--%s: %w", flag, err)
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("--%s=%s: its port isn't a number of 16 bits", flag, addr)
	}
	return uint16(port), nil
}

// ports are those at which the router tells of itself.
func (o *Options) ports() ([]uint16, error) {
	health, healthErr := o.healthPort()
	metrics, metricsErr := o.metricsPort()
	all := slices.DeleteFunc([]uint16{metrics, health}, func(p uint16) bool { return p == 0 })
	return slices.Compact(all), errors.Join(healthErr, metricsErr)
}

// askers are the ranges of --metrics-from.
func (o *Options) askers() ([]netip.Prefix, error) {
	var all []netip.Prefix
	for _, text := range o.MetricsFrom {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("--metrics-from: %w", err)
		}
		all = append(all, p.Masked())
	}
	return all, nil
}

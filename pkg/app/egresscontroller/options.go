package egresscontroller

import (
	"errors"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/egress"
)

// Options are the flags and environment of coil-egress-controller.
type Options struct {
	leading.Options
	// PodNamespace and PodName are of the program's own pod, whose image routers have
	// (env COIL_POD_NAMESPACE, COIL_POD_NAME).
	PodNamespace, PodName string
	// EgressPort is the UDP port of FoU.
	EgressPort uint16
	// EnableIPAM says that Coil gives pods their addresses.
	EnableIPAM bool
	// EnableFloating says that there are floating addresses, though another plugin gives pods theirs.
	EnableFloating bool
	// EndpointsPerSlice is how many clients an EndpointSlice has.
	EndpointsPerSlice int
	// CountEvery is how often a status is written for numbers alone. It has no flag; 0 is what the controllers take.
	CountEvery time.Duration
	// ExternalNodes are the ranges in which ExternalIPs of Nodes are the cluster's.
	ExternalNodes []string
}

// AddFlags adds the flags, sets the defaults and reads the environment.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.PodNamespace, o.PodName = os.Getenv("COIL_POD_NAMESPACE"), os.Getenv("COIL_POD_NAME")
	o.Options.AddFlags(fs, leaseName, ":9396", ":9397")
	fs.Uint16Var(&o.EgressPort, "egress-port", dataplane.FouPort, "UDP port of the tunnels between clients and routers; the same as coild's")
	fs.BoolVar(&o.EnableIPAM, "enable-ipam", true, "Coil gives pods their addresses; false: pods are where Nodes say (spec.podCIDRs)")
	fs.BoolVar(&o.EnableFloating, "enable-floating", false, "there are AddressPools for floating addresses of Egresses behind another plugin (--enable-ipam=false), too")
	fs.IntVar(&o.EndpointsPerSlice, "max-endpoints-per-slice", egress.EndpointsPerSlice, "clients in an EndpointSlice: each that comes or goes writes one anew; slices with more are relieved bit by bit")
	fs.StringSliceVar(&o.ExternalNodes, "node-external-cidrs", nil, "ranges in which ExternalIPs of Nodes are the cluster's, which no Egress captures; empty: none is")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	_, err := o.externalNodes()
	return errors.Join(
		program.Required("COIL_POD_NAMESPACE", o.PodNamespace, "the namespace of this program's pod, whose image routers have"),
		program.Required("COIL_POD_NAME", o.PodName, "the name of this program's pod, whose image routers have"),
		program.Positive("--egress-port", o.EgressPort),
		program.Within("--max-endpoints-per-slice", o.EndpointsPerSlice, 1, egress.MaxEndpoints),
		err, o.Options.Validate(),
	)
}

// externalNodes are the ranges of --node-external-cidrs.
func (o *Options) externalNodes() ([]netip.Prefix, error) {
	return program.Prefixes("--node-external-cidrs", o.ExternalNodes)
}

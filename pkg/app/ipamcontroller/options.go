package ipamcontroller

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/controller/blockgc"
)

// Options are the flags of coil-ipam-controller.
type Options struct {
	// Kubeconfig is the path of a kubeconfig; empty means the pod's own account.
	Kubeconfig  string
	MetricsAddr string
	HealthAddr  string
	// GCInterval is how often the blocks of Nodes that are gone are looked for.
	GCInterval time.Duration
	// Quarantine is for how long they stay locked.
	Quarantine time.Duration
	Election   leading.Options
}

// AddFlags adds the flags and sets the defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "path of a kubeconfig; needed only outside a cluster")
	fs.StringVar(&o.MetricsAddr, "metrics-addr", ":9386", "listen here for /metrics and /debug/pprof; empty: nowhere")
	fs.StringVar(&o.HealthAddr, "health-addr", ":9387", "listen here for /healthz and /readyz; empty: nowhere")
	fs.DurationVar(&o.GCInterval, "gc-interval", blockgc.DefaultInterval, "how often to look for blocks of Nodes that are gone; a deleted Node is noticed at once")
	fs.DurationVar(&o.Quarantine, "quarantine", blockgc.DefaultQuarantine, "for how long the blocks of a Node that is gone stay locked, 0s: not at all; shorter than it takes to stop a lost machine risks duplicate addresses")
	o.Election.AddFlags(fs, leaseName)
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	var errs []error
	if o.GCInterval <= 0 {
		errs = append(errs, fmt.Errorf("--gc-interval is %s, it must be more than 0", o.GCInterval))
	}
	if o.Quarantine < 0 {
		errs = append(errs, fmt.Errorf("--quarantine is %s, it must not be less than 0", o.Quarantine))
	}
	errs = append(errs, o.Election.Validate())
	return errors.Join(errs...)
}

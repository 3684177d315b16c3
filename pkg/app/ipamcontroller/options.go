package ipamcontroller

import (
	"errors"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/controller/blockgc"
	"github.com/coil-net/coil/pkg/observe"
)

// Options are the flags of coil-ipam-controller.
type Options struct {
	// Kubeconfig is the path of a kubeconfig; empty means the pod's own account.
	Kubeconfig string
	Observe    observe.Options
	// GCInterval is how often the blocks of Nodes that are gone are looked for.
	GCInterval time.Duration
	// Quarantine is for how long they stay locked.
	Quarantine time.Duration
	Election   leading.Options
}

// AddFlags adds the flags and sets the defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "path of a kubeconfig; needed only outside a cluster")
	fs.StringVar(&o.Observe.MetricsAddr, "metrics-addr", ":9386", "listen here for /metrics and /debug/pprof; empty: nowhere")
	fs.StringVar(&o.Observe.HealthAddr, "health-addr", ":9387", "listen here for /healthz and /readyz; empty: nowhere")
	fs.DurationVar(&o.GCInterval, "gc-interval", blockgc.DefaultInterval, "how often to look for blocks of Nodes that are gone; a deleted Node is noticed at once")
	fs.DurationVar(&o.Quarantine, "quarantine", blockgc.DefaultQuarantine, "for how long the blocks of a Node that is gone stay locked, 0s: not at all; shorter than it takes to stop a lost machine risks duplicate addresses")
	o.Election.AddFlags(fs, leaseName)
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	return errors.Join(program.Positive("--gc-interval", o.GCInterval), program.NotNegative("--quarantine", o.Quarantine), o.Election.Validate())
}

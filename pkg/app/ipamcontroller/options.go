package ipamcontroller

import (
	"errors"
	"time"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/controller/blockgc"
)

// Options are the flags of coil-ipam-controller.
type Options struct {
	leading.Options
	// GCInterval is how often the blocks of Nodes that are gone are looked for.
	GCInterval time.Duration
	// Quarantine is for how long they stay locked.
	Quarantine time.Duration
}

// AddFlags adds the flags and sets the defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs, leaseName, ":9386", ":9387")
	fs.DurationVar(&o.GCInterval, "gc-interval", blockgc.DefaultInterval, "how often to look for blocks of Nodes that are gone; a deleted Node is noticed at once")
	fs.DurationVar(&o.Quarantine, "quarantine", blockgc.DefaultQuarantine, "for how long the blocks of a Node that is gone stay locked, 0s: not at all; shorter than it takes to stop a lost machine risks duplicate addresses")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	return errors.Join(program.Positive("--gc-interval", o.GCInterval), program.NotNegative("--quarantine", o.Quarantine), o.Options.Validate())
}

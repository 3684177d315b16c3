package lbcontroller

import (
	"cmp"
	"errors"
	"os"

	"github.com/spf13/pflag"

	"github.com/coil-net/coil/pkg/app/leading"
	"github.com/coil-net/coil/pkg/app/program"
)

// Options are the flags and environment of coil-lb-controller.
type Options struct {
	leading.Options
	// Namespace has the AddressClaims of Services' addresses (env COIL_POD_NAMESPACE).
	Namespace string
	// DefaultPool is the AddressPool of Services that name none.
	DefaultPool string
	// WithoutClass says that Services without spec.loadBalancerClass are served, too.
	WithoutClass bool
}

// AddFlags adds the flags, sets the defaults and reads the environment.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs, leaseName, ":9398", ":9399")
	fs.StringVar(&o.Namespace, "claim-namespace", cmp.Or(os.Getenv("COIL_POD_NAMESPACE"), "kube-system"), "namespace of the AddressClaims of Services' addresses")
	fs.StringVar(&o.DefaultPool, "default-pool", "services", "AddressPool of Services without the annotation coil.cybozu.com/pool")
	fs.BoolVar(&o.WithoutClass, "serve-without-class", false, "serve Services without spec.loadBalancerClass, too, unless somebody else has told an address in their status")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	return errors.Join(
		program.Required("--claim-namespace", o.Namespace, "the namespace of the AddressClaims"),
		program.Required("--default-pool", o.DefaultPool, "the AddressPool of Services that name none"),
		o.Options.Validate(),
	)
}

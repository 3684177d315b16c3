package lbcontroller

import (
	"cmp"
	"errors"
	"os"
	"time"

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
	// CloudsFile is a clouds.yaml with the clouds of pools with spec.openstack; empty: where the program openstack looks for it.
	CloudsFile string
	// ClusterID tells this cluster's objects in OpenStack from those of others; empty: the UID of the namespace kube-system.
	ClusterID string
	// CloudResync is how often objects in OpenStack are listed, so that what others have changed is repaired.
	CloudResync time.Duration
}

// AddFlags adds the flags, sets the defaults and reads the environment.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs, leaseName, ":9398", ":9399")
	fs.StringVar(&o.Namespace, "claim-namespace", cmp.Or(os.Getenv("COIL_POD_NAMESPACE"), "kube-system"), "namespace of the AddressClaims of Services' addresses")
	fs.StringVar(&o.DefaultPool, "default-pool", "services", "AddressPool of Services without the annotation coil.cybozu.com/pool")
	fs.StringVar(&o.CloudsFile, "openstack-clouds", "", "path of the clouds.yaml that has the clouds of AddressPools with spec.openstack; empty: where the program openstack looks for it, such as /etc/openstack")
	fs.StringVar(&o.ClusterID, "openstack-cluster-id", "", "tells this cluster's objects in OpenStack from those of others; empty: the UID of the namespace kube-system")
	fs.DurationVar(&o.CloudResync, "openstack-resync", 5*time.Minute, "how often objects in OpenStack are listed, so that what others have changed is repaired")
	fs.BoolVar(&o.WithoutClass, "serve-without-class", false, "serve Services without spec.loadBalancerClass, too, unless somebody else has told an address in their status")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	return errors.Join(
		program.Required("--claim-namespace", o.Namespace, "the namespace of the AddressClaims"),
		program.Required("--default-pool", o.DefaultPool, "the AddressPool of Services that name none"),
		program.Positive("--openstack-resync", o.CloudResync),
		o.Options.Validate(),
	)
}

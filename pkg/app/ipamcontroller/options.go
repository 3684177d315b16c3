package ipamcontroller

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

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
	// LeaseNamespace has the Lease that the leader holds; the rest are its times.
	LeaseNamespace string
	LeaseDuration  time.Duration
	RenewDeadline  time.Duration
	RetryPeriod    time.Duration
}

// AddFlags adds the flags and sets the defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "path of a kubeconfig; needed only outside a cluster")
	fs.StringVar(&o.MetricsAddr, "metrics-addr", ":9386", "listen here for /metrics and /debug/pprof; empty: nowhere")
	fs.StringVar(&o.HealthAddr, "health-addr", ":9387", "listen here for /healthz and /readyz; empty: nowhere")
	fs.DurationVar(&o.GCInterval, "gc-interval", blockgc.DefaultInterval, "how often to look for blocks of Nodes that are gone; a deleted Node is noticed at once")
	fs.DurationVar(&o.Quarantine, "quarantine", blockgc.DefaultQuarantine, "for how long the blocks of a Node that is gone stay locked; shorter than it takes to stop a lost machine risks duplicate addresses")
	fs.StringVar(&o.LeaseNamespace, "leader-election-namespace", "kube-system", "namespace of the Lease "+leaseName)
	fs.DurationVar(&o.LeaseDuration, "leader-election-lease-duration", 30*time.Second, "after this time without renewal another replica leads")
	fs.DurationVar(&o.RenewDeadline, "leader-election-renew-deadline", 20*time.Second, "the leader gives up when it can't renew for this time")
	fs.DurationVar(&o.RetryPeriod, "leader-election-retry-period", 5*time.Second, "pause between attempts to lead or to renew")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	var errs []error
	for _, f := range []struct {
		flag string
		d    time.Duration
	}{
		{"gc-interval", o.GCInterval},
		{"quarantine", o.Quarantine},
		{"leader-election-retry-period", o.RetryPeriod},
	} {
		if f.d <= 0 {
			errs = append(errs, fmt.Errorf("--%s is %s, it must be more than 0", f.flag, f.d))
		}
	}
	if o.LeaseNamespace == "" {
		errs = append(errs, errors.New("--leader-election-namespace is empty"))
	}
	// client-go wants room for one jittered retry (factor 1.2) before the deadline.
	if o.RenewDeadline <= o.RetryPeriod*12/10 || o.LeaseDuration <= o.RenewDeadline {
		errs = append(errs, fmt.Errorf("--leader-election-lease-duration %s, -renew-deadline %s and -retry-period %s must each be longer than the next, the deadline by more than a fifth",
			o.LeaseDuration, o.RenewDeadline, o.RetryPeriod))
	}
	return errors.Join(errs...)
}

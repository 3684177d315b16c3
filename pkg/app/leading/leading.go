// Package leading is what the mains of Coil's controllers share: several replicas fill
// their caches, and one of them works.
//
// It owns the flags of the election and the condition of readiness. It must not know what
// the leader does.
package leading

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/leader"
	"github.com/coil-net/coil/pkg/observe"
)

// Caches is the condition of readiness: a standby is as ready as the leader.
const Caches = "caches"

// syncPatience is how long the caches may take to fill before that is reported.
const syncPatience = 30 * time.Second

// Options are the flags of the election.
type Options struct {
	// LeaseNamespace has the Lease that the leader holds; the rest are its times.
	LeaseNamespace string
	LeaseDuration  time.Duration
	RenewDeadline  time.Duration
	RetryPeriod    time.Duration
}

// AddFlags adds the flags and sets the defaults; lease is the name of the Lease.
func (o *Options) AddFlags(fs *pflag.FlagSet, lease string) {
	fs.StringVar(&o.LeaseNamespace, "leader-election-namespace", "kube-system", "namespace of the Lease "+lease)
	fs.DurationVar(&o.LeaseDuration, "leader-election-lease-duration", 30*time.Second, "after this time without renewal another replica leads")
	fs.DurationVar(&o.RenewDeadline, "leader-election-renew-deadline", 20*time.Second, "the leader gives up when it can't renew for this time")
	fs.DurationVar(&o.RetryPeriod, "leader-election-retry-period", 5*time.Second, "pause between attempts to lead or to renew")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	errs := []error{program.Positive("--leader-election-retry-period", o.RetryPeriod)}
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

// Run waits for the caches and then calls run while this process leads. Losing the lease
// is an error.
func (o *Options) Run(ctx context.Context, cfg *rest.Config, lease string, health *observe.Health, synced []cache.DoneChecker, run func(context.Context) error) error {
	identity, err := newIdentity()
	if err != nil {
		return err
	}
	// A replica that can't read must not lead.
	if !waitForCaches(ctx, health, synced) {
		return nil
	}
	return leader.Run(ctx, cfg, leader.Election{
		Namespace: o.LeaseNamespace, Name: lease, Identity: identity,
		LeaseDuration: o.LeaseDuration, RenewDeadline: o.RenewDeadline, RetryPeriod: o.RetryPeriod,
	}, run)
}

// errNotSynced tells an admin where to look.
var errNotSynced = fmt.Errorf("caches are not filled after %s: is the API server reachable, and are the CRDs and the RBAC rules installed?", syncPatience)

// waitForCaches waits, and says why while it takes too long; false when ctx ended.
func waitForCaches(ctx context.Context, health *observe.Health, synced []cache.DoneChecker) bool {
	for {
		wait, cancel := context.WithTimeout(ctx, syncPatience)
		err := kube.WaitForSync(wait, synced...)
		cancel()
		switch {
		case ctx.Err() != nil:
			return false
		case err == nil:
			health.Set(Caches, nil)
			return true
		}
		health.Set(Caches, errNotSynced)
		klog.FromContext(ctx).Error(errNotSynced, "Not ready")
	}
}

// newIdentity names this process. The random part tells processes apart that have the
// same host name, and a restarted container from the one before.
func newIdentity() (string, error) {
	name := os.Getenv("COIL_POD_NAME")
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			return "", fmt.Errorf("find a name for this process, COIL_POD_NAME is not set: %w", err)
		}
	}
	return name + "_" + string(uuid.NewUUID()), nil
}

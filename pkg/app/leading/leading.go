// Package leading is the main program of Coil's controllers: it makes clients, metrics and health. All replicas
// fill their caches, and one of them works.
//
// It owns the flags that these programs have in common, and the condition of readiness. It must not know what
// the leader does.
package leading

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/generated/clientset/versioned"
	"github.com/coil-net/coil/pkg/app/program"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/leader"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/reconcile"
)

// caches is the condition of readiness: a standby is as ready as the leader.
const caches = "caches"

// syncPatience is how long the caches may take to fill before that is reported.
const syncPatience = 30 * time.Second

// Options are the flags that programs of controllers have in common.
type Options struct {
	// Kubeconfig is the path of a kubeconfig; empty means the pod's own account.
	Kubeconfig string
	Observe    observe.Options
	// Election has the namespace and the times of the Lease. Name and Identity are set by the program.
	Election leader.Election
}

// AddFlags adds the flags and sets the defaults; lease is the name of the Lease, and the addresses are those of metrics
// and health.
func (o *Options) AddFlags(fs *pflag.FlagSet, lease, metricsAddr, healthAddr string) {
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "path of a kubeconfig; needed only outside a cluster")
	fs.StringVar(&o.Observe.MetricsAddr, "metrics-addr", metricsAddr, "listen here for /metrics and /debug/pprof; empty: nowhere")
	fs.StringVar(&o.Observe.HealthAddr, "health-addr", healthAddr, "listen here for /healthz and /readyz; empty: nowhere")
	e := &o.Election
	fs.StringVar(&e.Namespace, "leader-election-namespace", "kube-system", "namespace of the Lease "+lease)
	fs.DurationVar(&e.LeaseDuration, "leader-election-lease-duration", 30*time.Second, "after this time without renewal another replica leads")
	fs.DurationVar(&e.RenewDeadline, "leader-election-renew-deadline", 20*time.Second, "the leader gives up when it can't renew for this time")
	fs.DurationVar(&e.RetryPeriod, "leader-election-retry-period", 5*time.Second, "pause between attempts to lead or to renew")
}

// Validate returns all problems joined.
func (o *Options) Validate() error {
	e := o.Election
	errs := []error{program.Positive("--leader-election-retry-period", e.RetryPeriod)}
	if e.Namespace == "" {
		errs = append(errs, errors.New("--leader-election-namespace is empty"))
	}
	// client-go wants room for one jittered retry (factor 1.2) before the deadline.
	if e.RenewDeadline <= e.RetryPeriod*12/10 || e.LeaseDuration <= e.RenewDeadline {
		errs = append(errs, fmt.Errorf("--leader-election-lease-duration %s, -renew-deadline %s and -retry-period %s must each be longer than the next, the deadline by more than a fifth",
			e.LeaseDuration, e.RenewDeadline, e.RetryPeriod))
	}
	return errors.Join(errs...)
}

// Program is a program of controllers.
type Program struct {
	Name string
	// Lease is the name of the Lease that the leader holds.
	Lease   string
	Options Options
	// Compose makes the controllers.
	Compose func(context.Context, Environment) (Controllers, error)
}

// Environment has the clients and the registry with which controllers are made.
type Environment struct {
	Clients kube.Clients
	// Core and Coil know all resources of Kubernetes and of Coil.
	Core     kubernetes.Interface
	Coil     versioned.Interface
	Recorder kube.Recorder
	Registry prometheus.Registerer
	Loops    *reconcile.Metrics
}

// Controllers are the controllers of a program, and their informers.
type Controllers struct {
	// Informers fill the caches, also while another replica leads; Synced is done when they are filled.
	Informers []Informers
	Synced    []cache.DoneChecker
	// Run is called while this process leads.
	Run func(context.Context) error
}

// Informers are one or more informers.
type Informers interface {
	// Start runs them until stop is closed.
	Start(stop <-chan struct{})
	// Shutdown waits until they have ended.
	Shutdown()
}

// Run runs the program against the API server of cfg until ctx ends. Losing the lease
// is an error.
func (p Program) Run(ctx context.Context, cfg *rest.Config) error {
	clients, err := kube.NewClients(cfg)
	if err != nil {
		return err
	}
	core, err := kubernetes.NewForConfig(kube.Protobuf(cfg))
	if err != nil {
		return fmt.Errorf("client of Kubernetes' resources: %w", err)
	}
	coil, err := versioned.NewForConfig(cfg)
	if err != nil {
		return fmt.Errorf("client of Coil's resources: %w", err)
	}
	registry, health := observe.NewRegistry(), observe.NewHealth(caches)
	group, ctx := errgroup.WithContext(ctx)
	recorder, flush, err := kube.RunRecorder(ctx, clients.Core, p.Name)
	if err != nil {
		return err
	}
	defer flush()
	group.Go(func() error { return observe.Serve(ctx, p.Options.Observe, registry, health) })
	group.Go(func() error {
		c, err := p.Compose(ctx, Environment{clients, core, coil, recorder, registry, reconcile.NewMetrics(registry)})
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		return p.lead(ctx, cfg, health, c)
	})
	return group.Wait()
}

// lead fills the caches, and runs the controllers while this process leads.
func (p Program) lead(ctx context.Context, cfg *rest.Config, health *observe.Health, c Controllers) error {
	identity, err := newIdentity()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	for _, i := range c.Informers {
		i.Start(ctx.Done())
		defer i.Shutdown()
	}
	defer cancel() // before it waits for the informers: a process that loses the lease ends
	// A replica that can't read must not lead.
	if !waitForCaches(ctx, health, c.Synced) {
		return nil
	}
	e := p.Options.Election
	e.Name, e.Identity = p.Lease, identity
	return leader.Run(ctx, cfg, e, c.Run)
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
			health.Set(caches, nil)
			return true
		}
		health.Set(caches, errNotSynced)
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

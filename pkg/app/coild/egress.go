package coild

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/kernel/module"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/assign"
	"github.com/coil-net/coil/pkg/node/egress"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/node/view"
	"github.com/coil-net/coil/pkg/store"
)

// egressHandlers tell the egress manager what has changed; nil when egress is off.
func (d *daemon) egressHandlers() *view.EgressHandlers {
	if !d.Egress {
		return nil
	}
	return &view.EgressHandlers{
		Pod:       func(n types.NamespacedName) { d.egress.PodChanged(n) },
		Egress:    func(n types.NamespacedName) { d.egress.EgressChanged(n) },
		Namespace: func(name string) { d.egress.NamespaceChanged(name) },
	}
}

// composeEgress builds what lets pods use Egresses.
func (d *daemon) composeEgress(ctx context.Context) {
	d.fou.dir = d.ModuleDir
	d.fou.gauge = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "coil_egress_fou_available",
		Help: "1 if the kernel can make the tunnels that Egresses need, else 0: then pods that ask for one aren't started.",
	})
	d.registry.MustRegister(d.fou.gauge)
	if err := d.loadFoU(ctx); err != nil {
		d.event(corev1.EventTypeWarning, "FoUUnavailable", "pods that ask for an Egress can't be started: %v", err)
	}
	kernel := clientnet.New(d.Protocol, clientnet.FoU{}, clientnet.Nft{}, d.network)
	d.egress = egress.New(egress.Config{
		Port: uint16(d.EgressPort), Protocol: d.Protocol, OriginatingOnly: d.OriginateOnly,
		RecordAll: !d.IPAM, Drift: egressDrift, Available: d.fou.available, Repaired: d.repairedEgress, Ask: kernel.Ask,
	}, d.view, kernel, d.store, d.recorder, d.metrics)
	d.registry.MustRegister(d.egress)
}

// egressDrift is how often a client's network namespace is compared with what it should have.
// Nobody tells of changes in there: to listen in a namespace would keep it, and so the pod's
// link, alive when the pod has ended.
const egressDrift = 10 * time.Second

// startEgress makes the egress manager know the pods of the node, and lets it work. The
// attachments must be in line.
func (d *daemon) startEgress(ctx context.Context, group *errgroup.Group) error {
	err := untilDone(ctx, func(ctx context.Context) (bool, error) {
		err := d.restoreEgress(ctx)
		if !d.IPAM {
			d.health.Set(condRecord, err)
			d.health.Set(condDisk, d.store.Writable(ctx))
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Reading which pods use Egresses failed, trying again")
		}
		return err == nil, nil
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return d.egress.Run(ctx) })
	group.Go(func() error { return d.egress.AskRouters(ctx) })
	for _, t := range []heal.Task{
		{Name: "egress-sweep", Every: d.SweepInterval, Run: d.egress.Sweep},
		{Name: "fou", Every: time.Minute, Run: func(ctx context.Context) error {
			if d.fou.available() == nil {
				return nil
			}
			_ = d.loadFoU(ctx) // it is logged once, and told to pods that need it
			return nil
		}},
	} {
		group.Go(func() error { return heal.Run(ctx, t) })
	}
	return nil
}

// netnsDir is where container runtimes bind the network namespaces of pods.
const netnsDir = "/run/netns"

func (d *daemon) restoreEgress(ctx context.Context) error {
	var pods []node.Sandbox
	lost := !d.IPAM && d.fresh
	if d.IPAM {
		all, err := d.store.List(ctx)
		if err != nil {
			return err
		}
		for _, a := range all {
			if a.State == store.Attached {
				pods = append(pods, assign.SandboxOf(a))
				lost = lost || a.Inode == 0 || a.Name == ""
			}
		}
	}
	if lost {
		addrs, err := d.view.PodsByAddress(ctx)
		if err != nil {
			return err
		}
		if pods, err = (egress.Adoption{Dir: netnsDir, Pods: addrs, Host: d.network}).Adopt(ctx, pods); err != nil {
			return err
		}
	}
	if err := d.egress.Restore(ctx, pods); err != nil || d.IPAM {
		return err
	}
	d.fresh = false
	return d.store.Rebuilt(ctx)
}

// repairedEgress counts what was restored in a client.
func (d *daemon) repairedEgress(ctx context.Context, out clientnet.Outcome) {
	for kind, r := range map[string]int{
		heal.EgressRule:    out.Rules.Added + out.Rules.Replaced + out.Rules.Deleted,
		heal.EgressRoute:   out.Routes.Added + out.Routes.Replaced + out.Routes.Deleted,
		heal.EgressTunnel:  out.Tunnels.Added + out.Tunnels.Replaced + out.Tunnels.Deleted,
		heal.EgressNexthop: out.Nexthops.Added + out.Nexthops.Replaced + out.Nexthops.Deleted,
		heal.EgressSetting: out.Others,
	} {
		d.repairs.Done(ctx, kind, r)
	}
}

// fou is whether the kernel can make tunnels.
type fou struct {
	dir   string
	gauge prometheus.Gauge
	why   atomic.Pointer[error] // it can't; nil if it can
}

// fouModules are what tunnels need. Nothing else loads the first two.
var fouModules = []string{"fou", "fou6", "ipip", "ip6_tunnel"}

// loadFoU loads the modules that tunnels need.
func (d *daemon) loadFoU(ctx context.Context) error {
	err := module.Load(d.fou.dir, fouModules...)
	if err == nil {
		d.fou.why.Store(nil)
		d.fou.gauge.Set(1)
		return nil
	}
	err = fmt.Errorf("the kernel has no FoU (--module-dir=%s): %w", d.fou.dir, err)
	if d.fou.why.Swap(&err) == nil {
		klog.FromContext(ctx).Error(err, "Pods that ask for an Egress can't be started")
	}
	d.fou.gauge.Set(0)
	return err
}

// available is nil when tunnels can be made, or says why not.
func (f *fou) available() error {
	if why := f.why.Load(); why != nil {
		return *why
	}
	return nil
}

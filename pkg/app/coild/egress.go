package coild

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/clientnet"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/module"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/assign"
	"github.com/coil-net/coil/pkg/node/egress"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/node/routerhealth"
	"github.com/coil-net/coil/pkg/node/view"
	"github.com/coil-net/coil/pkg/plan/inspection"
	"github.com/coil-net/coil/pkg/store"
)

// egresses is the part that lets pods use Egresses.
type egresses struct {
	*daemon
	alone bool // no part gives addresses
	// changed are called when an Egress or its routers may have changed, and podChanged with a pod of the node; they don't block.
	changed, podChanged []func(types.NamespacedName)
	// recorded, if there is one, is called when the record of the sandboxes has changed; it doesn't block.
	recorded func()
	cluster  *view.Egresses
	manager  *egress.Manager
	// health knows which routers answer the manager's clients.
	health *routerhealth.Checker
	fou    fou
}

func (e *egresses) part() part {
	const advice = "a program changes the network of pods that use an Egress: in their containers, or from beside, as service meshes do"
	kinds := map[string]string{}
	for kind := range repairs(clientnet.Outcome{}) {
		kinds[kind] = advice
	}
	return part{
		kinds: kinds, watch: e.watch, compose: e.compose, start: e.start,
		forget: func(ctx context.Context, id attachment.ID) error { return e.manager.Forget(ctx, id) },
		look: func(ctx context.Context, alloc store.Allocation, into *inspection.Attachment) {
			client, objects := e.manager.Look(ctx, alloc.ID)
			into.Client, into.Objects = client, append(into.Objects, objects...)
		},
	}
}

func (e *egresses) watch() {
	// The manager is there when the handlers are registered.
	e.cluster = view.WatchEgresses(&e.watches, e.clients, e.NodeName, e.namespaces, view.EgressHandlers{
		Pod: func(n types.NamespacedName) {
			e.manager.PodChanged(n)
			for _, told := range e.podChanged {
				told(n)
			}
		},
		Egress: func(n types.NamespacedName) {
			e.manager.EgressChanged(n)
			for _, told := range e.changed {
				told(n)
			}
		},
		Namespace: func(name string) { e.manager.NamespaceChanged(name) },
		Policies:  func(namespace string) { e.manager.PoliciesChanged(namespace) },
	})
}

func (e *egresses) compose(ctx context.Context) error {
	e.fou.dir = e.ModuleDir
	e.fou.gauge = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "coil_egress_fou_available",
		Help: "1 if the kernel can make the tunnels that Egresses need, else 0: then pods that ask for one aren't started.",
	})
	e.registry.MustRegister(e.fou.gauge)
	if err := e.fou.load(ctx); err != nil {
		e.warn("FoUUnavailable", "pods that ask for an Egress can't be started: %v", err)
	}
	kernel := clientnet.New(e.Protocol, clientnet.FoU{}, e.network)
	e.health = routerhealth.New(kernel, e.cluster, e.recorder)
	var record store.Clients = e.store
	if e.recorded != nil {
		record = toldClients{record, e.recorded}
	}
	e.manager = egress.New(egress.Config{
		Port: uint16(e.EgressPort), Protocol: e.Protocol, OriginatingOnly: e.OriginateOnly,
		RecordAll: e.alone, Drift: egressDrift, Available: e.fou.available, Repaired: e.repaired, Health: e.health,
	}, e.cluster, kernel, record, e.recorder, e.metrics)
	e.registry.MustRegister(e.manager, e.health)
	e.egress, e.noTunnels = e.manager, e.fou.available
	return nil
}

// egressDrift is how often a client's network namespace is compared with what it should have.
// The kernel tells only listeners in the namespace of changes there, and a listener would keep it, and so the pod's
// link, alive when the pod has ended.
const egressDrift = 10 * time.Second

// start gives the manager the pods of the node, and then runs it. The attachments are in line.
func (e *egresses) start(ctx context.Context, group *errgroup.Group) error {
	if err := e.untilInLine(ctx, e.alone, "Reading which pods use Egresses failed, trying again", e.restore); err != nil {
		return err
	}
	group.Go(func() error { return e.cluster.Run(ctx) })
	group.Go(func() error { return e.manager.Run(ctx) })
	group.Go(func() error { return e.health.Run(ctx, e.manager) })
	repeat(ctx, group,
		heal.Task{Name: "egress-sweep", Every: e.SweepInterval, Run: e.manager.Sweep},
		heal.Task{Name: "fou", Every: time.Minute, Run: func(ctx context.Context) error {
			if e.fou.available() != nil {
				_ = e.fou.load(ctx) // it is logged once, and told to pods that need it
			}
			return nil
		}},
	)
	return nil
}

// netnsDir is where container runtimes bind the network namespaces of pods.
const netnsDir = "/run/netns"

// restore makes the manager know the pods of the record, and looks for those of which that has lost something.
func (e *egresses) restore(ctx context.Context) error {
	var pods []node.Sandbox
	lost := e.alone && e.fresh
	if !e.alone {
		all, err := e.store.List(ctx)
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
		addrs, err := e.cluster.PodsByAddress(ctx)
		if err != nil {
			return err
		}
		if pods, err = (egress.Adoption{Dir: netnsDir, Pods: addrs, Host: e.network}).Adopt(ctx, pods); err != nil {
			return err
		}
	}
	if err := e.manager.Restore(ctx, pods); err != nil || !e.alone {
		return err
	}
	e.fresh = false
	return e.store.Rebuilt(ctx)
}

// repairs returns how many objects of each kind (label kind of coil_repairs_total) were restored in a client.
func repairs(out clientnet.Outcome) map[string]int {
	total := func(r dataplane.Result) int { return r.Added + r.Replaced + r.Deleted }
	return map[string]int{
		"egress_rule": total(out.Rules), "egress_route": total(out.Routes), "egress_tunnel": total(out.Tunnels),
		"egress_nexthop": total(out.Nexthops), "egress_setting": out.Others,
	}
}

// repaired counts the objects that were restored in a client.
func (e *egresses) repaired(ctx context.Context, out clientnet.Outcome) {
	for kind, n := range repairs(out) {
		e.repairs.Done(ctx, kind, n)
	}
}

// fou is whether the kernel can make tunnels.
type fou struct {
	dir   string
	gauge prometheus.Gauge
	why   atomic.Pointer[error] // it can't; nil if it can
}

// load loads the modules that tunnels need.
func (f *fou) load(ctx context.Context) error {
	err := module.Load(f.dir, fouModules...)
	if err == nil {
		f.why.Store(nil)
		f.gauge.Set(1)
		return nil
	}
	err = fmt.Errorf("the kernel has no FoU (--module-dir=%s): %w", f.dir, err)
	if f.why.Swap(&err) == nil {
		klog.FromContext(ctx).Error(err, "Pods that ask for an Egress can't be started")
	}
	f.gauge.Set(0)
	return err
}

// available is nil when tunnels can be made, or says why not.
func (f *fou) available() error {
	if why := f.why.Load(); why != nil {
		return *why
	}
	return nil
}

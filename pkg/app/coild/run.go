package coild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/delqueue"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/kube/servers"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/node/restore"
	"github.com/coil-net/coil/pkg/node/server"
	"github.com/coil-net/coil/pkg/node/view"
	"github.com/coil-net/coil/pkg/observe"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

// The conditions under which ADD is served.
const (
	condAPI    = "api"    // the Node and the caches were read
	condRecord = "record" // record, kernel and blocks are in line
	condNode   = "node"   // the Node exists
	condDisk   = "disk"   // the record can be written
	condConf   = "config" // the network configuration is in place; holds unless that fails at the start
)

// daemon is coild while it runs.
type daemon struct {
	Options
	clients kube.Clients
	// apiServers are those that clients reach; nil if a kubeconfig says how.
	apiServers *servers.Servers
	registry   *prometheus.Registry
	health     *observe.Health
	recorder   kube.Recorder

	fatal   func(error) // ends coild
	metrics *reconcile.Metrics
	repairs *reconcile.Repairs
	boot    string
	machine machine      // only for awaitNode, then for syncNode
	api     apiTime      // only for syncNode
	self    *corev1.Node // as it was read at the start; nil before
	store   *sqlite.Store
	fresh   bool
	// earlier is the UID of the Node that the record was kept for before, on this machine; empty if that is
	// the same Node.
	earlier  string
	network  *podnet.Network
	restorer *restore.Restorer
	conf     cniconf.Keeper

	parts []part
	// kinds are the kinds of objects that are repaired, with advice; see part.
	kinds map[string]string
	// assigner and egress serve the plugin's calls; each is nil without its part.
	assigner server.Assigner
	egress   server.Egress
	// noTunnels says why the kernel can't make tunnels; nil without the part of Egresses.
	noTunnels func() error

	watches    kube.Watches
	node       *view.Node
	namespaces *view.Namespaces
}

// run composes and runs coild until ctx ends.
func (o *Options) run(ctx context.Context) error {
	clients, apiServers, err := o.connect(ctx)
	if err != nil {
		return err
	}
	d := &daemon{
		Options: *o, clients: clients, apiServers: apiServers, registry: observe.NewRegistry(),
		health: observe.NewHealth(condAPI, condRecord, condNode, condDisk),
	}
	group, ctx := errgroup.WithContext(ctx)
	d.fatal = func(err error) { group.Go(func() error { return err }) } // of several errors the first one counts
	group.Go(func() error { return observe.Serve(ctx, d.Observe, d.registry, d.health) })
	group.Go(func() error { return d.runNode(ctx) })
	return group.Wait()
}

// connect returns the clients. In a pod they reach API servers also by addresses of their own; else own is nil.
func (o *Options) connect(ctx context.Context) (clients kube.Clients, own *servers.Servers, err error) {
	cfg, err := kube.Config(o.Kubeconfig, "coild")
	if err != nil {
		return kube.Clients{}, nil, err
	}
	if o.Kubeconfig == "" {
		if own, err = servers.Use(ctx, cfg, o.apiServersFile()); err != nil {
			return kube.Clients{}, nil, err
		}
	}
	clients, err = kube.NewClients(cfg)
	return clients, own, err
}

// runNode does everything but /metrics and health.
func (d *daemon) runNode(ctx context.Context) error {
	recorder, flush, err := kube.RunRecorder(ctx, d.clients.Core, "coild")
	if err != nil {
		return err
	}
	defer flush()
	d.recorder = recorder

	d.makeParts()
	changes := reconcile.New("node", func(ctx context.Context, _ struct{}) error { return d.syncNode(ctx) }, nil)
	d.node = view.WatchNode(&d.watches, d.clients, d.NodeName)
	d.node.OnChange(func() { changes.Add(struct{}{}) })
	d.namespaces = view.WatchNamespaces(&d.watches, d.clients)
	for _, p := range d.parts {
		if p.watch != nil {
			p.watch()
		}
	}
	if d.machine, err = readMachine(ctx, d.MachineIDFile); err != nil {
		return err
	}
	if d.self, err = d.awaitNode(ctx); err != nil {
		return err
	}

	ctx, stop := context.WithCancel(ctx)
	defer d.watches.Shutdown()
	defer stop()
	d.watches.Start(ctx) // the caches are filled while the record is opened
	group, ctx := errgroup.WithContext(ctx)
	if err := d.openStore(ctx); err != nil {
		return err
	}
	defer closing(ctx, d.store.Close)
	if d.network, err = podnet.New(d.networkOptions()); err != nil {
		return err
	}
	defer closing(ctx, d.network.Close)
	if err := d.compose(ctx); err != nil {
		return err
	}
	if err := d.watches.Register(); err != nil {
		return err
	}

	if d.apiServers != nil {
		group.Go(func() error { return d.apiServers.Run(ctx, d.clients.Discovery) })
	}
	for _, p := range d.parts {
		if p.run != nil {
			group.Go(func() error { return p.run(ctx) })
		}
	}
	srv := &server.Server{
		Ready: d.health.Ready, Started: d.health.Started(), Netns: node.InspectNetns,
		Assigner: d.assigner, PoolOf: d.namespaces.PoolOf, Egress: d.egress,
	}
	group.Go(func() error { return srv.Serve(ctx, d.Socket, d.registry) })
	group.Go(func() error { return d.serveDebug(ctx) })
	changes.Add(struct{}{}) // nothing tells of a Node that was deleted since it was read
	group.Go(func() error { return changes.Run(ctx, 1, d.watches.Synced()...) })
	group.Go(func() error { return d.start(ctx, group) })
	return group.Wait()
}

// awaitNode reads the node's own Node, again and again until there is one of this machine.
func (d *daemon) awaitNode(ctx context.Context) (*corev1.Node, error) {
	var n *corev1.Node
	err := untilDone(ctx, func(ctx context.Context) (bool, error) {
		var err error
		if n, err = d.node.Live(ctx); err != nil {
			d.health.Set(condAPI, err)
			if apierrors.IsNotFound(err) {
				// It was deleted while coild was away, or isn't made yet.
				err = errors.Join(err, d.withdraw(ctx, true))
			}
			klog.FromContext(ctx).Error(err, "Waiting for the API server")
			return false, nil
		}
		_, err = d.check(n)
		d.health.Set(condNode, err)
		if err != nil {
			klog.FromContext(ctx).Error(errors.Join(err, d.withdraw(ctx, true)), "Waiting for the Node")
		}
		return err == nil, nil
	})
	return n, err
}

// untilDone calls do until it says so, an error ends it, or ctx does. The pauses grow to
// ten seconds and never end it: wait.ExponentialBackoff gives up when they don't grow
// any more.
func untilDone(ctx context.Context, do wait.ConditionWithContextFunc) error {
	pauses := wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 100, Cap: 10 * time.Second}.DelayFunc()
	return pauses.Until(ctx, true, true, do)
}

// closing closes a resource of the daemon, and logs a failure.
func closing(ctx context.Context, do func() error) {
	if err := do(); err != nil {
		klog.FromContext(ctx).Error(err, "Closing")
	}
}

// compose builds the parts, and the values that they share.
func (d *daemon) compose(ctx context.Context) error {
	d.metrics = reconcile.NewMetrics(d.registry)
	d.repairs = reconcile.NewRepairs(d.registry, d.reportRepairs, slices.Collect(maps.Keys(d.kinds))...)
	d.restorer = &restore.Restorer{Store: d.store, Detach: d.Del, Queue: delqueue.New(d.delQueueDir()), Lives: d.lives}
	for _, p := range d.parts {
		if err := p.compose(ctx); err != nil {
			return err
		}
	}
	return nil
}

// lives says whether the network namespace that an attachment was made in is there, as far as that can be told.
func (d *daemon) lives(a store.Allocation) bool { return node.Lives(a, d.boot) }

// openStore opens the record, which may have to be made anew.
func (d *daemon) openStore(ctx context.Context) error {
	boot, err := os.ReadFile(d.BootIDFile)
	if err != nil {
		return fmt.Errorf("read the boot ID (--boot-id-file): %w", err)
	}
	d.boot = strings.TrimSpace(string(boot))
	if err := os.MkdirAll(d.StateDir, 0o700); err != nil {
		return fmt.Errorf("make --state-dir: %w", err)
	}
	machine := cmp.Or(d.self.Status.NodeInfo.MachineID, d.machine.id) // a Node that was made by hand names none
	s, res, err := sqlite.Open(ctx, sqlite.Options{
		Path:     d.database(),
		Identity: store.Identity{NodeName: d.NodeName, NodeUID: string(d.self.UID), MachineID: machine},
		BootID:   d.boot,
		CoolDown: d.CoolDown,
	})
	if err != nil {
		return fmt.Errorf("open the record of addresses: %w", err)
	}
	d.store, d.fresh, d.earlier = s, res.Fresh, res.EarlierNode
	if res.SetAside != "" {
		klog.FromContext(ctx).Info("The record of addresses was set aside and is rebuilt", "file", res.SetAside, "reason", res.Reason)
		d.warn("DatabaseRebuilt", "the record of addresses was set aside as %s: %s", res.SetAside, res.Reason)
	}
	return nil
}

// startGCPercent is the growth of the heap, in percent of the live heap, after which garbage is collected while coild
// starts (runtime/debug.SetGCPercent). Afterwards it is as before: 100, or GOGC of the environment.
const startGCPercent = 400

// start brings everything in line, then lets ADD be served and goes on with upkeep.
func (d *daemon) start(ctx context.Context, group *errgroup.Group) error {
	// Messages and rows that are read at the start are soon garbage, and the live heap is small: collecting whenever
	// it has doubled takes a sixth of the start.
	defer debug.SetGCPercent(debug.SetGCPercent(startGCPercent))
	if err := kube.WaitForSync(ctx, d.watches.Synced()...); err != nil {
		return err
	}
	d.health.Set(condAPI, nil)
	for _, p := range d.parts {
		if p.start == nil {
			continue
		}
		if err := p.start(ctx, group); err != nil {
			return err
		}
	}
	repeat(ctx, group, d.recordUpkeep()...)
	if d.CNIConfName != "" {
		d.startConf(ctx, group)
	}
	return nil
}

// repeat runs tasks again and again until ctx ends.
func repeat(ctx context.Context, group *errgroup.Group, tasks ...heal.Task) {
	for _, t := range tasks {
		group.Go(func() error { return heal.Run(ctx, t) })
	}
}

// untilInLine calls do until it succeeds, and logs failed with each error. If the part keeps the record, coild isn't
// ready before that.
func (d *daemon) untilInLine(ctx context.Context, keepsRecord bool, failed string, do func(context.Context) error) error {
	return untilDone(ctx, func(ctx context.Context) (bool, error) {
		err := do(ctx)
		if keepsRecord {
			d.health.Set(condRecord, err)
			d.health.Set(condDisk, d.store.Writable(ctx))
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, failed)
		}
		return err == nil, nil
	})
}

// startConf puts the network configuration in place and lets it be restored from then on.
// To end would not help if it can't be put there: a container that is started again runs no
// installer.
func (d *daemon) startConf(ctx context.Context, group *errgroup.Group) {
	d.conf = cniconf.Keeper{Dir: d.CNIConfDir, Name: d.CNIConfName}
	if err := d.activateConf(ctx); err != nil {
		d.health.Set(condConf, err)
		klog.FromContext(ctx).Error(err, "Not ready, trying again")
	}
	repeat(ctx, group, heal.Task{Name: "cni-conf", Every: 4 * time.Second, Run: d.activateConf})
}

// activateConf puts the network configuration in place, again if it was removed. An error
// after the first success leaves coild ready: the runtime may use the configuration that is in place.
func (d *daemon) activateConf(ctx context.Context) error {
	changed, err := d.conf.Activate()
	if errors.Is(err, cniconf.ErrNotStaged) {
		err = fmt.Errorf("%w: delete the pod of coild on this node, so that coil-installer runs again", err)
	}
	if err != nil {
		return fmt.Errorf("put the network configuration in place: %w", err)
	}
	if changed {
		klog.FromContext(ctx).Info("Put the network configuration in place", "file", filepath.Join(d.CNIConfDir, d.CNIConfName))
	}
	d.health.Set(condConf, nil)
	return nil
}

// recordUpkeep are the tasks about the record that repeat while coild runs. Short periods are multiples
// of four seconds: see package heal.
func (d *daemon) recordUpkeep() []heal.Task {
	return []heal.Task{
		{Name: "del-queue", Every: 4 * time.Second, Run: func(ctx context.Context) error {
			_, err := d.restorer.Replay(ctx)
			return err
		}},
		{Name: "disk", Every: 4 * time.Second, Run: func(ctx context.Context) error {
			err := d.store.Writable(ctx)
			d.health.Set(condDisk, err)
			if errors.Is(err, sqlite.ErrDamaged) {
				d.fatal(fmt.Errorf("starting anew to make the record again: %w", err))
			}
			return nil
		}},
		{Name: "checkpoint", Every: sqlite.CheckpointInterval, Run: d.store.Checkpoint},
	}
}

// syncNode withdraws the node's blocks while its Node is gone, or another machine's. A Node that was
// made again under the same name is another node: coild starts anew.
func (d *daemon) syncNode(ctx context.Context) error {
	n, err := d.node.Live(ctx)
	gone := apierrors.IsNotFound(err)
	if err != nil && !gone {
		return err
	}
	var left time.Duration
	switch {
	case gone && slices.ContainsFunc(d.parts, func(p part) bool { return p.withdraw != nil }):
		err = fmt.Errorf("the Node %s was deleted: %w", d.NodeName, node.ErrWithdrawn)
	case gone:
		err = fmt.Errorf("the Node %s was deleted", d.NodeName)
	case n.UID != d.self.UID:
		d.fatal(fmt.Errorf("the Node %s was deleted and made again: starting anew to adopt its blocks", d.NodeName))
		return nil
	default:
		left, err = d.check(n)
	}
	d.health.Set(condNode, err)
	if err := d.withdraw(ctx, err != nil); err != nil {
		return err
	}
	if !gone {
		if err := d.api.check(n); err != nil {
			d.fatal(err)
			return nil
		}
	}
	if left > 0 {
		return reconcile.Later(left)
	}
	return reconcile.Later(timeCheck + rand.N(timeCheck/10))
}

// warn records a warning about the node's own Node.
func (d *daemon) warn(reason, format string, args ...any) {
	d.warnOf(d.self.UID, reason, format, args...)
}

// warnOf is warn for a Node of which it isn't known yet that it is this node's.
func (d *daemon) warnOf(uid types.UID, reason, format string, args ...any) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: d.NodeName, UID: uid}
	d.recorder.Eventf(ref, nil, corev1.EventTypeWarning, reason, reason, format, args...)
}

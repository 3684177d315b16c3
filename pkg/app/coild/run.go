package coild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	listers "github.com/coil-net/coil/generated/listers/coil/v2"
	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/cniconf"
	"github.com/coil-net/coil/pkg/delqueue"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node"
	"github.com/coil-net/coil/pkg/node/assign"
	"github.com/coil-net/coil/pkg/node/blocks"
	"github.com/coil-net/coil/pkg/node/egress"
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
	clients  kube.Clients
	registry *prometheus.Registry
	health   *observe.Health
	recorder kube.Recorder

	fatal   func(error) // ends coild
	metrics *reconcile.Metrics
	repairs *reconcile.Repairs
	boot    string
	machine machine // only for awaitNode, then for syncNode
	api     apiTime // only for syncNode
	node    types.UID
	created metav1.Time // the Node
	view    *view.View
	store   *sqlite.Store
	fresh   bool
	// earlier is the UID of the Node that the record was kept for before, on this machine; empty if that is
	// the same Node.
	earlier  string
	network  *podnet.Network
	exports  *exports
	blocks   *blocks.Manager
	lister   listers.AddressBlockLister
	assign   *assign.Assigner
	restorer *restore.Restorer
	pods     *reconcile.Loop[struct{}] // rules, routes and links of all pods
	routes   *reconcile.Loop[struct{}] // of all blocks
	own      seen[ipam.Address]        // the node's addresses; only for nodeChanged
	guard    guard
	egress   *egress.Manager
	fou      fou
	conf     cniconf.Keeper
}

// run composes and runs coild until ctx ends.
func (o *Options) run(ctx context.Context) error {
	cfg, err := kube.Config(o.Kubeconfig, "coild")
	if err != nil {
		return err
	}
	d := &daemon{Options: *o, registry: observe.NewRegistry(), health: observe.NewHealth(condAPI, condRecord, condNode, condDisk)}
	if d.clients, err = kube.NewClients(cfg); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	ended := make(chan error, 1)
	d.fatal = func(err error) {
		select {
		case ended <- err:
		default: // the first reason counts
		}
	}
	group.Go(func() error {
		select {
		case err := <-ended:
			return err
		case <-ctx.Done():
			return nil
		}
	})
	group.Go(func() error { return observe.Serve(ctx, d.Observe, d.registry, d.health) })
	group.Go(func() error { return d.runNode(ctx) })
	return group.Wait()
}

// runNode does everything but /metrics and health.
func (d *daemon) runNode(ctx context.Context) error {
	recorder, flush, err := kube.RunRecorder(ctx, d.clients.Core, "coild")
	if err != nil {
		return err
	}
	defer flush()
	d.recorder = recorder

	changes := reconcile.New("node", func(ctx context.Context, _ struct{}) error { return d.syncNode(ctx) })
	d.view, err = view.New(view.Config{
		NodeName: d.NodeName, Pools: d.IPAM, Egresses: d.egressHandlers(),
		OnNode:      func() { changes.Add(struct{}{}); d.nodeChanged() },
		OnUnguarded: func() { d.pods.Add(struct{}{}) },
	}, d.clients)
	if err != nil {
		return err
	}
	if d.machine, err = readMachine(ctx, d.MachineIDFile); err != nil {
		return err
	}
	self, err := d.awaitNode(ctx)
	if err != nil {
		return err
	}
	d.node, d.created = self.UID, self.CreationTimestamp

	group, ctx := errgroup.WithContext(ctx)
	closeAll, err := d.compose(ctx, self)
	defer closeAll()
	if err != nil {
		return err
	}
	d.view.Start(ctx)
	defer d.view.Shutdown()

	// Typed as interfaces so that they are nil without what they are for.
	var assigner server.Assigner
	if d.IPAM {
		assigner = d.assign
		group.Go(func() error { return d.assign.Run(ctx) })
	}
	var egresses server.Egress
	if d.Egress {
		egresses = d.egress
	}
	srv := server.New(server.Config{IPAM: d.IPAM, Ready: d.health.Ready, Netns: inspectNetns}, assigner, d.view, egresses)
	group.Go(func() error { return srv.Serve(ctx, d.Socket, d.registry) })
	changes.Add(struct{}{}) // nothing tells of a Node that was deleted since it was read
	group.Go(func() error { return changes.Run(ctx, 1, d.view.Synced()...) })
	group.Go(func() error { return d.start(ctx, group) })
	return group.Wait()
}

// awaitNode reads the node's own Node, again and again until there is one of this machine.
func (d *daemon) awaitNode(ctx context.Context) (*corev1.Node, error) {
	var n *corev1.Node
	err := untilDone(ctx, func(ctx context.Context) (bool, error) {
		var err error
		if n, err = d.view.LiveNode(ctx); err != nil {
			d.health.Set(condAPI, err)
			if apierrors.IsNotFound(err) {
				// It was deleted while coild was away, or isn't made yet.
				err = errors.Join(err, d.withdraw(ctx))
			}
			klog.FromContext(ctx).Error(err, "Waiting for the API server")
			return false, nil
		}
		_, err = d.checkMachine(n)
		d.health.Set(condNode, err)
		if err != nil {
			klog.FromContext(ctx).Error(errors.Join(err, d.withdraw(ctx)), "Waiting for the Node")
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

// compose builds the parts that are asked for. The returned function closes them.
func (d *daemon) compose(ctx context.Context, self *corev1.Node) (func(), error) {
	closers := []func() error{}
	closeAll := func() {
		for _, c := range slices.Backward(closers) {
			if err := c(); err != nil {
				klog.FromContext(ctx).Error(err, "Closing")
			}
		}
	}
	if err := d.openStore(ctx, self); err != nil {
		return closeAll, err
	}
	closers = append(closers, d.store.Close)
	d.metrics = reconcile.NewMetrics(d.registry)
	d.repairs = reconcile.NewRepairs(d.registry, d.reportRepairs, heal.Kinds()...)
	if err := d.composeNetwork(ctx, &closers); err != nil {
		return closeAll, err
	}
	d.restorer = &restore.Restorer{Store: d.store, Detacher: detacher{d}, Queue: delqueue.New(d.delQueueDir()), Lives: d.lives}
	if d.IPAM {
		if err := d.composeIPAM(ctx, &closers); err != nil {
			return closeAll, err
		}
	}
	if d.Egress {
		d.composeEgress(ctx)
	}
	return closeAll, nil
}

// composeNetwork builds what works in the host's namespace.
func (d *daemon) composeNetwork(ctx context.Context, closers *[]func() error) (err error) {
	if d.network, err = podnet.New(d.networkOptions()); err != nil {
		return err
	}
	*closers = append(*closers, d.network.Close)
	d.composeGuard(ctx)
	return nil
}

// composeIPAM builds what gives addresses.
func (d *daemon) composeIPAM(ctx context.Context, closers *[]func() error) error {
	d.registry.MustRegister(blocks.NewCollector(ctx, d.store))
	d.composeHealing()
	exporter, err := d.newExporter(d.network.Handle())
	if err != nil {
		return err
	}
	d.exports = &exports{exporter, d.repairs}

	mine := labels.Set{v2.LabelNode: d.NodeName}.String()
	held, err := kube.AddressBlockInformer(d.clients.Coil, mine)
	if err != nil {
		return err
	}
	requests, err := kube.BlockRequestInformer(d.clients.Coil, mine)
	if err != nil {
		return err
	}
	d.lister = listers.NewAddressBlockLister(held.GetIndexer())
	d.blocks, err = blocks.New(blocks.Config{
		NodeName: d.NodeName, NodeUID: d.node, NodeCreated: d.created, MinAge: d.BlockMinAge, StatusInterval: 30 * time.Second,
		Uses: d.uses,
		Warn: d.warn,
	}, d.clients.Coil, held, requests, d.store, d.exports, d.metrics)
	if err != nil {
		return err
	}
	d.registry.MustRegister(blocks.NewMissing(d.blocks))
	for _, i := range []*kube.Informer{held, requests} {
		i.Start(ctx.Done())
		*closers = append(*closers, func() error { i.Shutdown(); return nil })
	}

	d.assign = assign.New(assign.Config{
		BlockTimeout: d.BlockTimeout, UndoTimeout: 10 * time.Second, Suspicion: d.SweepInterval, NodeAddrs: d.view.NodeAddrs,
		Unguarded: d.view.Unguarded, Lives: d.lives, Warn: d.warn,
	}, d.store, d.blocks, d.network)
	d.restorer.Links = d.network
	return nil
}

// openStore opens the record, which may have to be made anew.
func (d *daemon) openStore(ctx context.Context, self *corev1.Node) error {
	boot, err := os.ReadFile(d.BootIDFile)
	if err != nil {
		return fmt.Errorf("read the boot ID (--boot-id-file): %w", err)
	}
	d.boot = strings.TrimSpace(string(boot))
	if err := os.MkdirAll(d.StateDir, 0o700); err != nil {
		return fmt.Errorf("make --state-dir: %w", err)
	}
	machine := cmp.Or(self.Status.NodeInfo.MachineID, d.machine.id) // a Node that was made by hand names none
	s, res, err := sqlite.Open(ctx, sqlite.Options{
		Path:     d.database(),
		Identity: store.Identity{NodeName: d.NodeName, NodeUID: string(self.UID), MachineID: machine},
		BootID:   d.boot,
		CoolDown: d.CoolDown,
	})
	if err != nil {
		return fmt.Errorf("open the record of addresses: %w", err)
	}
	d.store, d.fresh, d.earlier = s, res.Fresh, res.EarlierNode
	if res.SetAside != "" {
		klog.FromContext(ctx).Info("The record of addresses was set aside and is rebuilt", "file", res.SetAside, "reason", res.Reason)
		d.event(corev1.EventTypeWarning, "DatabaseRebuilt", "the record of addresses was set aside as %s: %s", res.SetAside, res.Reason)
	}
	return nil
}

// inspectNetns opens a network namespace by path and tells its inode.
func inspectNetns(path string) (store.Netns, error) {
	ns, err := netns.Open(path)
	if err != nil {
		return store.Netns{}, err
	}
	defer ns.Close()
	return store.Netns{Path: path, Inode: ns.Inode()}, nil
}

// startGCPercent is the growth of the heap, in percent of the live heap, after which garbage is collected while coild
// starts (runtime/debug.SetGCPercent). Afterwards it is what it was: 100, or GOGC of the environment.
const startGCPercent = 400

// start brings everything in line, then lets ADD be served and goes on with upkeep.
func (d *daemon) start(ctx context.Context, group *errgroup.Group) error {
	// Messages and rows that are read at the start are soon garbage, and the live heap is small: collecting whenever
	// it has doubled takes a sixth of the start.
	defer debug.SetGCPercent(debug.SetGCPercent(startGCPercent))
	// The record is read while the caches are filled. restore reads it again after an error.
	recorded, _ := d.store.List(ctx)
	if err := kube.WaitForSync(ctx, d.view.Synced()...); err != nil {
		return err
	}
	d.health.Set(condAPI, nil)
	if d.IPAM {
		if err := d.heal(ctx, group); err != nil {
			return err
		}
		if err := d.restore(ctx, recorded); err != nil {
			return err
		}
		group.Go(func() error { return d.blocks.Run(ctx) })
		group.Go(func() error { return d.pods.Run(ctx, 1) })
		group.Go(func() error { return d.routes.Run(ctx, 1) })
		for _, t := range d.upkeep() {
			group.Go(func() error { return heal.Run(ctx, t) })
		}
	}
	d.watchGuard(ctx, group)
	if d.Egress {
		if err := d.startEgress(ctx, group); err != nil {
			return err
		}
	}
	for _, t := range d.recordUpkeep() {
		group.Go(func() error { return heal.Run(ctx, t) })
	}
	if d.CNIConfName != "" {
		d.startConf(ctx, group)
	}
	return nil
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
	group.Go(func() error {
		return heal.Run(ctx, heal.Task{Name: "cni-conf", Every: 4 * time.Second, Run: d.activateConf})
	})
}

// activateConf puts the network configuration in place, again if it was removed. An error
// after the first success doesn't make coild not ready: the runtime may use what is in place.
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

// restore brings record, kernel and blocks in line, again until it succeeds. The record had the allocations of
// recorded a moment ago.
func (d *daemon) restore(ctx context.Context, recorded []store.Allocation) error {
	if err := kube.WaitForSync(ctx, d.blocks.Synced()...); err != nil {
		return err
	}
	return untilDone(ctx, func(ctx context.Context) (bool, error) {
		err := d.restoreOnce(ctx, recorded)
		recorded = nil
		d.health.Set(condRecord, err)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Bringing record, kernel and blocks in line failed, trying again")
		}
		return err == nil, nil
	})
}

// syncNode withdraws the node's blocks while its Node is gone, or another machine's. A Node that was
// made again under the same name is another node: coild starts anew.
func (d *daemon) syncNode(ctx context.Context) error {
	n, err := d.view.LiveNode(ctx)
	gone := apierrors.IsNotFound(err)
	if err != nil && !gone {
		return err
	}
	var left time.Duration
	switch {
	case gone && d.IPAM:
		err = fmt.Errorf("the Node %s was deleted: %w", d.NodeName, node.ErrWithdrawn)
	case gone:
		err = fmt.Errorf("the Node %s was deleted", d.NodeName)
	case d.node != "" && n.UID != d.node:
		d.fatal(fmt.Errorf("the Node %s was deleted and made again: starting anew to adopt its blocks", d.NodeName))
		return nil
	default:
		left, err = d.checkMachine(n)
	}
	d.health.Set(condNode, err)
	if d.IPAM {
		if err := d.blocks.Withdraw(ctx, err != nil); err != nil {
			return err
		}
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
	d.event(corev1.EventTypeWarning, reason, format, args...)
}

// event records an Event about the node's own Node.
func (d *daemon) event(kind, reason, format string, args ...any) {
	d.eventOf(d.node, kind, reason, format, args...)
}

// eventOf is event for a Node of which it isn't known yet that it is this node's.
func (d *daemon) eventOf(uid types.UID, kind, reason, format string, args ...any) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: d.NodeName, UID: uid}
	d.recorder.Eventf(ref, nil, kind, reason, reason, format, args...)
}

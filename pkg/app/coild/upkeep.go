package coild

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kernel/netns"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/node/blocks"
	"github.com/coil-net/coil/pkg/node/export"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/store"
	"github.com/coil-net/coil/pkg/store/sqlite"
)

// drift is how often everything is compared with the kernel though nothing was told.
const drift = 2 * time.Minute

// again is what a loop does that compares everything with the kernel: do, once more after drift.
func again(do func(context.Context) error) func(context.Context, struct{}) error {
	return func(ctx context.Context, _ struct{}) error {
		if err := do(ctx); err != nil {
			return err
		}
		return reconcile.Later(later())
	}
}

// composeHealing builds the loops that repair.
func (d *daemon) composeHealing() {
	measured := reconcile.WithMetrics(d.metrics)
	d.pods = reconcile.New("pod-routes", again(thrifty(func(ctx context.Context) error { return d.syncPods(ctx, true) })), measured)
	d.routes = reconcile.New("block-routes", again(func(ctx context.Context) error { return d.blocks.Export(ctx) }), measured)
}

// thrifty gives back the memory that do took to read all pods, and what pods that came and
// went before it left: Go would keep it in reserve, and the node has better use for it. To look
// for it takes time, too, so that it has to be worth while.
func thrifty(do func(context.Context) error) func(context.Context) error {
	const worth = 1 << 20 // bytes
	return func(ctx context.Context) error {
		err := do(ctx)
		heap := []metrics.Sample{
			{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"}, {Name: "/gc/heap/live:bytes"},
		}
		metrics.Read(heap)
		if heap[0].Value.Uint64()+heap[1].Value.Uint64() > heap[2].Value.Uint64()+worth {
			debug.FreeOSMemory()
		}
		return err
	}
}

// heal begins to watch for what others do to coild's objects. What happens before the loops
// run waits for them.
func (d *daemon) heal(ctx context.Context, group *errgroup.Group) error {
	handle := d.network.Handle()
	loopback, err := handle.IndexByName("lo")
	if err != nil {
		return fmt.Errorf("look up lo: %w", err)
	}
	changes, err := handle.Subscribe(rtnl.Interest{
		Protocol: d.Protocol, Tables: []int{d.PodTable, d.ExportTable, dataplane.TableUnassigned}, Learned: true, Rules: true, Links: true,
	})
	if err != nil {
		return err
	}
	wake := func(loop *reconcile.Loop[struct{}], kinds ...string) func() {
		return func() { loop.AddAfter(struct{}{}, d.repairs.Wait(kinds...)) }
	}
	watch := heal.Watch{
		Source: changes, Links: d.network, PodTable: d.PodTable, Loopback: loopback, NodeAddrs: d.view.NodeAddrs, Saw: d.repairs.Saw,
		Pods:   wake(d.pods, heal.PodRoute, heal.Rule, heal.Link, heal.LinkAddress, heal.Sysctl),
		Blocks: wake(d.routes, heal.BlockRoute, heal.UnreachableRoute),
	}
	group.Go(func() error { return errors.Join(watch.Run(ctx), changes.Close()) })
	// Before, all is in line, and after, the kernel tells what isn't.
	d.pods.AddAfter(struct{}{}, later())
	d.routes.AddAfter(struct{}{}, later())
	return nil
}

// later is how long to wait for the next comparison, so that not all nodes do it at once.
func later() time.Duration { return drift + rand.N(drift/10) }

// nodeChanged gives the pods' routes the node's addresses as source when these are others
// now. It is called by one goroutine.
func (d *daemon) nodeChanged() {
	if d.own.changed(d.view.NodeAddrs()) && d.IPAM {
		d.pods.Add(struct{}{})
	}
}

// seen is what something was the last time.
type seen[T comparable] struct {
	value T
	known bool
}

// changed says whether it is another now; the first time it isn't.
func (s *seen[T]) changed(now T) bool {
	before := *s
	*s = seen[T]{now, true}
	return before.known && before.value != now
}

// reportRepairs tells the admin what is destroyed again and again.
func (d *daemon) reportRepairs(_ context.Context, kind, message string) {
	d.event(corev1.EventTypeWarning, "RepeatedlyDestroyed", "another program destroys what coild needs (%s): %s. %s", kind, message, heal.Advice(kind))
}

func (d *daemon) newExporter(h *rtnl.Handle) (*export.Exporter, error) {
	lo, err := h.IndexByName("lo")
	if err != nil {
		return nil, fmt.Errorf("look up lo: %w", err)
	}
	tables := routes.ExportTables{
		Export: d.ExportTable, Unassigned: dataplane.TableUnassigned, Protocol: d.Protocol, Loopback: lo,
	}
	return export.New(tables, route.New(h, d.Protocol, tables.Export), route.New(h, d.Protocol, tables.Unassigned)), nil
}

// withdraw stops announcing anything when the Node doesn't exist at the start.
func (d *daemon) withdraw(ctx context.Context) error {
	if !d.IPAM {
		return nil
	}
	h, err := rtnl.New(nil)
	if err != nil {
		return err
	}
	defer h.Close()
	exporter, err := d.newExporter(h)
	if err != nil {
		return err
	}
	_, err = exporter.Export(ctx, nil)
	return err
}

// exports counts what is repaired of the routes of blocks.
type exports struct {
	*export.Exporter
	repairs *reconcile.Repairs
}

// Export implements blocks.Exporter.
func (e *exports) Export(ctx context.Context, held []routes.HeldBlock) error {
	repaired, err := e.Exporter.Export(ctx, held)
	e.repairs.Done(ctx, heal.BlockRoute, repaired.Export)
	e.repairs.Done(ctx, heal.UnreachableRoute, repaired.Unassigned)
	return err
}

// remember makes the exporter expect what the record says that there was. Without addresses
// of this boot, the kernel hasn't had anything yet.
func (d *daemon) remember(all []store.Allocation, usage []store.Usage) (served bool) {
	for _, a := range all {
		served = served || a.BootID == d.boot && a.State == store.Attached
	}
	if d.fresh || !served {
		return false
	}
	var held []routes.HeldBlock
	for _, u := range usage {
		b, err := d.lister.Get(u.Name)
		reserved := err == nil && b.Labels[v2.LabelReserved] == v2.ReservedValue
		held = append(held, routes.HeldBlock{Name: u.Name, Block: u.Block.Block, Reserved: reserved})
	}
	d.exports.Remember(held)
	return true
}

// restoreOnce brings record, kernel and blocks in line. The record had the allocations of all a moment ago; it is read
// if all is nil. A DEL since then is repeated, and finds nothing to do.
func (d *daemon) restoreOnce(ctx context.Context, all []store.Allocation) error {
	if all == nil {
		var err error
		if all, err = d.store.List(ctx); err != nil {
			return err
		}
	}
	usage, err := d.store.Usage(ctx)
	if err != nil {
		return err
	}
	served := d.remember(all, usage)
	// Links that lost their marks are found again only after that. No ADD is served yet, which
	// could have made one since.
	recorded := func(context.Context) ([]podnet.Wired, error) { return d.wiredOf(all), nil }
	if err := d.mendNode(ctx, served, recorded); err != nil {
		return err
	}
	held, err := d.blocks.ClaimAll(ctx, blocks.Past{Usage: usage, Fresh: d.fresh, Earlier: d.earlier})
	if err != nil {
		return err
	}
	rep, err := d.restorer.Restore(ctx, d.fresh, held)
	if err != nil {
		return err
	}
	faultpoint.At(faultpoint.RestoreInLine)
	if err := d.store.Rebuilt(ctx); err != nil {
		return err
	}
	d.fresh = false
	klog.FromContext(ctx).Info("Record, kernel and blocks are in line", "blocks", len(held), "kept", rep.Kept,
		"adopted", rep.Adopted, "takenDown", rep.TakenDown, "unfinished", rep.Unfinished, "outdated", rep.Outdated, "replayed", rep.Replayed)
	if err := d.report(ctx, rep); err != nil {
		return err
	}
	d.health.Set(condDisk, d.store.Writable(ctx))
	if rep.Adopted > 0 {
		d.pods.Add(struct{}{}) // their links haven't been looked at
	}
	if err := errors.Join(d.syncRoutes(ctx, served), d.blocks.Export(ctx)); err != nil {
		return err
	}
	// A node whose kernel can't have the rule is still a node.
	if err := d.syncGuard(ctx, served); err != nil {
		klog.FromContext(ctx).Error(err, "Pods are served without the source guard")
	}
	return nil
}

// uses says whether a pod of this machine has an address of a block, as the kernel has it.
func (d *daemon) uses(ctx context.Context, b *v2.AddressBlock) (bool, error) {
	rec, damaged := blocks.Recorded(b)
	if damaged != nil {
		return false, nil // no pod has an address of it
	}
	found, err := d.network.List(ctx)
	return slices.ContainsFunc(found, func(f podnet.Found) bool {
		return slices.ContainsFunc(f.Addresses, func(a netip.Addr) bool { return rec.IPv4.Contains(a) || rec.IPv6.Contains(a) })
	}), err
}

// forward makes the node forward packets. What had to be done is a repair unless it is the
// first time.
func (d *daemon) forward(ctx context.Context, repair bool) error {
	changed, err := d.network.Forward(ctx)
	if changed && repair {
		d.repairs.Done(ctx, heal.Sysctl, 1)
	}
	return err
}

// mendNode makes the rules, the host's parameters and the host's ends of all pods' links what
// they should be; want returns the pods.
func (d *daemon) mendNode(ctx context.Context, repair bool, want func(context.Context) ([]podnet.Wired, error)) error {
	forwardErr := d.forward(ctx, repair)
	mtu, changed, mtuErr := d.network.DetectMTU(ctx, d.view.NodeAddrs())
	if changed {
		klog.FromContext(ctx).Info("The MTU of pods follows that of the node's uplinks", "mtu", mtu)
	}
	rules, ruleErr := d.network.Rules(ctx)
	mended, linkErr := d.network.MendLinks(ctx, want)
	if repair {
		d.repairs.Done(ctx, heal.Rule, rules.Added)
		d.repairs.Done(ctx, heal.Link, mended.Links)
		d.repairs.Done(ctx, heal.LinkAddress, mended.Addresses)
		d.repairs.Done(ctx, heal.Sysctl, mended.Parameters+mended.Learned)
	}
	return errors.Join(forwardErr, mtuErr, ruleErr, linkErr)
}

// syncPods makes rules, links and routes of all pods what they should be. A pod's routes come
// with the pod, so that those which are added here were lost.
func (d *daemon) syncPods(ctx context.Context, repair bool) error {
	return errors.Join(d.mendNode(ctx, repair, d.wired), d.syncRoutes(ctx, repair))
}

// syncRoutes makes the routes of all pods what they should be.
func (d *daemon) syncRoutes(ctx context.Context, repair bool) error {
	res, err := d.network.Sync(ctx, d.wired)
	if repair {
		d.repairs.Done(ctx, heal.PodRoute, res.Added)
	}
	if res.Changed() {
		klog.FromContext(ctx).Info("Routes of pods changed", "added", res.Added, "replaced", res.Replaced, "deleted", res.Deleted)
	}
	return err
}

// wired returns the pods that have routes, or may have them in a moment.
func (d *daemon) wired(ctx context.Context) ([]podnet.Wired, error) {
	all, err := d.store.List(ctx)
	if err != nil {
		return nil, err
	}
	return d.wiredOf(all), nil
}

// lives says whether the network namespace that an attachment was made in is there. One that can't be
// looked at may be.
func (d *daemon) lives(a store.Allocation) bool {
	if a.Netns.Inode == 0 || a.BootID != d.boot {
		return false
	}
	now, err := inspectNetns(a.Netns.Path)
	if err != nil {
		return !errors.Is(err, netns.ErrNotExist) && !errors.Is(err, netns.ErrNotNetns)
	}
	return now == a.Netns
}

// wiredOf returns those of the attachments that have routes, or may have them in a moment.
func (d *daemon) wiredOf(all []store.Allocation) []podnet.Wired {
	var pods []podnet.Wired
	for _, a := range all {
		if d.assign.Linkless(a) {
			continue
		}
		if a.State == store.Attached || a.State == store.Pending {
			pods = append(pods, d.assign.WiredOf(a))
		}
	}
	return pods
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
		{Name: "checkpoint", Every: sqlite.CheckpointInterval, Run: func(ctx context.Context) error {
			_, err := d.store.Checkpoint(ctx)
			return err
		}},
	}
}

// detacher does DEL.
type detacher struct{ *daemon }

// Del implements restore.Detacher.
func (d detacher) Del(ctx context.Context, id attachment.ID) error {
	if d.IPAM {
		if err := d.assign.Del(ctx, id); err != nil {
			return err
		}
	}
	if d.Egress {
		return d.egress.Forget(ctx, id)
	}
	return nil
}

// upkeep are the tasks about addresses that repeat while coild runs.
func (d *daemon) upkeep() []heal.Task {
	return []heal.Task{
		{Name: "sweep", Every: d.SweepInterval, Run: thrifty(d.assign.Sweep)},
	}
}

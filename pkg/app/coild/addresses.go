package coild

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/attachment"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/kernel/route"
	"github.com/coil-net/coil/pkg/kernel/rtnl"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node/announce"
	"github.com/coil-net/coil/pkg/node/assign"
	"github.com/coil-net/coil/pkg/node/blocks"
	"github.com/coil-net/coil/pkg/node/export"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/node/pods"
	"github.com/coil-net/coil/pkg/plan/routes"
	"github.com/coil-net/coil/pkg/podnet"
	"github.com/coil-net/coil/pkg/reconcile"
	"github.com/coil-net/coil/pkg/reconcile/upkeep"
	"github.com/coil-net/coil/pkg/store"
)

// kernelSettle is the time between two reactions to changes of the kernel. The first change of a burst is handled at
// once, the others together.
const kernelSettle = 200 * time.Millisecond

// addresses is the part that gives addresses to pods, and links with them.
type addresses struct {
	*daemon
	guard      *guard
	announcer  *announcer
	held       *kube.Informer // the node's AddressBlocks
	requests   *kube.Informer // its BlockRequests
	exporter   *export.Exporter
	blocks     *blocks.Manager
	assign     *assign.Assigner
	pods       *pods.Keeper
	podLoop    *upkeep.Loop
	exportLoop *upkeep.Loop
	// attached are called when a pod was added or is about to go; they don't block.
	attached []func()
	// rivals tells of other hosts that have pods' addresses. told is when it did, by address.
	rivals *reconcile.Loop[rivalKey]
	told   map[netip.Addr]time.Time
}

func (a *addresses) part() part {
	kinds := maps.Clone(pods.Kinds)
	maps.Copy(kinds, export.Kinds)
	return part{
		kinds: kinds, watch: a.watch, compose: a.compose, start: a.start, check: a.checkMachine, withdraw: a.withdraw,
		look: a.look, lookAtHost: a.lookAtHost,
		run:    func(ctx context.Context) error { return a.assign.Run(ctx) },
		forget: func(ctx context.Context, id attachment.ID) error { return a.assign.Del(ctx, id) },
	}
}

func (a *addresses) watch() {
	mine := labels.Set{v2.LabelNode: a.NodeName}.String()
	a.held, a.requests = kube.AddressBlockInformer(a.clients.Coil, mine), kube.BlockRequestInformer(a.clients.Coil, mine)
	a.watches.Add(a.held, nil) // blocks.New has its handlers
	a.watches.Add(a.requests, nil)
}

func (a *addresses) compose(ctx context.Context) error {
	a.registry.MustRegister(blocks.NewCollector(ctx, a.store))
	var err error
	if a.exporter, err = a.newExporter(a.network.Handle()); err != nil {
		return err
	}
	a.blocks, err = blocks.New(blocks.Config{
		NodeName: a.NodeName, NodeUID: a.self.UID, NodeCreated: a.self.CreationTimestamp, MinAge: a.BlockMinAge, StatusInterval: 30 * time.Second,
		Uses: a.uses,
		Warn: a.warn, AnnouncedChanged: a.announcer.loop.Changed,
	}, a.clients.Coil, a.held, a.requests, a.store, a.exporter, a.metrics)
	if err != nil {
		return err
	}
	a.registry.MustRegister(blocks.NewMissing(a.blocks))
	a.assign = assign.New(assign.Config{
		BlockTimeout: a.BlockTimeout, UndoTimeout: 10 * time.Second, Suspicion: a.SweepInterval, NodeAddrs: a.node.Addrs,
		Unguarded: a.namespaces.Unguarded, Lives: a.lives, Warn: a.warn,
	}, a.store, a.blocks, a.network, links{a})
	a.announcer.sources = append(a.announcer.sources, a.announced)
	a.announcer.rivals = append(a.announcer.rivals, a.rival)
	a.rivals, a.told = reconcile.New("rivals", a.tellRival, a.metrics), map[netip.Addr]time.Time{}
	a.assigner = a.assign
	a.pods = &pods.Keeper{
		Network: a.network, Links: a.network, Wired: a.assign.Wired, PodTable: a.PodTable, NodeAddrs: a.node.Addrs, Repairs: a.repairs,
	}
	a.podLoop = a.upkeep(upkeep.Config{Name: "pod-routes", Sync: pods.Thrifty(a.pods.Sync), InLine: true}, pods.Kinds, a.pods.Lost)
	a.exportLoop = a.upkeep(upkeep.Config{Name: "block-routes", Sync: a.blocks.Export, InLine: true}, export.Kinds, a.exporter.Lost)
	a.namespaces.OnUnguarded(a.podLoop.Changed)
	a.node.OnChange(func() {
		if a.pods.Moved() {
			a.podLoop.Changed()
		}
	})
	a.composeRestorer()
	return nil
}

// composeRestorer connects the restorer with the part's pods, blocks and guard.
func (a *addresses) composeRestorer() {
	r := a.restorer
	r.Links, r.Pods, r.WiredOf, r.BootID, r.Fresh = a.network, a.pods, a.assign.WiredOf, a.boot, a.fresh
	r.Remember = func(usage []store.Usage) { a.exporter.Remember(a.blocks.Exported(usage)) }
	r.Claim = func(ctx context.Context, usage []store.Usage, fresh bool) ([]store.Block, error) {
		return a.blocks.ClaimAll(ctx, blocks.Past{Usage: usage, Fresh: fresh, Earlier: a.earlier})
	}
	r.Export, r.Adopted, r.Guard, r.Warn = a.blocks.Export, a.podLoop.Changed, a.guard.sync, a.warn
}

// start brings record, kernel and blocks in line, again until it succeeds, and then starts the loops. It subscribes to
// changes of the kernel before: a change meanwhile waits until the loops run.
func (a *addresses) start(ctx context.Context, group *errgroup.Group) error {
	changes, err := a.network.Handle().Subscribe(rtnl.Interest{
		Protocol: a.Protocol, Tables: []int{a.PodTable, a.ExportTable, dataplane.TableUnassigned}, Learned: true, Rules: true, Links: true,
	})
	if err != nil {
		return err
	}
	group.Go(func() error {
		return errors.Join(upkeep.Watch(ctx, changes, kernelSettle, a.podLoop, a.exportLoop, a.announcer.loop), changes.Close())
	})
	if err := kube.WaitForSync(ctx, a.blocks.Synced()...); err != nil {
		return err
	}
	recorded := a.store.Opened()
	err = a.untilInLine(ctx, true, "Bringing record, kernel and blocks in line failed, trying again", func(ctx context.Context) error {
		defer func() { recorded = nil }()
		return a.restorer.InLine(ctx, recorded)
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return a.blocks.Run(ctx) })
	group.Go(func() error { return a.podLoop.Run(ctx) })
	group.Go(func() error { return a.exportLoop.Run(ctx) })
	group.Go(func() error { return a.rivals.Run(ctx, 1) })
	a.announcer.begin(ctx, group)
	repeat(ctx, group, heal.Task{Name: "sweep", Every: a.SweepInterval, Run: pods.Thrifty(a.assign.Sweep)})
	return nil
}

func (a *addresses) newExporter(h *rtnl.Handle) (*export.Exporter, error) {
	lo, err := h.IndexByName("lo")
	if err != nil {
		return nil, fmt.Errorf("look up lo: %w", err)
	}
	tables := routes.ExportTables{
		Export: a.ExportTable, Unassigned: dataplane.TableUnassigned, Protocol: a.Protocol, Loopback: lo,
	}
	return export.New(tables, route.New(h, a.Protocol, tables.Export), route.New(h, a.Protocol, tables.Unassigned), a.repairs), nil
}

// withdraw stops announcing the node's blocks, or begins again. Before it is known which these are, nothing is announced
// when the Node doesn't exist at the start.
func (a *addresses) withdraw(ctx context.Context, withdrawn bool) error {
	if a.blocks != nil {
		return a.blocks.Withdraw(ctx, withdrawn)
	}
	h, err := rtnl.New(nil)
	if err != nil {
		return err
	}
	defer h.Close()
	exporter, err := a.newExporter(h)
	if err != nil {
		return err
	}
	return exporter.Export(ctx, nil)
}

// links announces the pods' addresses of blocks whose labels say so; see package assign.
type links struct{ *addresses }

func (l links) Changed(block string) {
	l.changed()
	if is, _ := l.blocks.Announced(block); is {
		l.announcer.loop.Changed()
	}
}

func (l links) changed() {
	for _, told := range l.attached {
		told()
	}
}

func (l links) Withdraw(ctx context.Context, addrs ...netip.Addr) error {
	l.changed()
	return l.announcer.keeper.Withdraw(ctx, addrs...)
}

// onAttached implements attachments.
func (a *addresses) onAttached(changed func()) { a.attached = append(a.attached, changed) }

// attachedPods implements attachments.
func (a *addresses) attachedPods(ctx context.Context) (pods map[types.UID]place.Pod, unknown map[types.UID]error, err error) {
	all, err := a.store.List(ctx)
	if err != nil {
		return nil, nil, err
	}
	pods = map[types.UID]place.Pod{}
	for _, alloc := range all {
		if alloc.State == store.Attached && alloc.Pod.UID != "" && !a.assign.Linkless(alloc) {
			pods[types.UID(alloc.Pod.UID)] = place.Pod{Link: alloc.HostIfIndex, Address: alloc.Address, Netns: alloc.Netns}
		}
	}
	return pods, nil, nil
}

// announced are the addresses of pods that are made known on links. Those of a block that doesn't exist any more stay as they are: pods
// have them all the same.
func (a *addresses) announced(ctx context.Context) ([]announce.Address, error) {
	all, err := a.store.List(ctx)
	if err != nil {
		return nil, err
	}
	var addrs []announce.Address
	for _, alloc := range all {
		is, known := a.blocks.Announced(alloc.Block)
		if alloc.State != store.Attached || a.assign.Linkless(alloc) || known && !is {
			continue
		}
		for _, addr := range alloc.Address.Addrs() {
			addrs = append(addrs, announce.Address{Addr: addr, Pool: alloc.Pool, Uncertain: !known})
		}
	}
	return addrs, nil
}

// uses says whether a pod of this machine has an address of a block, as the kernel has it.
func (a *addresses) uses(ctx context.Context, b *v2.AddressBlock) (bool, error) {
	if _, damaged := blocks.Recorded(b); damaged != nil {
		return false, nil // and has no addresses
	}
	found, err := a.network.List(ctx)
	return slices.ContainsFunc(found, func(f podnet.Found) bool { return blocks.Has(b, f.Addresses...) }), err
}

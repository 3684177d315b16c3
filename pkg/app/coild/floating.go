package coild

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/holding"
	"github.com/coil-net/coil/pkg/kernel/nft"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/node/announce"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/forwarding"
	"github.com/coil-net/coil/pkg/node/floating/handover"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/node/floating/spread"
	"github.com/coil-net/coil/pkg/node/floating/standby"
	"github.com/coil-net/coil/pkg/node/heal"
	"github.com/coil-net/coil/pkg/peers"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/keys"
	"github.com/coil-net/coil/pkg/reconcile"
)

// holder is the part that holds floating addresses for routers of Egresses on the node. It is composed after the parts that it has.
type holder struct {
	*daemon
	attached  attachments
	egresses  *egresses
	announcer *announcer

	blocks kube.Cache[v2.AddressBlock] // the floating ones of the cluster
	secret kube.Cache[corev1.Secret]
	tables place.Tables
	place  *place.Place
	// spread has the node answer for addresses that several nodes announce.
	spread *spread.Spread
	// prober finds out whether the node forwards packets, by its table.
	prober     *forwarding.Prober
	probeTable *nft.Table
	peers      *peers.Peers
	driver     *floating.Driver
	// handover copies connections to the next holder, or from the one before, and standby to the node that takes addresses if this one fails.
	handover *handover.Handover
	standby  *standby.Standby
	// recount reads which pods there are.
	recount *reconcile.Loop[struct{}]
	// troubles tells what is wrong with addresses, probes looks for some of that.
	troubles *floating.Troubles
	probes   *reconcile.Loop[struct{}]
	// proxied finds out whether packets to addresses of Services are translated. Those of unproxied, by their IDs, aren't. Only probes uses them.
	proxied   forwarding.Proxied
	unproxied map[string]bool
	// inStep tells how far connections of addresses are copied, by the names of their blocks.
	inStep *reconcile.Loop[string]

	mu        sync.Mutex
	pods      map[types.UID]place.Pod // nil before it is known
	unknown   map[types.UID]error     // pods of which it isn't
	announced map[string]floating.Address
	idOf      map[netip.Addr]string // of those
	rivals    map[string]rival
}

// attachments are the node's pods, as the part knows them that attaches them, or another plugin.
type attachments interface {
	// attachedPods returns the pods to which addresses may lead, and those of which that isn't known now, by their UIDs.
	attachedPods(context.Context) (pods map[types.UID]place.Pod, unknown map[types.UID]error, err error)
	// onAttached has a function called when others may be returned; it doesn't block.
	onAttached(func())
}

func (h *holder) part() part {
	return part{kinds: place.Kinds, watch: h.watch, compose: h.compose, start: h.start, look: h.look, lookAtAddress: h.lookAtAddress}
}

func (h *holder) watch() {
	blocks, secret := kube.FloatingBlockInformer(h.clients.Coil), kube.SecretInformer(h.clients.Core, keys.Namespace, keys.Name)
	h.blocks, h.secret = kube.CacheOf[v2.AddressBlock](blocks), kube.CacheOf[corev1.Secret](secret)
	// The driver is there when the handlers are registered.
	h.watches.Add(blocks, reconcile.Changes(func(before, after *v2.AddressBlock) {
		h.driver.Changed(before, after)
		h.spread.Changed(before, after)
		h.standby.Changed(before, after)
		if after != nil {
			h.troubles.Changed(after)
			if blocked := func(b *v2.AddressBlock) bool { return slices.Contains(plan.ForwardingBlockedAt(b), h.NodeName) }; blocked(after) && (before == nil || !blocked(before)) {
				h.probes.Add(struct{}{}) // an earlier life has told so
			}
		}
		if before != nil && after != nil && before.Labels[v2.LabelAnnounce] != after.Labels[v2.LabelAnnounce] {
			h.announcer.loop.Changed()
		}
		for _, b := range []*v2.AddressBlock{before, after} {
			if b != nil && b.Floating != nil && (before == nil || after == nil || plan.RouterWith(before) != plan.RouterWith(after) || plan.Settled(before) != plan.Settled(after)) {
				h.egresses.manager.EgressChanged(types.NamespacedName{Namespace: b.Floating.Owner.Namespace, Name: b.Floating.Owner.Name})
			}
		}
	}))
	h.watches.Add(secret, nil)
	h.egresses.cluster.Floating(h.blocks)
	h.egresses.changed = append(h.egresses.changed, func(types.NamespacedName) {
		if !h.IPAM {
			h.recount.Add(struct{}{}) // which pods are routers
		}
		h.driver.TargetsChanged()
	})
}

func (h *holder) compose(ctx context.Context) error {
	var err error
	if h.tables, err = place.OpenTables(nil); err != nil {
		return err
	}
	lo, err := h.network.Handle().IndexByName("lo")
	if err != nil {
		return err
	}
	h.place, err = place.New(ctx, place.Config{
		Handle: h.network.Handle(), Tables: h.tables, PodTable: h.PodTable, ExportTable: h.ExportTable, Loopback: lo, Pod: h.pod, Announcer: h,
		Tracked: !h.FloatingNotrack, Repaired: h.repairs.Done,
	})
	if err != nil {
		return err
	}
	h.registry.MustRegister(place.NewTraffic(ctx, h.tables))
	if h.probeTable, err = nft.New(nil, dataplane.NftTableProbes); err != nil {
		return err
	}
	h.prober = forwarding.New(forwarding.Config{Handle: h.network.Handle(), Table: h.probeTable, Pod: h.pod, Tracked: !h.FloatingNotrack}, h.registry)
	if err := h.prober.Clear(ctx); err != nil {
		return err
	}
	h.peers = peers.New(peers.Config{
		Node: h.NodeName, Port: h.FloatingPort, Addrs: func() []netip.Addr { return h.node.Addrs().Addrs() }, Keys: h.keys,
		Receive: func(from string, m holding.Message) { h.driver.Receive(from, m) },
		Accept:  func(ctx context.Context, from string, conn net.Conn) { h.handover.Accept(ctx, from, conn) },
	}, h.registry)
	h.composeCopies(ctx)
	h.node.OnChange(h.peers.Moved)
	h.spread = spread.New(spread.Config{Node: h.NodeName, Place: h.place, Block: h.blocks.Find, Serves: h.node.Balances, Begun: func() { h.probes.Add(struct{}{}) }}, h.metrics, h.registry)
	h.node.OnChange(h.balances())
	h.driver = floating.New(floating.Config{
		Node: h.NodeName, Blocks: h.clients.Coil.AddressBlocks(), Place: h.spread, Targets: h, Messages: h.peers, Mover: h.handover,
	}, h.registry)
	h.announced, h.idOf = map[string]floating.Address{}, map[netip.Addr]string{}
	h.composeTroubles()
	h.announcer.sources = append(h.announcer.sources, h.announcedAddresses)
	h.recount = reconcile.New("floating-pods", func(ctx context.Context, _ struct{}) error {
		return errors.Join(h.readPods(ctx), h.unknownPods())
	}, h.metrics)
	h.attached.onAttached(func() { h.recount.Add(struct{}{}) })
	return nil
}

// balances returns a function that looks whether addresses of Services may be on the node when the Node has changed.
func (h *holder) balances() func() {
	var mu sync.Mutex
	was := false
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if now := h.node.Balances(); now != was {
			was = now
			h.spread.Look(h.blocks.All())
		}
	}
}

// leaveTime is how long the end of coild waits for other nodes to take the addresses, and their connections.
const leaveTime = 3 * time.Second

// checkPlaces is how often the objects of the kernel are compared with what they should be.
const checkPlaces = 4 * time.Second

// start holds addresses from then on. The attachments are in line.
func (h *holder) start(ctx context.Context, group *errgroup.Group) error {
	if err := h.untilInLine(ctx, false, "Reading which pods may have floating addresses failed, trying again", h.readPods); err != nil {
		return err
	}
	if h.unknownPods() != nil { // they don't hold up the others
		h.recount.Add(struct{}{})
	}
	h.handover.Start(h.blocks.All())
	h.spread.Start(h.blocks.All())
	// The driver works on until addresses are given up.
	held, end := context.WithCancel(context.WithoutCancel(ctx))
	group.Go(func() error { return h.peers.Run(held) })
	group.Go(func() error {
		defer h.tables.Close()
		defer h.place.Wait()
		defer h.handover.Finish()
		defer h.standby.Finish()
		return h.driver.Run(held)
	})
	group.Go(func() error {
		defer end()
		<-ctx.Done()
		leaving, cancel := context.WithTimeout(held, leaveTime)
		defer cancel()
		h.driver.Leave(leaving)
		return nil
	})
	group.Go(func() error { return h.recount.Run(ctx, 1) })
	group.Go(func() error { return h.spread.Run(ctx) })
	group.Go(func() error { return h.troubles.Run(ctx) })
	group.Go(func() error {
		defer h.probeTable.Close()
		return h.probes.Run(ctx, 1)
	})
	group.Go(func() error { return h.inStep.Run(ctx, 1) })
	repeat(ctx, group, heal.Task{Name: "floating", Every: checkPlaces, Run: func(ctx context.Context) error {
		if !h.place.Used() {
			return nil
		}
		return h.place.Sync(ctx)
	}})
	return nil
}

func (h *holder) keys() [][]byte { return keys.Of(h.secret.Find(keys.Namespace + "/" + keys.Name)) }

// readPods reads which pods are on the node, and how they are reached.
func (h *holder) readPods(ctx context.Context) error {
	pods, unknown, err := h.attached.attachedPods(ctx)
	if err != nil {
		return err
	}
	h.mu.Lock()
	same := h.pods != nil && maps.Equal(h.pods, pods) && maps.EqualFunc(h.unknown, unknown, func(error, error) bool { return true })
	h.pods, h.unknown = pods, unknown
	h.mu.Unlock()
	if !same {
		h.standby.PodsChanged()
		h.driver.TargetsChanged()
	}
	return nil
}

// unknownPods says of which pods it isn't known how they are reached, and why.
func (h *holder) unknownPods() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, uid := range slices.Sorted(maps.Keys(h.unknown)) {
		errs = append(errs, h.unknown[uid])
	}
	return errors.Join(errs...)
}

func (h *holder) pod(uid types.UID) (place.Pod, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p, ok := h.pods[uid]
	return p, ok
}

// Here implements floating.Targets.
func (h *holder) Here(pod types.UID) bool {
	_, ok := h.pod(pod)
	return ok
}

// Ready implements floating.Targets: a router takes packets if it is on the node, and its Service says so.
func (h *holder) Ready(a floating.Address) (ready, known bool) {
	h.mu.Lock()
	_, here := h.pods[a.Pod]
	known = h.pods != nil && (here || h.unknown[a.Pod] == nil)
	h.mu.Unlock()
	return here && h.egresses.cluster.RouterServes(a.Pod), known
}

// Announce implements place.Announcer.
func (h *holder) Announce(ctx context.Context, a floating.Address) error {
	if h.known(a) {
		h.defend(ctx, a)
	} else {
		h.probes.Add(struct{}{})
	}
	h.announcer.loop.Changed()
	return nil
}

// Withdraw implements place.Announcer.
func (h *holder) Withdraw(ctx context.Context, a floating.Address) error {
	h.forget(a)
	return h.announcer.keeper.Withdraw(ctx, a.Addrs()...)
}

// announcedAddresses are those that the node has, of pools whose addresses are made known on links.
func (h *holder) announcedAddresses(context.Context) (all []announce.Address, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.announced {
		if b := h.blocks.Find(a.Block); b == nil || b.Labels[v2.LabelAnnounce] != string(v2.AnnounceNeighbor) {
			continue
		}
		for _, addr := range a.Addrs() {
			all = append(all, announce.Address{Addr: addr, Pool: a.Pool})
		}
	}
	return all, nil
}

package coild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/node/announce"
	"github.com/coil-net/coil/pkg/node/floating"
	"github.com/coil-net/coil/pkg/node/floating/forwarding"
	"github.com/coil-net/coil/pkg/node/floating/place"
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// probePlaces is how often it is looked whether the node forwards packets of the addresses that it has, or that it was found to drop.
	probePlaces = 10 * time.Second
	// defended is for how long an announcement after a rival's is taken for an answer to it.
	defended = 3 * time.Second
)

// rival is a host that says that an address is at it, and when it said so last.
type rival struct {
	announce.Rival
	at time.Time
}

// text tells people of a rival.
func (r rival) text() string {
	return fmt.Sprintf("the host with the MAC address %s on the link %s says that %s is at it: if it isn't an attacker, take the address off that host, "+
		"or spec.subnets of AddressPool %s out of its way", r.MAC, r.Link, r.Addr, r.Pool)
}

// composeTroubles builds what tells of trouble with floating addresses.
func (h *holder) composeTroubles() {
	h.troubles = floating.NewTroubles(floating.TroublesConfig{
		Node: h.NodeName, Blocks: h.clients.Coil.AddressBlocks(), Block: h.blocks.Find, All: h.blocks.All, Warn: h.warnOfBlock,
	}, h.metrics)
	h.registry.MustRegister(h.troubles)
	h.rivals, h.unproxied = map[string]rival{}, map[string]bool{}
	h.announcer.rivals = append(h.announcer.rivals, h.rival)
	h.probes = reconcile.New("floating-probes", func(ctx context.Context, _ struct{}) error { return h.probe(ctx) }, h.metrics)
}

func (h *holder) warnOfBlock(b *v2.AddressBlock, reason, message string) {
	ref := &corev1.ObjectReference{APIVersion: v2.GroupVersion.String(), Kind: "AddressBlock", Name: b.Name, UID: b.UID}
	h.recorder.Eventf(ref, nil, corev1.EventTypeWarning, reason, reason, "%s: node %s: %s", blockAddrs(b), h.NodeName, message)
}

// blockAddrs are the addresses of a block of one, as people write them.
func blockAddrs(b *v2.AddressBlock) string {
	var all []string
	for _, text := range []*string{b.IPv4, b.IPv6} {
		if text != nil {
			addr, _, _ := strings.Cut(*text, "/")
			all = append(all, addr)
		}
	}
	return strings.Join(all, ", ")
}

// rival takes what another host says about a floating address. The driver finds out whether the node still has the address, and
// announces it then.
func (h *holder) rival(r announce.Rival) bool {
	h.mu.Lock()
	id, ok := h.idOf[r.Addr]
	if ok {
		h.rivals[id] = rival{r, time.Now()}
	}
	h.mu.Unlock()
	if ok {
		h.driver.Disputed(id)
	}
	return ok
}

// defend makes an address known that was known before, and says against whom.
func (h *holder) defend(ctx context.Context, a floating.Address) {
	h.mu.Lock()
	r, ok := h.rivals[a.ID]
	delete(h.rivals, a.ID)
	h.mu.Unlock()
	h.announcer.keeper.Repeat(ctx, a.Addrs()...)
	if ok && time.Since(r.at) < defended {
		h.troubles.Conflicting(a, r.text())
	}
}

// probed are addresses that share their fate, since rules of others name pools and links: those of one pool whose packets come from one pod, and
// that are all here, or all at other nodes.
type probed struct {
	pod  types.UID
	pool string
	here bool
}

// probe looks whether the node forwards packets of the addresses that it has. A node that doesn't leaves them to others, and goes on looking.
func (h *holder) probe(ctx context.Context) error {
	blocked := h.troubles.Blocked()
	groups, services := h.probed(blocked), h.ofServices()
	if len(groups)+len(blocked)+len(services)+len(h.unproxied) == 0 {
		return nil
	}
	// One address of each group is probed.
	var firsts []floating.Address
	of := map[string]probed{}
	for g, addrs := range groups {
		slices.SortFunc(addrs, func(a, b floating.Address) int { return cmp.Compare(a.Block, b.Block) })
		firsts = append(firsts, addrs[0])
		of[addrs[0].ID] = g
	}
	slices.SortFunc(firsts, func(a, b floating.Address) int { return cmp.Compare(a.Block, b.Block) })
	fates, err := h.prober.Probe(ctx, firsts, func(ctx context.Context, a floating.Address) error { return h.letProbe(ctx, of[a.ID], a) })
	errs := []error{err, h.lookWhetherProxied(ctx, services, blocked)}
	for i, fate := range fates {
		if fate.Err != nil {
			errs = append(errs, fmt.Errorf("probe whether packets of %s are forwarded: %w", firsts[i].Address, fate.Err))
			continue
		}
		h.judge(groups[of[firsts[i].ID]], fate)
	}
	return cmp.Or(errors.Join(errs...), reconcile.Later(probePlaces))
}

// letProbe lets the pod of an address that is at another node send probes, and nothing else.
func (h *holder) letProbe(ctx context.Context, g probed, a floating.Address) error {
	if pod, ok := h.pod(g.pod); ok && !g.here {
		return h.network.LetProbe(ctx, pod.Link, a.Addrs()...)
	}
	return nil
}

// probed returns the addresses that the node has, and those whose packets it was found to drop, if a router of their Egress is on the node.
func (h *holder) probed(blocked []floating.Address) map[probed][]floating.Address {
	h.mu.Lock()
	here := maps.Clone(h.announced)
	h.mu.Unlock()
	groups := map[probed][]floating.Address{}
	add := func(a floating.Address, here bool) {
		g := probed{a.Pod, a.Pool, here}
		groups[g] = append(groups[g], a)
	}
	for _, a := range here {
		if !a.OfServices { // no pod sends from it
			add(a, true)
		}
	}
	for _, a := range blocked {
		if _, is := here[a.ID]; is {
			continue
		}
		if a.Pod = h.routerHere(a); a.Pod != "" {
			add(a, false)
		}
	}
	return groups
}

// ofServices returns the addresses of Services that the node has, or announces beside the node that has them.
func (h *holder) ofServices() []floating.Address {
	beside := h.spread.Addresses()
	h.mu.Lock()
	defer h.mu.Unlock()
	all := map[string]floating.Address{}
	for _, a := range beside {
		all[a.ID] = a
	}
	for _, a := range h.announced {
		if a.OfServices {
			all[a.ID] = a
		}
	}
	return slices.Collect(maps.Values(all))
}

// lookWhetherProxied finds out whether packets to addresses of Services are translated. here are the addresses for which the node answers, and blocked those whose blocks say
// that packets are dropped here. An address that isn't blocked any more is forgotten.
func (h *holder) lookWhetherProxied(ctx context.Context, here, blocked []floating.Address) error {
	for id := range h.unproxied {
		if !slices.ContainsFunc(blocked, func(a floating.Address) bool { return a.ID == id }) {
			h.driver.Blocked(id, false)
			delete(h.unproxied, id)
		}
	}
	counts := map[netip.Addr]place.Count{}
	if len(here) > 0 {
		all, err := h.tables.Counts(ctx)
		if err != nil {
			return err
		}
		for _, a := range here {
			for _, addr := range a.Addrs() {
				counts[addr] = all[addr]
			}
		}
	}
	proxied := h.proxied.Look(counts)
	for _, a := range here {
		good, bad := false, false
		for _, addr := range a.Addrs() {
			is, known := proxied[addr]
			good, bad = good || known && is, bad || known && !is
		}
		switch {
		case bad:
			h.unproxied[a.ID] = true
			h.driver.Blocked(a.ID, true)
			h.troubles.Dropped(a, unproxiedText)
		case good:
			delete(h.unproxied, a.ID)
			h.driver.Blocked(a.ID, false)
			h.troubles.Passed(a)
		}
	}
	return nil
}

const unproxiedText = "no Service proxy of the node, such as kube-proxy, translates what clients send to the address: see whether one runs there, and whether it serves the Service " +
	"(label service.kubernetes.io/service-proxy-name)"

// routerHere returns a router of the node from which an address may be probed: the one to which its packets would go, or another one of its
// Egress; empty if there is none.
func (h *holder) routerHere(a floating.Address) types.UID {
	if _, ok := h.pod(a.Pod); ok {
		return a.Pod
	}
	b := h.blocks.Find(a.Block)
	if b == nil || b.Floating == nil || !a.OfEgress {
		return ""
	}
	for _, r := range h.egresses.cluster.Routers(types.NamespacedName{Namespace: b.Floating.Owner.Namespace, Name: b.Floating.Owner.Name}) {
		if _, ok := h.pod(r.Pod); ok {
			return r.Pod
		}
	}
	return ""
}

// judge tells whether packets of addresses are dropped, as far as that is known.
func (h *holder) judge(addrs []floating.Address, fate forwarding.Fate) {
	if len(fate.Dropped) > 0 {
		message := h.blockedText(fate.Dropped[0].String())
		for _, a := range addrs {
			h.driver.Blocked(a.ID, true)
			h.troubles.Dropped(a, message)
		}
	} else if fate.Passed {
		for _, a := range addrs {
			h.driver.Blocked(a.ID, false)
			h.troubles.Passed(a)
		}
	}
}

func (h *holder) blockedText(family string) string {
	text := fmt.Sprintf("rules of another program drop %s packets that the pod of the address sends and the node should forward, or give them another source: let "+
		"them accept packets from and to the pool's subnets as they are", family)
	if chains, err := h.tables.Dropping(); err == nil && len(chains) > 0 {
		return fmt.Sprintf("%s. Chains with policy drop are %s (nft list ruleset)", text, strings.Join(chains, ", "))
	}
	return text + ". Look for drop, snat and masquerade in \"nft list ruleset\" and in \"iptables-legacy -S FORWARD\""
}

// known notes where an address is announced, and says whether it was before.
func (h *holder) known(a floating.Address) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, was := h.announced[a.ID]
	h.announced[a.ID] = a
	for _, addr := range a.Addrs() {
		h.idOf[addr] = a.ID
	}
	return was
}

// forget is the opposite of known.
func (h *holder) forget(a floating.Address) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.announced, a.ID)
	delete(h.rivals, a.ID)
	for _, addr := range a.Addrs() {
		delete(h.idOf, addr)
	}
}

// warned is the time between two Events about rivals for an address of a pod.
const warned = time.Minute

// rival takes what another host says about a pod's address. The pod keeps it.
func (a *addresses) rival(r announce.Rival) bool {
	a.rivals.Add(rivalKey{r.Addr, rival{Rival: r}.text()})
	return true
}

// rivalKey is an address, and what is to be told.
type rivalKey struct {
	netip.Addr
	text string
}

// tellRival records an Event about the pod that has an address.
func (a *addresses) tellRival(ctx context.Context, k rivalKey) error {
	if last, ok := a.told[k.Addr]; ok && time.Since(last) < warned {
		return nil
	}
	all, err := a.store.List(ctx)
	if err != nil {
		return err
	}
	for _, alloc := range all {
		if !slices.Contains(alloc.Address.Addrs(), k.Addr) {
			continue
		}
		a.told[k.Addr] = time.Now()
		ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: alloc.Pod.Namespace, Name: alloc.Pod.Name, UID: types.UID(alloc.Pod.UID)}
		a.recorder.Eventf(ref, nil, corev1.EventTypeWarning, v2.BlockConflicting, v2.BlockConflicting, "node %s: %s", a.NodeName, k.text)
	}
	maps.DeleteFunc(a.told, func(_ netip.Addr, at time.Time) bool { return time.Since(at) >= warned })
	return nil
}

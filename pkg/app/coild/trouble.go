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
	"github.com/coil-net/coil/pkg/reconcile"
)

const (
	// probePlaces is how often it is looked whether the node forwards packets of the addresses that it has.
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
		Over: func(id, condition string) {
			if condition == v2.BlockForwardingBlocked {
				h.driver.Blocked(id, false)
			}
		},
	}, h.metrics)
	h.registry.MustRegister(h.troubles)
	h.rivals = map[string]rival{}
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
		h.troubles.Saw(a, v2.BlockConflicting, r.text())
	}
}

// probe looks whether the node forwards packets of the addresses that it has. Those of one pool that go to one pod share their fate: rules
// of others name pools and links. A node that doesn't leaves addresses to others.
func (h *holder) probe(ctx context.Context) error {
	h.mu.Lock()
	all := slices.SortedFunc(maps.Values(h.announced), func(a, b floating.Address) int { return cmp.Compare(a.Block, b.Block) })
	h.mu.Unlock()
	type group struct {
		pod  types.UID
		pool string
	}
	groups := map[group][]floating.Address{}
	for _, a := range all {
		g := group{a.Pod, a.Pool}
		groups[g] = append(groups[g], a)
	}
	var errs []error
	for _, addrs := range groups {
		blocked, err := h.place.Blocked(ctx, addrs[0])
		if err != nil {
			errs = append(errs, fmt.Errorf("probe whether packets of %s are forwarded: %w", addrs[0].Address, err))
			continue
		}
		message := ""
		if len(blocked) > 0 {
			message = h.blockedText(blocked[0].String())
		}
		for _, a := range addrs {
			h.judge(a, message)
		}
	}
	if len(all) == 0 {
		return errors.Join(errs...)
	}
	return cmp.Or(errors.Join(errs...), reconcile.Later(probePlaces))
}

// judge tells whether packets of an address are dropped, with a message if so.
func (h *holder) judge(a floating.Address, message string) {
	h.driver.Blocked(a.ID, message != "")
	if message != "" {
		h.troubles.Saw(a, v2.BlockForwardingBlocked, message)
	} else {
		h.troubles.Ended(a, v2.BlockForwardingBlocked)
	}
}

func (h *holder) blockedText(family string) string {
	text := fmt.Sprintf("rules of another program drop %s packets that the pod of the address sends and the node should forward, or give them another source: let "+
		"them accept packets from and to the pool's subnets as they are", family)
	if chains, err := h.table.Dropping(); err == nil && len(chains) > 0 {
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

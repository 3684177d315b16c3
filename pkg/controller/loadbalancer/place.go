package loadbalancer

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/faultpoint"
	"github.com/coil-net/coil/pkg/kube"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// place says in the block of a claim's address on which nodes this may be, and by which ports clients reach Services there.
func (c *Controller) place(ctx context.Context, name string) error {
	claim := c.claims.Find(c.cfg.Namespace + "/" + name)
	if claim == nil || !isOurs(c.cfg.Namespace, claim) {
		return nil
	}
	users, known := c.usersOf(name)
	b := c.blockOf(claim)
	if !known || b == nil || c.written.has(b) {
		return nil // the first plan, or the block's event, comes
	}
	nodes := c.servingNodes()
	spot := loadbalancer.Spot{Block: b.Name, Holder: holderOf(b)}
	anywhere := false
	var ports []entrance
	for _, key := range users {
		s := c.services.Find(key.String())
		if s == nil {
			continue
		}
		for _, p := range loadbalancer.PortsOf(s) {
			ports = append(ports, entrance{p, s.Spec.IPFamilies})
		}
		if loadbalancer.NeedsEndpoints(s) {
			spot.Only = loadbalancer.WithEndpoints(c.slices.Under(key.String()))
		} else {
			anywhere = true
		}
	}
	if anywhere && !nodes.Any(spot.Only) {
		spot.Only = nil // a Service without an endpoint is no reason to serve no other one
	}
	var successors []v2.FloatingNode
	var announcers v2.FloatingAnnouncers
	if len(ports) > 0 && !loadbalancer.OfGateways(b) {
		successors = nodes.Successors(spot, c.load.choose(b.Name, func(load map[string]int) string { return nodes.First(spot, load) }))
		if b.Labels[v2.LabelAnnounce] != string(v2.AnnounceNeighbor) { // by routes alone
			announcers = nodes.Announcers(spot.Only)
		}
	}
	if len(plan.ForwardingBlockedAt(b)) > 0 {
		c.changed(name) // of nodes that don't announce it any more, Services don't say that they drop its packets
	}
	return c.write(ctx, b, sorted(ports, b.Floating.Ports), successors, announcers)
}

// servingNodes are the nodes that may have addresses.
func (c *Controller) servingNodes() loadbalancer.Nodes {
	version := c.nodesVersion.Load() // before they are read
	if known := c.known.Load(); known != nil && known.version == version {
		return known.Nodes
	}
	nodes := loadbalancer.NodesOf(c.nodes.All())
	c.known.Store(&knownNodes{nodes, version})
	return nodes
}

// knownNodes are the nodes that may have addresses, at a version of the cache.
type knownNodes struct {
	loadbalancer.Nodes
	version int64
}

// load is how many addresses nodes have, or are to have. It is safe for concurrent use.
type load struct {
	mu    sync.Mutex
	of    map[string]string // blocks, to their nodes
	count map[string]int    // of a node
}

// choose chooses the node of a block.
func (l *load) choose(block string, first func(load map[string]int) string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set(block, "")
	node := first(l.count)
	l.set(block, node)
	return node
}

// put notes the node of a block; none is "".
func (l *load) put(block, node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set(block, node)
}

// set must be called with mu held.
func (l *load) set(block, node string) {
	if l.of == nil {
		l.of, l.count = map[string]string{}, map[string]int{}
	}
	if was := l.of[block]; was != "" {
		l.count[was]--
	}
	if l.of[block] = node; node == "" {
		delete(l.of, block)
		return
	}
	l.count[node]++
}

// holderOf is the node that has an address or, as long as none has it, the one that is to take it.
func holderOf(b *v2.AddressBlock) string {
	if f := b.Floating; f.Holding.Holder == "" && len(f.Successors) > 0 {
		return f.Successors[0].Node
	}
	return b.Floating.Holding.Holder
}

// entrance is a port of a Service, in the families of the Service.
type entrance struct {
	v2.FloatingPort
	families []corev1.IPFamily
}

// sorted are ports in order. Of two Services that have the same one in a family, as until the next plan after one was changed, the one has it that had it before.
func sorted(ports []entrance, before []v2.FloatingPort) (all []v2.FloatingPort) {
	isNew := func(e entrance) int {
		if slices.Contains(before, e.FloatingPort) {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(ports, func(a, b entrance) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port), cmp.Compare(isNew(a), isNew(b)))
	})
	var kept []entrance
	for _, e := range ports {
		if !slices.ContainsFunc(kept, e.inTheWayOf) {
			kept = append(kept, e)
		}
	}
	for _, e := range kept {
		all = append(all, e.FloatingPort)
	}
	slices.SortFunc(all, func(a, b v2.FloatingPort) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Service, b.Service))
	})
	return all
}

// inTheWayOf says whether two Services have the same port in a family.
func (e entrance) inTheWayOf(o entrance) bool {
	return e.Protocol == o.Protocol && e.Port == o.Port && slices.ContainsFunc(e.families, func(f corev1.IPFamily) bool { return slices.Contains(o.families, f) })
}

// patchOf returns the value of announcers in a merge patch (RFC 7386): nil, which removes the field, if there are none.
func patchOf(a v2.FloatingAnnouncers) any {
	if !a.All && len(a.Nodes) == 0 {
		return nil
	}
	return map[string]any{"all": a.All, "nodes": a.Nodes}
}

// write writes what is to be said of an address into its block, unless the block says so, or has changed since it was looked at.
func (c *Controller) write(ctx context.Context, b *v2.AddressBlock, ports []v2.FloatingPort, successors []v2.FloatingNode, announcers v2.FloatingAnnouncers) error {
	same := slices.EqualFunc(successors, b.Floating.Successors, func(x, y v2.FloatingNode) bool {
		return x.Node == y.Node && x.PodUID == y.PodUID && slices.Equal(x.Addresses, y.Addresses)
	})
	same = same && announcers.All == b.Floating.Announcers.All && slices.Equal(announcers.Nodes, b.Floating.Announcers.Nodes)
	if same && slices.Equal(ports, b.Floating.Ports) && b.Floating.MovingTo == "" {
		return nil
	}
	after, err := kube.PatchAsRead(ctx, c.cfg.Coil.CoilV2().AddressBlocks(), b, map[string]any{
		"floating": map[string]any{"ports": ports, "successors": successors, "movingTo": nil, "announcers": patchOf(announcers)},
	})
	switch {
	case apierrors.IsConflict(err):
		return nil // its event comes
	case err != nil:
		return fmt.Errorf("write into AddressBlock %s where its address is to be: %w", b.Name, err)
	}
	if after != nil {
		c.written.add(b, after)
	}
	faultpoint.At(faultpoint.ServePlaced)
	klog.FromContext(ctx).V(2).Info("Placed an address of Services", "block", b.Name, "ports", len(ports), "successors", len(successors))
	return nil
}

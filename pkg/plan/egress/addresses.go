package egress

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/floating"
)

// Reasons of EgressAddressesReady, beside those of the AddressClaim.
const (
	// ReasonAddressesHeld: the condition is True.
	ReasonAddressesHeld = "AddressesHeld"
	// ReasonNoPools: Coil runs without AddressPools.
	ReasonNoPools = "NoPools"
	// ReasonClaimPending: the AddressClaim has no answer yet.
	ReasonClaimPending = "ClaimPending"
	// ReasonNoHolder: no node has some of the addresses.
	ReasonNoHolder = "NoHolder"
)

// coolDownSeconds is for how long an address that an Egress gave up is given to nobody else: partners may still have it on
// their lists.
const coolDownSeconds = 3600

// mostSuccessors is how many nodes may have an address at a time. They all ask each other how they are.
const mostSuccessors = 5

// AddressClaim returns the claim by which an Egress has its floating addresses, nil if it is to have none. The claim of each pool
// has a name of its own, since its pool can't change.
func AddressClaim(e *v2.Egress) *v2.AddressClaim {
	a := e.Spec.Addresses
	if a == nil {
		return nil
	}
	return &v2.AddressClaim{
		TypeMeta: metav1.TypeMeta{APIVersion: v2.GroupVersion.String(), Kind: "AddressClaim"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: e.Namespace, Name: e.Name + "." + a.Pool, Labels: plan.RouterLabels(e.Name),
			OwnerReferences: []metav1.OwnerReference{controlledBy(e)},
		},
		Spec: v2.AddressClaimSpec{Pool: a.Pool, Count: a.Count, Addresses: a.List, CoolDownSeconds: coolDownSeconds},
	}
}

// Places returns, by the name of its AddressBlock, where each of an Egress's addresses is to be, if it is to be elsewhere than the block says. The
// routers are those of the Egress, internalIPs has the addresses of Nodes by name. While no router is ready nothing is changed: the
// present holders are as good as any. An address of a router that is ending moves to another node, with its connections, as long as
// the router forwards.
func Places(e *v2.Egress, blocks []*v2.AddressBlock, routers []*corev1.Pod, internalIPs func(node string) []string) map[string]Place {
	ending := func(p *corev1.Pod) bool { return p.DeletionTimestamp != nil }
	nodes := nodesWith(slices.DeleteFunc(slices.Clone(routers), ending), internalIPs)
	leaving := leavingFrom(blocks, slices.DeleteFunc(slices.Clone(routers), func(p *corev1.Pod) bool { return !ending(p) }), internalIPs)
	// They move to another node, if there is one: only there connections can be copied to.
	if others := without(nodes, leaving); len(others) > 0 {
		nodes = others
	}
	if len(nodes) == 0 || e.Spec.Addresses == nil {
		return nil
	}
	names := make([]string, 0, len(nodes))
	for name := range nodes {
		names = append(names, name)
	}
	slices.Sort(names)
	present := make([]floating.Place, 0, len(blocks))
	for _, b := range blocks {
		present = append(present, floating.Place{Address: b.Name, Node: placed(b, nodes)})
	}
	p := cmp.Or(e.Spec.Addresses.Placement, &v2.EgressPlacement{})
	orders := floating.Placement{Pack: p.Strategy == v2.EgressPlacementPack, MaxPerNode: int(p.MaxPerNode)}.Successors(names, present)
	changed := map[string]Place{}
	for _, b := range blocks {
		var want Place
		order := orders[b.Name]
		for _, n := range order[:min(len(order), mostSuccessors)] {
			want.Successors = append(want.Successors, nodes[n])
		}
		// A holder without a router that forwards gives the address up by itself. The others keep it until it has moved.
		holder, forwards := leaving[b.Floating.Holding.Holder]
		if !forwards || holder.PodUID != b.Floating.Holding.PodUID {
			holder, forwards = nodes[b.Floating.Holding.Holder]
		}
		if forwards && len(order) > 0 && holder.Node != order[0] {
			want.MovingTo = order[0]
			want.keep(holder)
		}
		if !want.is(b) {
			changed[b.Name] = want
		}
	}
	return changed
}

// Place is where a floating address is to be.
type Place struct {
	// Successors are the nodes that may have it, the preferred ones first.
	Successors []v2.FloatingNode
	// MovingTo is the node to which its holder is to hand it over.
	MovingTo string
}

// keep keeps the holder among the successors, in place of the last one if there are many.
func (p *Place) keep(holder v2.FloatingNode) {
	i := slices.IndexFunc(p.Successors, func(n v2.FloatingNode) bool { return n.Node == holder.Node })
	if i < 0 {
		p.Successors = append(p.Successors[:min(len(p.Successors), mostSuccessors-1)], holder)
		return
	}
	p.Successors[i] = holder // another router of the node may be ready, too
}

// is says whether a block says so already.
func (p Place) is(b *v2.AddressBlock) bool {
	return p.MovingTo == b.Floating.MovingTo && slices.EqualFunc(p.Successors, b.Floating.Successors, func(x, y v2.FloatingNode) bool {
		return x.Node == y.Node && x.PodUID == y.PodUID && slices.Equal(x.Addresses, y.Addresses)
	})
}

// placed is the node that has an address, or is about to, if it is one of those with a router.
func placed(b *v2.AddressBlock, nodes map[string]v2.FloatingNode) string {
	about := []string{b.Floating.MovingTo, b.Floating.Holding.Holder}
	for _, n := range b.Floating.Successors {
		about = append(about, n.Node)
	}
	for _, n := range about {
		if _, ready := nodes[n]; ready {
			return n
		}
	}
	return ""
}

// nodesWith returns the nodes with a router that is ready, each with the oldest of its routers: it stays while others come.
func nodesWith(routers []*corev1.Pod, internalIPs func(node string) []string) map[string]v2.FloatingNode {
	ready := slices.DeleteFunc(slices.Clone(routers), func(p *corev1.Pod) bool { return p.Spec.NodeName == "" || !plan.Ready(p) })
	slices.SortFunc(ready, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	nodes := map[string]v2.FloatingNode{}
	for _, p := range ready {
		addresses := internalIPs(p.Spec.NodeName)
		if _, known := nodes[p.Spec.NodeName]; !known && len(addresses) > 0 {
			nodes[p.Spec.NodeName] = v2.FloatingNode{Node: p.Spec.NodeName, Addresses: addresses, PodUID: p.UID}
		}
	}
	return nodes
}

// leavingFrom returns the nodes with a router that is ending, still forwards, and has one of some addresses.
func leavingFrom(blocks []*v2.AddressBlock, ending []*corev1.Pod, internalIPs func(node string) []string) map[string]v2.FloatingNode {
	return nodesWith(slices.DeleteFunc(ending, func(p *corev1.Pod) bool {
		return !slices.ContainsFunc(blocks, func(b *v2.AddressBlock) bool { return b.Floating.Holding.PodUID == p.UID })
	}), internalIPs)
}

func without(nodes, some map[string]v2.FloatingNode) map[string]v2.FloatingNode {
	rest := maps.Clone(nodes)
	maps.DeleteFunc(rest, func(n string, _ v2.FloatingNode) bool {
		_, is := some[n]
		return is
	})
	return rest
}

// AddressStatuses returns the floating addresses of an Egress as its status has them, in the order of the claim.
func AddressStatuses(claim *v2.AddressClaim, blocks []*v2.AddressBlock, routers []*corev1.Pod) []v2.EgressAddressStatus {
	if claim == nil {
		return nil
	}
	pods := map[types.UID]string{}
	for _, p := range routers {
		pods[p.UID] = p.Name
	}
	byName := map[string]*v2.AddressBlock{}
	for _, b := range blocks {
		byName[b.Name] = b
	}
	var all []v2.EgressAddressStatus
	for _, a := range claim.Status.Addresses {
		s := v2.EgressAddressStatus{Block: a.Block, EgressAddress: v2.EgressAddress{IPv4: a.IPv4, IPv6: a.IPv6}}
		if b := byName[a.Block]; b != nil && b.Floating.Holding.Holder != "" {
			s.Node, s.Since, s.Router = b.Floating.Holding.Holder, b.Floating.Holding.Since, pods[plan.RouterWith(b)]
		}
		all = append(all, s)
	}
	return all
}

// addressesReady is the condition about the addresses of an Egress; nil without any.
func addressesReady(f Facts) *metav1.Condition {
	if f.Egress.Spec.Addresses == nil {
		return nil
	}
	no := func(reason, format string, args ...any) *metav1.Condition {
		return &metav1.Condition{Type: v2.EgressAddressesReady, Status: metav1.ConditionFalse, Reason: reason, Message: plan.Message(fmt.Sprintf(format, args...))}
	}
	switch {
	case f.NoPools:
		return no(ReasonNoPools, "Coil runs without AddressPools: install the component with-addresses, or take spec.addresses away")
	case f.Claim == nil:
		return no(ReasonClaimPending, "The AddressClaim is being made")
	}
	ready := meta.FindStatusCondition(f.Claim.Status.Conditions, v2.ClaimReady)
	switch {
	case ready == nil:
		return no(ReasonClaimPending, "AddressClaim %s has no answer of coil-ipam-controller yet", f.Claim.Name)
	case ready.Status != metav1.ConditionTrue:
		return no(ready.Reason, "AddressClaim %s: %s", f.Claim.Name, ready.Message)
	}
	var lacking []string
	for _, s := range AddressStatuses(f.Claim, f.Blocks, f.Routers) {
		if s.Node == "" {
			lacking = append(lacking, cmp.Or(s.IPv4, s.IPv6))
		}
	}
	if len(lacking) > 0 {
		return no(ReasonNoHolder, "No node has %s: each is on a node with a router that is ready, and with room (spec.addresses.placement)", plan.Enumerate(lacking))
	}
	return &metav1.Condition{Type: v2.EgressAddressesReady, Status: metav1.ConditionTrue, Reason: ReasonAddressesHeld, Message: "Each address is on a node"}
}

package egress

import (
	"cmp"
	"fmt"
	"net/netip"
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
	// ReasonSharedOutside: spec.addresses.shared has addresses that the Egress doesn't have.
	ReasonSharedOutside = "SharedOutside"
)

// claimAdvice says what to do for a reason of the AddressClaim, whose messages don't know the fields of an Egress.
var claimAdvice = map[string]string{
	v2.ReasonPoolNotFound:       "Make it, or name another one in spec.addresses.pool",
	v2.ReasonPoolTerminating:    "Name another one in spec.addresses.pool",
	v2.ReasonBlockSize:          "Name another one in spec.addresses.pool",
	v2.ReasonAddressInvalid:     "Correct spec.addresses.list",
	v2.ReasonAddressOutsidePool: "Take it out of spec.addresses.list, or append a subnet that has it to spec.subnets of the AddressPool",
	v2.ReasonAddressInUse:       "Take it out of spec.addresses.list, or free it",
	v2.ReasonAddressTaken:       "Take it out of spec.addresses.list, or free it",
}

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
// present holders are as good as any.
func Places(e *v2.Egress, blocks []*v2.AddressBlock, routers []*corev1.Pod, internalIPs func(node string) []string) map[string]Place {
	nodes, at := readyNodes(routers, internalIPs)
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
			want.Successors = append(want.Successors, keepRouter(b, nodes[n], at))
		}
		// A holder without a router that is ready gives the address up by itself. The others keep it until it has moved.
		if holder, ready := nodes[b.Floating.Holding.Holder]; ready && len(order) > 0 && holder.Node != order[0] {
			want.MovingTo = order[0]
			if !slices.ContainsFunc(want.Successors, func(n v2.FloatingNode) bool { return n.Node == holder.Node }) {
				want.Successors[len(want.Successors)-1] = keepRouter(b, holder, at)
			}
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

// keepRouter returns a node with the router that a block has there, if that is ready: connections live in it. at are the nodes of ready ones.
func keepRouter(b *v2.AddressBlock, n v2.FloatingNode, at map[types.UID]string) v2.FloatingNode {
	for _, s := range b.Floating.Successors {
		if s.Node == n.Node && at[s.PodUID] == n.Node {
			n.PodUID = s.PodUID
		}
	}
	return n
}

// readyNodes returns the nodes with a router that is ready, each with the oldest of its routers, and the nodes of all these routers.
func readyNodes(routers []*corev1.Pod, internalIPs func(node string) []string) (nodes map[string]v2.FloatingNode, at map[types.UID]string) {
	ready := slices.DeleteFunc(slices.Clone(routers), func(p *corev1.Pod) bool {
		return p.DeletionTimestamp != nil || p.Spec.NodeName == "" || !plan.Ready(p)
	})
	slices.SortFunc(ready, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	nodes, at = map[string]v2.FloatingNode{}, map[types.UID]string{}
	for _, p := range ready {
		at[p.UID] = p.Spec.NodeName
		addresses := internalIPs(p.Spec.NodeName)
		if _, known := nodes[p.Spec.NodeName]; !known && len(addresses) > 0 {
			nodes[p.Spec.NodeName] = v2.FloatingNode{Node: p.Spec.NodeName, Addresses: addresses, PodUID: p.UID}
		}
	}
	return nodes, at
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
		return no(ReasonNoPools, "Coil runs without AddressPools (--enable-ipam=false): install a variant that has them, or take spec.addresses away")
	case f.Claim == nil:
		return no(ReasonClaimPending, "The AddressClaim is being made")
	}
	ready := meta.FindStatusCondition(f.Claim.Status.Conditions, v2.ClaimReady)
	switch {
	case ready == nil:
		return no(ReasonClaimPending, "AddressClaim %s has no answer of coil-ipam-controller yet", f.Claim.Name)
	case ready.Status != metav1.ConditionTrue:
		message := fmt.Sprintf("AddressClaim %s: %s", f.Claim.Name, ready.Message)
		if advice := claimAdvice[ready.Reason]; advice != "" {
			message += ". " + advice
		}
		return no(ready.Reason, "%s", message)
	}
	var lacking []string
	all := AddressStatuses(f.Claim, f.Blocks, f.Routers)
	for _, s := range all {
		if s.Node == "" {
			lacking = append(lacking, cmp.Or(s.IPv4, s.IPv6))
		}
	}
	if len(lacking) > 0 {
		return no(ReasonNoHolder, "No node has %s: each is on a node with a router that is ready, and with room (spec.addresses.placement)", plan.Enumerate(lacking))
	}
	if outside := sharedOutside(f.Egress.Spec.Addresses.Shared, all); len(outside) > 0 {
		return no(ReasonSharedOutside, "The Egress doesn't have %s of spec.addresses.shared: take it out there, or have it by spec.addresses.list", plan.Enumerate(outside))
	}
	return &metav1.Condition{Type: v2.EgressAddressesReady, Status: metav1.ConditionTrue, Reason: ReasonAddressesHeld, Message: "Each address is on a node"}
}

// sharedOutside returns those of spec.addresses.shared that aren't among an Egress's addresses.
func sharedOutside(shared []string, has []v2.EgressAddressStatus) (outside []string) {
	own := map[netip.Addr]bool{}
	for _, s := range has {
		for _, text := range []string{s.IPv4, s.IPv6} {
			if a, err := netip.ParseAddr(text); err == nil {
				own[a] = true
			}
		}
	}
	for _, text := range shared {
		if a, err := netip.ParseAddr(text); err != nil || !own[a] {
			outside = append(outside, text)
		}
	}
	return outside
}

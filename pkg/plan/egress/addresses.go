package egress

import (
	"cmp"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan"
)

// Reasons of EgressAddressesReady, beside those of the AddressClaim.
const (
	// ReasonAddressesHeld: the condition is True.
	ReasonAddressesHeld = "AddressesHeld"
	// ReasonNoPools: Coil runs without AddressPools, behind another network plugin.
	ReasonNoPools = "NoPools"
	// ReasonForeignPods: clients are to leave by the addresses of nodes, and another network plugin gives pods their addresses.
	ReasonForeignPods = "ForeignPods"
	// ReasonClaimPending: the AddressClaim has no answer yet.
	ReasonClaimPending = "ClaimPending"
	// ReasonNoHolder: no node has some of the addresses.
	ReasonNoHolder = "NoHolder"
	// ReasonSharedOutside: spec.addresses.shared has addresses that the Egress doesn't have.
	ReasonSharedOutside = "SharedOutside"
	// ReasonTooFewAddresses: there are more routers than addresses, which are the routers'.
	ReasonTooFewAddresses = "TooFewAddresses"
	// ReasonRouterWithoutAddress: a router has no address yet.
	ReasonRouterWithoutAddress = "RouterWithoutAddress"
	// ReasonNodeAddresses: the condition is True, since clients leave by the addresses of nodes.
	ReasonNodeAddresses = "NodeAddresses"
	// ReasonNoNodeReady: clients are to leave by the addresses of nodes, and no router is ready. A router is ready only when its node translates.
	ReasonNoNodeReady = "NoNodeReady"
)

// claimAdvice says what to do for a reason of the AddressClaim, whose messages don't know the fields of an Egress.
var claimAdvice = map[string]string{
	v2.ReasonPoolNotFound:       "Make it, or name another one in spec.addresses.pool",
	v2.ReasonPoolTerminating:    "Name another one in spec.addresses.pool",
	v2.ReasonPoolDraining:       "Name another one in spec.addresses.pool",
	v2.ReasonClaimNamespace:     "Name another one in spec.addresses.pool, or have the Egress's namespace added there",
	v2.ReasonBlockSize:          "Name another one in spec.addresses.pool",
	v2.ReasonAddressInvalid:     "Correct spec.addresses.list",
	v2.ReasonAddressOutsidePool: "Take it out of spec.addresses.list, or append a subnet that has it to spec.subnets of the AddressPool",
	v2.ReasonAddressExcluded:    "Take it out of spec.addresses.list, or of spec.exclude of the AddressPool",
	v2.ReasonAddressInUse:       "Take it out of spec.addresses.list, or free it",
	v2.ReasonAddressTaken:       "Take it out of spec.addresses.list, or free it",
}

// coolDownSeconds is for how long an address that an Egress gave up is given to nobody else: partners may still have it on
// their lists.
const coolDownSeconds = 3600

// AddressClaim returns the claim by which an Egress has its floating addresses, nil if it is to have none. The claim of each pool
// has a name of its own, since its pool can't change.
func AddressClaim(e *v2.Egress) *v2.AddressClaim {
	a := e.Spec.Addresses
	if !a.Float() {
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
	switch {
	case f.Egress.Spec.Addresses == nil:
		return nil
	case f.Egress.Spec.Addresses.For(v2.EgressAddressOfNode):
		return nodeAddressesReady(f)
	}
	no := func(reason, format string, args ...any) *metav1.Condition {
		return &metav1.Condition{Type: v2.EgressAddressesReady, Status: metav1.ConditionFalse, Reason: reason, Message: plan.Message(fmt.Sprintf(format, args...))}
	}
	switch {
	case f.NoPools:
		return no(ReasonNoPools, "Coil runs behind another network plugin, without AddressPools (--enable-ipam=false): install the variant egress-only-with-addresses, "+
			"or add the component with-addresses (manifests/README.md), or take spec.addresses away")
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
	if without := withoutAddress(f); len(without) > 0 {
		if have := len(f.Claim.Status.Addresses); have < len(readyRouters(f.Routers)) {
			return no(ReasonTooFewAddresses, "Routers %s have no address, and get no clients: there are %d addresses for %d routers. Add some to spec.addresses, or have fewer routers (spec.replicas)",
				plan.Enumerate(without), have, len(readyRouters(f.Routers)))
		}
		return no(ReasonRouterWithoutAddress, "Routers %s have no address yet, and get no clients until one has moved there", plan.Enumerate(without))
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

// withoutAddress returns the names of the routers that are ready and have no address, if the addresses are the routers'.
func withoutAddress(f Facts) (names []string) {
	if !f.Egress.Spec.Addresses.For(v2.EgressAddressOfRouter) {
		return nil
	}
	has := map[string]bool{}
	for _, s := range AddressStatuses(f.Claim, f.Blocks, f.Routers) {
		has[s.Router] = true
	}
	for _, p := range readyRouters(f.Routers) {
		if !has[p.Name] {
			names = append(names, p.Name)
		}
	}
	return names
}

package loadbalancer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
)

// Reasons of ConditionAssigned and ConditionServed beside those of a Plan. OpenStack's own are beside them.
const (
	ReasonAssigned  = "AddressAssigned"
	ReasonWaits     = "WaitsForAddress"
	ReasonServed    = "Served"
	ReasonNoNode    = "NoNode"
	ReasonEndpoints = "NoEndpoints"
	ReasonHolder    = "NoHolder"
	ReasonBlocked   = v2.BlockForwardingBlocked
	ReasonNoGateway = "NoGateway"
	ReasonGateway   = "WaitsForGateway"
	ReasonSilent    = "GatewaySilent"
	ReasonRefused   = "GatewayError"
	ReasonPairs     = "WaitsForOpenStack"
)

// Waits says whether a reason is one for which Services have to wait only.
func Waits(reason string) bool {
	return reason == ReasonWaits || reason == ReasonHolder || reason == ReasonGateway || reason == ReasonPairs
}

// Site is what is known of the place of an address.
type Site struct {
	Claim *v2.AddressClaim
	// Block is the claim's; nil as long as it isn't known.
	Block *v2.AddressBlock
	// Gateways are those of the cluster, sorted by name, and Silent says of which nothing was heard for too long.
	Gateways []*v2.LoadBalancerGateway
	Silent   func(gateway string) bool
	// Serving are the nodes that may have addresses, and Endpoints those with endpoints of the Service (see WithEndpoints). They are called only if it matters.
	Serving   func() Nodes
	Endpoints func() map[string]bool
}

// Served says whether a place answers for the address, and takes packets for the ports of a Service. The reason is ReasonServed, or says why not.
func (at Site) Served(s *corev1.Service) (reason, message string) {
	b := at.Block
	if b == nil {
		return ReasonHolder, fmt.Sprintf("The AddressBlock of AddressClaim %s/%s isn't known yet", at.Claim.Namespace, at.Claim.Name)
	}
	f := b.Floating
	switch {
	case slices.ContainsFunc(PortsOf(s), func(p v2.FloatingPort) bool { return !slices.Contains(f.Ports, p) }):
		return ReasonHolder, fmt.Sprintf("AddressBlock %s doesn't have the ports yet", b.Name)
	case OfGateways(b):
		refused, why, also := allowed(at.Claim)
		if refused != "" {
			return refused, why
		}
		reason, message := at.servedByGateways(s)
		return reason, message + also
	case NeedsEndpoints(s) && (len(f.Successors) == 0 || Shared(b, s) && !at.Serving().Any(at.Endpoints())):
		return ReasonEndpoints, "No node that may have the address has an endpoint that is ready (externalTrafficPolicy: Local)"
	case len(f.Successors) == 0:
		return ReasonNoNode, "No node may have the address: each one has the label " + corev1.LabelNodeExcludeBalancers + ", is about to be deleted, or has no InternalIP"
	case !slices.ContainsFunc(f.Successors, func(n v2.FloatingNode) bool { return n.Node == f.Holding.Holder }):
		return ReasonHolder, "No node answers for the address yet"
	case slices.Contains(plan.ForwardingBlockedAt(b), f.Holding.Holder):
		return ReasonBlocked, blockedText(b, append([]string{f.Holding.Holder}, at.blockedBesideHolder()...))
	}
	switch {
	case f.Announcers.All:
		return ReasonServed, fmt.Sprintf("Node %s answers for the address, and so do all other nodes that may have it", f.Holding.Holder)
	case len(f.Announcers.Nodes) > 0:
		return ReasonServed, fmt.Sprintf("Node %s answers for the address, and so do all other nodes with endpoints", f.Holding.Holder)
	}
	return ReasonServed, fmt.Sprintf("Node %s answers for the address", f.Holding.Holder)
}

// servedByGateways says whether gateways serve a Service: all of which was heard, since any of them may have the address.
func (at Site) servedByGateways(s *corev1.Service) (reason, message string) {
	pool := at.Block.Labels[v2.LabelPool]
	var can, silent, refused []string
	behind := false
	for _, g := range at.Gateways {
		if !slices.Contains(g.Spec.Pools, pool) {
			continue
		}
		why := Refusal(g, s)
		switch {
		case why != "":
			refused = append(refused, fmt.Sprintf("gateway %s: %s", g.Name, why))
		case at.Silent(g.Name):
			silent = append(silent, g.Name)
		default:
			can = append(can, g.Name)
			behind = behind || !Applied(g, at.Block)
		}
	}
	also := ""
	if len(silent) > 0 {
		also = fmt.Sprintf("; nothing was heard for a minute of %s", strings.Join(silent, ", "))
	}
	if len(refused) > 0 {
		also += "; " + strings.Join(refused, "; ")
	}
	switch {
	case len(can) > 0 && !behind:
		return ReasonServed, fmt.Sprintf("Gateways serve the address: %s%s", strings.Join(can, ", "), also)
	case len(can) > 0:
		return ReasonGateway, fmt.Sprintf("Not all gateways serve the address yet: it waits for %s%s", strings.Join(can, ", "), also)
	case len(refused) > 0:
		return ReasonRefused, "No gateway serves the Service" + also
	case len(silent) > 0:
		return ReasonSilent, fmt.Sprintf("The gateways of AddressPool %s may serve the address, and don't reach the API server: see whether coil-lb-agent runs there%s", pool, also)
	}
	return ReasonNoGateway, fmt.Sprintf("No LoadBalancerGateway names AddressPool %s in its spec.pools", pool)
}

// Drops says which nodes that announce the address beside its holder drop its packets, and why; empty if none does.
func (at Site) Drops() string {
	if at.Block == nil {
		return ""
	}
	return blockedText(at.Block, at.blockedBesideHolder())
}

// blockedBesideHolder returns the nodes that announce an address beside its holder, and drop its packets, sorted. Nodes that have left it, or that are gone, may still be in
// the block's condition.
func (at Site) blockedBesideHolder() []string {
	f := at.Block.Floating
	nodes := plan.ForwardingBlockedAt(at.Block)
	if len(nodes) == 0 {
		return nil
	}
	serving := at.Serving()
	nodes = slices.DeleteFunc(nodes, func(n string) bool {
		return n == f.Holding.Holder || !slices.Contains(f.Announcers.Nodes, n) && !(f.Announcers.All && serving.Has(n))
	})
	slices.Sort(nodes)
	return nodes
}

// blockedText is what a Service says of nodes that drop packets of its address; empty without any. The first one says why.
func blockedText(b *v2.AddressBlock, nodes []string) string {
	if len(nodes) == 0 {
		return ""
	}
	blocked := meta.FindStatusCondition(b.Status.Conditions, v2.BlockForwardingBlocked)
	why := plan.ToldBy(blocked.Message, nodes[0])
	if len(nodes) == 1 {
		return fmt.Sprintf("Node %s answers for the address, and %s", nodes[0], why)
	}
	return fmt.Sprintf("Nodes %s answer for the address, and %s", plan.Enumerate(nodes), why)
}

// OfGateways says whether gateways have the address of a block.
func OfGateways(b *v2.AddressBlock) bool {
	return b.Labels[v2.LabelAnnounce] == string(v2.AnnounceGateway)
}

// Shared says whether other Services have the address of a Service, too. It is on a node for these though no node has an endpoint of the Service.
func Shared(b *v2.AddressBlock, s *corev1.Service) bool {
	name := s.Namespace + "/" + s.Name
	return slices.ContainsFunc(b.Floating.Ports, func(p v2.FloatingPort) bool { return p.Service != name })
}

// NeedsEndpoints says whether the address of a Service has to be on a node with one of its endpoints.
func NeedsEndpoints(s *corev1.Service) bool {
	return s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// PortsOf are the ports by which clients reach a Service.
func PortsOf(s *corev1.Service) (all []v2.FloatingPort) {
	for _, p := range s.Spec.Ports {
		all = append(all, v2.FloatingPort{Protocol: cmp.Or(p.Protocol, corev1.ProtocolTCP), Port: p.Port, Service: s.Namespace + "/" + s.Name})
	}
	return all
}

// AddressOf is the address of a claim that asks for one; the zero Address as long as it has none.
func AddressOf(a *v2.AddressClaim) ipam.Address {
	if len(a.Status.Addresses) == 0 {
		return ipam.Address{}
	}
	var addrs []netip.Addr
	for _, text := range []string{a.Status.Addresses[0].IPv4, a.Status.Addresses[0].IPv6} {
		if addr, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, addr)
		}
	}
	return ipam.AddressOf(addrs...)
}

// BlockOf returns the block of a claim among some of its name, nil if it has none yet. An earlier claim of the name may have one still.
func BlockOf(claim *v2.AddressClaim, blocks []*v2.AddressBlock) *v2.AddressBlock {
	blocks = slices.DeleteFunc(slices.Clone(blocks), func(b *v2.AddressBlock) bool { return b.Floating.Owner.UID != claim.UID })
	if len(blocks) == 0 {
		return nil
	}
	return slices.MinFunc(blocks, func(a, b *v2.AddressBlock) int { return cmp.Compare(a.Name, b.Name) })
}

// Claims says whether a block is one of a claim in a namespace, by its name, and wasn't released.
func Claims(namespace string, b *v2.AddressBlock) (claim string, is bool) {
	f := b.Floating
	if f == nil || f.Owner.Kind != "AddressClaim" || f.Owner.Namespace != namespace || f.ReleasedAt != nil || b.DeletionTimestamp != nil {
		return "", false
	}
	return f.Claim, true
}

// Assigned is the condition of a Service whose claim has an address, and what the Service is to have then.
func Assigned(claim *v2.AddressClaim) State {
	st := State{Addresses: AddressOf(claim)}
	st.Assigned = metav1.Condition{
		Type: ConditionAssigned, Status: metav1.ConditionTrue, Reason: ReasonAssigned, Message: fmt.Sprintf("It has %s of AddressPool %s", st.Addresses, claim.Spec.Pool),
	}
	if claim.Status.Provided == nil {
		return st
	}
	if floating, err := netip.ParseAddr(claim.Status.Provided.FloatingIP); err == nil {
		st.FloatingIP = floating
		st.Assigned.Message += fmt.Sprintf(", to which OpenStack leads the floating IP %s", floating)
	}
	if is := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimProvided); is != nil && is.Status == metav1.ConditionFalse {
		st.Assigned.Message += fmt.Sprintf("; OpenStack doesn't have all of it, %s: %s", is.Reason, is.Message)
	}
	return st
}

// allowed says whether the ports of gateways may use the address of a claim; empty if they may. also is what is to be told beside that.
func allowed(claim *v2.AddressClaim) (reason, message, also string) {
	if claim.Status.Provided == nil {
		return "", "", ""
	}
	is := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimAllowed)
	switch {
	case is == nil:
		return ReasonPairs, fmt.Sprintf("The gateways' ports in OpenStack may not use the address of AddressClaim %s/%s yet", claim.Namespace, claim.Name), ""
	case is.Status != metav1.ConditionTrue:
		return is.Reason, is.Message, ""
	case is.Message != "":
		return "", "", "; " + is.Message
	}
	return "", "", ""
}

// Unanswered says why a claim of a name has no address yet: it waits, or OpenStack has refused it. A nil claim doesn't exist yet.
func Unanswered(namespace, name string, claim *v2.AddressClaim) (reason, message string) {
	if claim != nil {
		if is := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimProvided); is != nil && is.Status == metav1.ConditionFalse {
			return is.Reason, fmt.Sprintf("AddressClaim %s/%s gets no address: %s", namespace, name, is.Message)
		}
		if ready := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimReady); ready != nil && ready.Status == metav1.ConditionFalse {
			return ReasonWaits, fmt.Sprintf("AddressClaim %s/%s gets no address: %s: %s", namespace, name, ready.Reason, ready.Message)
		}
	}
	return ReasonWaits, fmt.Sprintf("AddressClaim %s/%s has no address yet", namespace, name)
}

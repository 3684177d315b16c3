package egress

import (
	"cmp"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
)

// mostNodeAddresses is how many routers a status names at most.
const mostNodeAddresses = 1024

// NodeAddresses returns for each router that is ready the addresses of its node, by which clients leave; nil if they leave by other addresses.
// internalIPs returns the addresses of a Node.
func NodeAddresses(e *v2.Egress, routers []*corev1.Pod, internalIPs func(node string) []string) (all []v2.EgressNodeAddress) {
	if !e.Spec.Addresses.For(v2.EgressAddressOfNode) {
		return nil
	}
	for _, p := range readyRouters(routers) {
		has := ipam.AddressOf(parsed(podIPs(p))...)
		a := v2.EgressNodeAddress{Router: p.Name, Node: p.Spec.NodeName}
		of := ipam.AddressOf(parsed(internalIPs(p.Spec.NodeName))...)
		if has.IPv4.IsValid() && of.IPv4.IsValid() {
			a.IPv4 = of.IPv4.String()
		}
		if has.IPv6.IsValid() && of.IPv6.IsValid() {
			a.IPv6 = of.IPv6.String()
		}
		all = append(all, a)
	}
	slices.SortFunc(all, func(a, b v2.EgressNodeAddress) int { return cmp.Compare(a.Router, b.Router) })
	return all[:min(len(all), mostNodeAddresses)]
}

func podIPs(p *corev1.Pod) (all []string) {
	for _, ip := range p.Status.PodIPs {
		all = append(all, ip.IP)
	}
	return all
}

func parsed(texts []string) (all []netip.Addr) {
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil {
			all = append(all, a)
		}
	}
	return all
}

// nodeAddressesReady is the condition about the nodes' addresses.
func nodeAddressesReady(f Facts) *metav1.Condition {
	c := &metav1.Condition{Type: v2.EgressAddressesReady, Status: metav1.ConditionFalse}
	switch {
	case f.ForeignPods:
		c.Reason, c.Message = ReasonForeignPods, "Another network plugin gives pods their addresses (--enable-ipam=false), and nodes don't translate for routers then: the routers don't become ready. "+
			"Install a variant in which Coil gives pods their addresses, or take spec.addresses away"
	case len(readyRouters(f.Routers)) == 0:
		c.Reason, c.Message = ReasonNoNodeReady, "No router is ready. One is when its node translates its clients' addresses: /readyz of the router, and the log of coild on its node, say what that waits for"
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, ReasonNodeAddresses, "Clients leave by the addresses of the nodes with a router that is ready"
	}
	return c
}

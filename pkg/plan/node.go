package plan

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// maxInternalIPs is how many InternalIPs of a Node count: kubelet writes them, and that of a node
// that was taken over must not fill, or widen, the ranges of all Egresses, nor take all blocks.
const maxInternalIPs = 16

// NodeInternalIPs returns the addresses of a Node inside the cluster: the first ones, since kubelet writes
// them.
func NodeInternalIPs(n *corev1.Node) []netip.Addr {
	addrs := NodeAddrs(n, corev1.NodeInternalIP)
	return addrs[:min(len(addrs), maxInternalIPs)]
}

// NodeAddrs returns the addresses of a Node of some types, without names.
func NodeAddrs(n *corev1.Node, types ...corev1.NodeAddressType) []netip.Addr {
	var out []netip.Addr
	for _, a := range n.Status.Addresses {
		if !slices.Contains(types, a.Type) {
			continue
		}
		if ip, err := netip.ParseAddr(a.Address); err == nil {
			out = append(out, ip.Unmap().WithZone(""))
		}
	}
	return out
}

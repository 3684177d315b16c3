// Package plantest has what tests of several packages of plan begin with.
//
// It must not know any of them, since their tests import it.
package plantest

import (
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// Prefixes returns those of a text, between spaces.
func Prefixes(text string) (out []netip.Prefix) {
	for _, f := range strings.Fields(text) {
		out = append(out, netip.MustParsePrefix(f))
	}
	return out
}

// Cluster has racks of dual-stack nodes, with a subnet each.
func Cluster(nodes, perRack int) (pools []*v2.AddressPool, all []*corev1.Node, services []*networkingv1.ServiceCIDR) {
	for i := range nodes {
		rack, slot := i/perRack, i%perRack
		all = append(all, Node(nil,
			corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("10.%d.%d.%d", rack>>8, rack&255, 11+slot)},
			corev1.NodeAddress{Type: "InternalIP", Address: fmt.Sprintf("fd00:10:%x::%x", rack, 0x11+slot)}))
	}
	services = []*networkingv1.ServiceCIDR{{Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12"}}}}
	pools = []*v2.AddressPool{{Spec: v2.AddressPoolSpec{Subnets: []v2.SubnetSet{{IPv4: new("100.64.0.0/10")}, {IPv4: new("198.51.100.0/24")}}}}}
	return pools, all, services
}

// Pool returns a pool of one IPv4 subnet.
func Pool(name string, blockSizeBits int32, ipv4 string) *v2.AddressPool {
	return &v2.AddressPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v2.AddressPoolSpec{
		BlockSizeBits: blockSizeBits, Subnets: []v2.SubnetSet{{IPv4: &ipv4}},
	}}
}

// Block returns a block of a pool that a node holds.
func Block(pool string, index int32, ipv4, node string) *v2.AddressBlock {
	return &v2.AddressBlock{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", pool, index), Labels: map[string]string{v2.LabelPool: pool, v2.LabelNode: node}},
		Index:      index, IPv4: &ipv4,
	}
}

// Node returns one with addresses, and with ranges of pods.
func Node(podCIDRs []string, addrs ...corev1.NodeAddress) *corev1.Node {
	return &corev1.Node{Spec: corev1.NodeSpec{PodCIDRs: podCIDRs}, Status: corev1.NodeStatus{Addresses: addrs}}
}

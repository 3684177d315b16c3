package pools

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

func TestOverlapping(t *testing.T) {
	services := &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.0.0.0/8", "bad", "fd00::/108"}},
	}
	tests := []struct {
		name   string
		subnet v2.SubnetSet
		others Others
		want   string // "status reason words"
	}{
		{"nothing else", subnet("10.0.0.0/24", ""), Others{Pools: []*v2.AddressPool{statusPool("p", subnet("10.0.0.0/24", ""))}}, "False NoOverlap "},
		{"a pool", subnet("10.0.0.0/24", ""), Others{Pools: []*v2.AddressPool{
			statusPool("p", subnet("10.0.0.0/24", "")), statusPool("q", subnet("10.9.0.0/24", ""), subnet("10.0.0.128/25", "")), statusPool("r", subnet("", "fd00::/64")),
		}}, "True AddressesUsedByOthers by AddressPool q (10.0.0.128/25)"},
		{"the services", subnet("", "fd00::/112"), Others{Services: []*networkingv1.ServiceCIDR{services}},
			"True AddressesUsedByOthers ServiceCIDR kubernetes (fd00::/108)"},
		{"nodes", subnet("10.0.0.0/24", ""), Others{Nodes: nodesAt("10.0.0.4", "10.0.0.1", "::ffff:10.0.0.2", "10.0.1.1", "host", "10.0.0.3")},
			"True AddressesUsedByOthers Node n0 (10.0.0.4), Node n1 (10.0.0.1), Node n2 (10.0.0.2) and 1 more"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Overlapping(statusPool("p", tt.subnet), tt.others)
			f := strings.SplitN(tt.want, " ", 3)
			if c.Type != v2.PoolOverlapping || string(c.Status) != f[0] || c.Reason != f[1] || !strings.Contains(c.Message, f[2]) || strings.Contains(c.Message, "\n") {
				t.Errorf("condition is %+v, want %q", c, tt.want)
			}
		})
	}
}

func nodesAt(addrs ...string) (ns []*corev1.Node) {
	for i, a := range addrs {
		typ := []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP}[i%2]
		ns = append(ns, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)},
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeHostName, Address: "10.0.0.9"}, {Type: typ, Address: a},
			}},
		})
	}
	return ns
}

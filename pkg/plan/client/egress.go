package client

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// EgressOf returns an Egress as a client uses it, by a Service that is nil if there
// is none. Its routers, and whether it has switched, aren't known yet. The floating address is that of pods that name the Egress themselves.
func EgressOf(e *v2.Egress, s *corev1.Service) Egress {
	c := Egress{
		Name:            e.Namespace + "/" + e.Name,
		Destinations:    prefixes.Valid(e.Spec.Destinations),
		InCluster:       prefixes.Valid(e.Status.InClusterCIDRs),
		SourcePortAuto:  e.Spec.FouSourcePortAuto,
		OriginatingOnly: e.Spec.OriginatingOnly,
		Direct:          e.Spec.Peering == v2.EgressPeeringDirect,
	}
	if s != nil {
		c.Peers = clusterIPs(s)
	}
	switch {
	case e.Spec.Addresses.For(v2.EgressAddressOfRouter):
		c.OfRouters = []OfRouter{}
		for _, a := range e.Status.Addresses {
			if a.Router != "" {
				c.OfRouters = append(c.OfRouters, OfRouter{a.Block, a.Router})
			}
		}
	case e.Spec.Addresses.For(v2.EgressAddressOfClient):
		c.Blocks = []string{}
		for _, a := range e.Status.Addresses {
			c.Blocks = append(c.Blocks, a.Block)
		}
		if first := plan.AddressOf(e, ""); first != nil {
			c.Block = first.Block
		}
	}
	return c
}

// clusterIPs returns the addresses of a Service, of each family the first.
func clusterIPs(s *corev1.Service) ipam.Address {
	var addrs []netip.Addr
	for _, text := range s.Spec.ClusterIPs {
		if ip, err := netip.ParseAddr(text); err == nil { // "None" is none
			addrs = append(addrs, ip)
		}
	}
	return ipam.AddressOf(addrs...)
}

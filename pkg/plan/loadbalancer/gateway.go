package loadbalancer

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
)

// Unservable says why a gateway of a spec can't serve a Service as it is, and what to do; nil if it can.
func Unservable(spec v2.LoadBalancerGatewaySpec, s *corev1.Service) error {
	if _, err := SourceRanges(s); err != nil {
		return err
	}
	switch spec.Endpoints {
	case v2.EndpointsPod:
	case v2.EndpointsClusterIP:
		for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
			if slices.Contains(s.Spec.IPFamilies, corev1.IPFamily(f.String())) && !ClusterIP(s, f).IsValid() {
				return fmt.Errorf("the Service has no ClusterIP of %s: this gateway sends to ClusterIPs (spec.endpoints of the LoadBalancerGateway)", f)
			}
		}
	default:
		if i := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort == 0 }); i >= 0 {
			return fmt.Errorf("port %d has no NodePort: set spec.allocateLoadBalancerNodePorts, or have gateways send to ClusterIPs or pods (spec.endpoints of the LoadBalancerGateway)", s.Spec.Ports[i].Port)
		}
	}
	return nil
}

// ClusterIP is the address of a family that a Service has in the cluster; the zero Addr if it has none.
func ClusterIP(s *corev1.Service, f dataplane.Family) netip.Addr {
	for _, text := range s.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil && dataplane.FamilyOf(a) == f {
			return a
		}
	}
	return netip.Addr{}
}

// SourceRanges are the clients that a Service lets in; none for all.
func SourceRanges(s *corev1.Service) ([]netip.Prefix, error) {
	all := make([]netip.Prefix, len(s.Spec.LoadBalancerSourceRanges))
	for i, text := range s.Spec.LoadBalancerSourceRanges {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("spec.loadBalancerSourceRanges has %q: write a range such as 192.0.2.0/24", text)
		}
		all[i] = p.Masked()
	}
	return all, nil
}

// Refusal says why a gateway can't serve a Service, in the gateway's words if it lists the Service; empty if it can.
func Refusal(g *v2.LoadBalancerGateway, s *corev1.Service) string {
	if i := slices.IndexFunc(g.Status.Errors, func(e v2.GatewayError) bool { return e.Service == s.Namespace+"/"+s.Name }); i >= 0 {
		return g.Status.Errors[i].Message
	}
	if err := Unservable(g.Spec, s); err != nil { // a gateway lists no more than v2.MaxGatewayErrors
		return err.Error()
	}
	return RefusalOfAll(g)
}

// RefusalOfAll says why a gateway can serve no Service, in the gateway's words; empty if it can serve any.
func RefusalOfAll(g *v2.LoadBalancerGateway) string {
	if does := meta.FindStatusCondition(g.Status.Conditions, v2.GatewayApplied); does != nil && (does.Reason == v2.ReasonKernelRefused || does.Reason == v2.ReasonVRRPFailed) {
		return does.Message
	}
	return ""
}

// Applied says whether a gateway does what its spec and a block say. The blocks that a gateway has done are of all pools: only the generation says whether it
// knows of a pool that its spec has just been given.
func Applied(g *v2.LoadBalancerGateway, b *v2.AddressBlock) bool {
	order, err := resourceversion.CompareResourceVersion(g.Status.Applied.Blocks, b.ResourceVersion)
	return err == nil && order >= 0 && g.Status.Applied.Generation >= g.Generation
}

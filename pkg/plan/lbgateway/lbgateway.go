// Package lbgateway says where a gateway machine sends connections to Services of the type LoadBalancer.
//
// It owns the choice of endpoints. It must not know how connections get there, nor which machine has an address.
package lbgateway

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/plan/ruleset"
)

// Forward is a port of a Service at an address, and where its connections go.
type Forward struct {
	ruleset.Frontend
	// Draining are endpoints that get no new connections, and keep those that they have.
	Draining []netip.AddrPort
}

// Place is a port of a Service at an address.
type Place struct {
	Address  netip.Addr
	Protocol corev1.Protocol
	Port     int32
}

// Facts are all that the forwards of a Service depend on.
type Facts struct {
	Spec    v2.LoadBalancerGatewaySpec
	Service *corev1.Service
	// Places are those that AddressBlocks say the Service has.
	Places []Place
	// Slices are the Service's.
	Slices []*discoveryv1.EndpointSlice
	Nodes  Nodes
}

// Nodes are those of a cluster.
type Nodes []struct {
	name  string
	addrs []netip.Addr
	may   bool // it may get new connections
}

// NodesOf returns the nodes of a cluster.
func NodesOf(all []*corev1.Node) Nodes {
	serving, nodes := loadbalancer.NodesOf(all), make(Nodes, len(all))
	for i, n := range all {
		nodes[i].name, nodes[i].addrs = n.Name, plan.NodeInternalIPs(n)
		nodes[i].may = serving.Has(n.Name)
	}
	return nodes
}

// Forwards returns the forwards of a Service, sorted. A place whose port or family the Service hasn't has none. An error says why the Service can't be served as it is, and what
// to do.
func Forwards(f Facts) ([]Forward, error) {
	if err := loadbalancer.Unservable(f.Spec, f.Service); err != nil {
		return nil, err
	}
	sources, err := sourcesOf(f.Service)
	if err != nil {
		return nil, err
	}
	var all []Forward
	for _, at := range f.Places {
		family := corev1.IPv4Protocol
		if at.Address.Is6() {
			family = corev1.IPv6Protocol
		}
		if !slices.Contains(f.Service.Spec.IPFamilies, family) {
			continue // there another Service may have the port
		}
		i := slices.IndexFunc(f.Service.Spec.Ports, func(p corev1.ServicePort) bool {
			return p.Port == at.Port && cmp.Or(p.Protocol, corev1.ProtocolTCP) == at.Protocol
		})
		if i < 0 {
			continue
		}
		to := Forward{Frontend: ruleset.Frontend{
			Address: at.Address, Port: ruleset.Port{Protocol: plan.Protocols[at.Protocol], Port: uint16(at.Port)}, Affinity: affinity(f.Service), Sources: sources,
		}}
		to.Endpoints, to.Draining = f.endpoints(f.Service.Spec.Ports[i], dataplane.FamilyOf(at.Address))
		all = append(all, to)
	}
	slices.SortFunc(all, func(a, b Forward) int {
		return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port.Port, b.Port.Port))
	})
	return all, nil
}

// affinity is for how long a client gets the same endpoint again.
func affinity(s *corev1.Service) time.Duration {
	if s.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	seconds := corev1.DefaultClientIPServiceAffinitySeconds
	if c := s.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	return time.Duration(seconds) * time.Second
}

// sourcesOf are the clients that a Service lets in, nil for all.
func sourcesOf(s *corev1.Service) ([]netipx.IPRange, error) {
	ranges, err := loadbalancer.SourceRanges(s)
	if err != nil || len(ranges) == 0 {
		return nil, err
	}
	var b netipx.IPSetBuilder
	for _, p := range ranges {
		b.AddPrefix(p)
	}
	all, err := b.IPSet()
	if err != nil {
		return nil, fmt.Errorf("spec.loadBalancerSourceRanges: %w", err)
	}
	return append([]netipx.IPRange{}, all.Ranges()...), nil
}

// endpoints are those of a port in a family, sorted.
func (f Facts) endpoints(p corev1.ServicePort, family dataplane.Family) (ready, draining []netip.AddrPort) {
	switch f.Spec.Endpoints {
	case v2.EndpointsClusterIP:
		ready = f.clusterIP(p, family)
	case v2.EndpointsPod:
		ready, draining = f.pods(p, family)
	default:
		ready, draining = f.nodePorts(p, family)
	}
	for _, l := range []*[]netip.AddrPort{&ready, &draining} {
		slices.SortFunc(*l, netip.AddrPort.Compare)
		*l = slices.Compact(*l)
	}
	return ready, draining
}

// clusterIP is the Service's own address, as long as it has endpoints.
func (f Facts) clusterIP(p corev1.ServicePort, family dataplane.Family) []netip.AddrPort {
	if ready, draining := f.pods(p, family); len(ready)+len(draining) == 0 {
		return nil
	}
	return []netip.AddrPort{netip.AddrPortFrom(loadbalancer.ClusterIP(f.Service, family), uint16(p.Port))}
}

// nodePorts are the nodes that may forward to a port.
func (f Facts) nodePorts(p corev1.ServicePort, family dataplane.Family) (ready, draining []netip.AddrPort) {
	var only map[string]bool
	if f.Service.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		only = loadbalancer.WithEndpoints(f.Slices)
	}
	for _, n := range f.Nodes {
		for _, a := range n.addrs {
			if dataplane.FamilyOf(a) != family {
				continue
			}
			at := netip.AddrPortFrom(a, uint16(p.NodePort))
			if n.may && (only == nil || only[n.name]) {
				ready = append(ready, at)
			} else {
				draining = append(draining, at)
			}
		}
	}
	return ready, draining
}

// pods are those that are ready. If none is, pods that still serve while they end are better than none.
func (f Facts) pods(p corev1.ServicePort, family dataplane.Family) (ready, draining []netip.AddrPort) {
	n := 0
	for _, s := range f.Slices {
		n += len(s.Endpoints)
	}
	ready = make([]netip.AddrPort, 0, n) // nearly all are, of nearly all Services
	for _, s := range f.Slices {
		i := slices.IndexFunc(s.Ports, func(o discoveryv1.EndpointPort) bool {
			protocol := corev1.ProtocolTCP
			if o.Protocol != nil {
				protocol = *o.Protocol
			}
			return o.Port != nil && (o.Name == nil && p.Name == "" || o.Name != nil && *o.Name == p.Name) && protocol == cmp.Or(p.Protocol, corev1.ProtocolTCP)
		})
		if i < 0 {
			continue
		}
		for _, e := range s.Endpoints {
			for _, text := range e.Addresses[:min(1, len(e.Addresses))] { // others mean the same (EndpointSlice, addresses)
				a, err := netip.ParseAddr(text)
				if err != nil || dataplane.FamilyOf(a) != family {
					continue
				}
				at := netip.AddrPortFrom(a, uint16(*s.Ports[i].Port))
				switch c := e.Conditions; {
				case c.Ready == nil || *c.Ready:
					ready = append(ready, at)
				case c.Serving != nil && *c.Serving:
					draining = append(draining, at)
				}
			}
		}
	}
	if len(ready) == 0 {
		return draining, nil
	}
	return ready, draining
}

package plan

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/ipam"
)

// allowedNamespaces selects the namespaces whose pods may be clients, by their labels. On an error,
// the selector can't be understood, it selects none.
func allowedNamespaces(e *v2.Egress) (labels.Selector, error) {
	if e.Spec.AllowedNamespaces == nil {
		return labels.Everything(), nil
	}
	selector, err := metav1.LabelSelectorAsSelector(e.Spec.AllowedNamespaces)
	if err != nil {
		return labels.Nothing(), fmt.Errorf("spec.allowedNamespaces: %w", err)
	}
	return selector, nil
}

// AllowsNamespace says whether pods of a namespace with these labels may be clients.
func AllowsNamespace(e *v2.Egress, namespaceLabels map[string]string) (bool, error) {
	selector, err := allowedNamespaces(e)
	return selector.Matches(labels.Set(namespaceLabels)), err
}

// SameEgress says whether two states of an Egress are one to its clients and routers: metadata.generation
// counts changes of its spec and its deletion (Kubernetes API conventions), and of the status they use the
// ranges of the cluster. The rest of the status counts: each client that comes or goes changes it.
func SameEgress(a, b *v2.Egress) bool {
	return a.Generation == b.Generation && (a.Status.ObservedGeneration == 0) == (b.Status.ObservedGeneration == 0) &&
		slices.Equal(a.Status.InClusterCIDRs, b.Status.InClusterCIDRs)
}

// ClientEgressOf returns an Egress as a client uses it, by a Service that is nil if there
// is none. Its routers, and whether it has switched, aren't known yet.
func ClientEgressOf(e *v2.Egress, s *corev1.Service) ClientEgress {
	c := ClientEgress{
		Name:            e.Namespace + "/" + e.Name,
		Destinations:    validPrefixes(e.Spec.Destinations),
		InCluster:       validPrefixes(e.Status.InClusterCIDRs),
		SourcePortAuto:  e.Spec.FouSourcePortAuto,
		OriginatingOnly: e.Spec.OriginatingOnly,
		Direct:          e.Spec.Peering == v2.EgressPeeringDirect,
	}
	if s != nil {
		c.Peers = clusterIPs(s)
	}
	return c
}

// validPrefixes returns ranges without host bits, and without what the API server would refuse.
func validPrefixes(texts []string) []netip.Prefix {
	var all []netip.Prefix
	for _, t := range texts {
		if p, err := netip.ParsePrefix(t); err == nil {
			all = append(all, p.Masked())
		}
	}
	return all
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

package loadbalancer

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
)

// Of returns what a Service asks for, and what it has.
func Of(s *corev1.Service) Service {
	made := Service{
		UID: s.UID, Created: s.CreationTimestamp.Time, Pool: s.Annotations[v2.AnnotationPool],
		Both: s.Spec.IPFamilyPolicy != nil && *s.Spec.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack,
	}
	made.Name.Namespace, made.Name.Name = s.Namespace, s.Name
	for _, p := range s.Spec.Ports {
		made.Ports = append(made.Ports, Port{cmp.Or(p.Protocol, corev1.ProtocolTCP), uint16(p.Port)})
	}
	for _, f := range s.Spec.IPFamilies {
		made.Families = append(made.Families, map[corev1.IPFamily]dataplane.Family{corev1.IPv4Protocol: dataplane.IPv4, corev1.IPv6Protocol: dataplane.IPv6}[f])
	}
	if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		made.Endpoints = endpoints(s)
	}
	if group := s.Annotations[AnnotationSharing]; group == SharingNone {
		made.Alone = true
	} else {
		made.Group = group
	}
	// An owner who changes what the controller remembers gets another address, as one that was never given any.
	made.Has, _ = addresses(s.Annotations[AnnotationAssigned])
	where, text := "the annotation "+AnnotationWanted, s.Annotations[AnnotationWanted]
	if text == "" {
		where, text = "spec.loadBalancerIP", s.Spec.LoadBalancerIP
	}
	var err error
	if made.Wants, err = addresses(text); err != nil {
		made.Invalid = fmt.Sprintf("In %s, %v: write an address, or one of each family separated by a comma", where, err)
	}
	made.Kind()
	return made
}

// endpoints tells the endpoints of a Service from those of others. Those of a Service without a selector are its own.
func endpoints(s *corev1.Service) string {
	if len(s.Spec.Selector) == 0 {
		return s.Namespace + "/" + s.Name
	}
	var all []string
	for _, k := range slices.Sorted(maps.Keys(s.Spec.Selector)) {
		all = append(all, k+"="+s.Spec.Selector[k])
	}
	return s.Namespace + "?" + strings.Join(all, ",")
}

// addresses reads one address, or one of each family.
func addresses(text string) (addrs []netip.Addr, err error) {
	if text == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(part))
		switch {
		case err != nil || a.Zone() != "":
			return nil, fmt.Errorf("%.100q isn't an address", part)
		case slices.ContainsFunc(addrs, func(o netip.Addr) bool { return o.Is4() == a.Unmap().Is4() }):
			return nil, fmt.Errorf("%.100q has two addresses of one family", text)
		}
		addrs = append(addrs, a.Unmap())
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs, nil
}

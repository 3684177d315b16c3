// Package networkpolicy tells which NetworkPolicies let clients reach the pods of a Service by their source.
//
// It must not know which pods there are, nor what becomes of sources on the way.
package networkpolicy

import (
	"cmp"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Policies are the NetworkPolicies of a Service's namespace that are about ingress, as far as they matter for the Service.
type Policies struct {
	// wants are the ports of the Service's pods, in each of its families, by which clients reach the Service.
	wants []entrance
	// all are sorted by name. Those that let every source in count, too, where others select the same pod.
	all []policy
}

// entrance is a port of pods, in a family.
type entrance struct {
	protocol corev1.Protocol
	port     intstr.IntOrString
	family   corev1.IPFamily
}

// policy is a NetworkPolicy, and which entrances it opens for every source.
type policy struct {
	name   string
	pods   labels.Selector
	opens  []bool
	closes bool // not all of them
}

// Of returns the NetworkPolicies that matter for a Service, of those of its namespace.
func Of(s *corev1.Service, policies []*networkingv1.NetworkPolicy) (p Policies) {
	for _, port := range s.Spec.Ports {
		for _, f := range s.Spec.IPFamilies {
			e := entrance{cmp.Or(port.Protocol, corev1.ProtocolTCP), port.TargetPort, f}
			if e.port.Type == intstr.Int && e.port.IntVal == 0 {
				e.port = intstr.FromInt32(port.Port)
			}
			p.wants = append(p.wants, e)
		}
	}
	for _, n := range policies {
		pods, err := metav1.LabelSelectorAsSelector(&n.Spec.PodSelector)
		if err != nil || len(n.Spec.PolicyTypes) > 0 && !slices.Contains(n.Spec.PolicyTypes, networkingv1.PolicyTypeIngress) {
			continue
		}
		is := policy{name: n.Name, pods: pods}
		for _, e := range p.wants {
			opens := slices.ContainsFunc(n.Spec.Ingress, e.openedBy)
			is.opens, is.closes = append(is.opens, opens), is.closes || !opens
		}
		p.all = append(p.all, is)
	}
	slices.SortFunc(p.all, func(a, b policy) int { return cmp.Compare(a.name, b.name) })
	return p
}

// openedBy says whether a rule lets every source in by a port.
func (e entrance) openedBy(rule networkingv1.NetworkPolicyIngressRule) bool {
	if len(rule.Ports) > 0 && !slices.ContainsFunc(rule.Ports, e.isOneOf) {
		return false
	}
	return len(rule.From) == 0 || slices.ContainsFunc(rule.From, func(p networkingv1.NetworkPolicyPeer) bool {
		if p.IPBlock == nil || len(p.IPBlock.Except) > 0 {
			return false
		}
		all, err := netip.ParsePrefix(p.IPBlock.CIDR)
		return err == nil && all.Bits() == 0 && all.Addr().Is4() == (e.family == corev1.IPv4Protocol)
	})
}

// isOneOf says whether a port is, or may be, one of those that a NetworkPolicy means. Only pods know which number a name stands for.
func (e entrance) isOneOf(p networkingv1.NetworkPolicyPort) bool {
	protocol := corev1.ProtocolTCP
	if p.Protocol != nil {
		protocol = *p.Protocol
	}
	switch {
	case protocol != e.protocol:
		return false
	case p.Port == nil, p.Port.Type != e.port.Type:
		return true
	case p.Port.Type == intstr.Int && p.EndPort != nil:
		return p.Port.IntVal <= e.port.IntVal && e.port.IntVal <= *p.EndPort
	}
	return *p.Port == e.port
}

// Closing returns the names of those that don't let every source reach the Service, with the selectors of their pods.
func (p Policies) Closing() map[string]labels.Selector {
	closing := map[string]labels.Selector{}
	for _, is := range p.all {
		if is.closes {
			closing[is.name] = is.pods
		}
	}
	return closing
}

// Close returns the names of those that, taken together, don't let every source reach the Service at a pod; none if they do, or none selects the pod.
func (p Policies) Close(pod map[string]string) (names []string) {
	opened := make([]bool, len(p.wants))
	for _, is := range p.all {
		if !is.pods.Matches(labels.Set(pod)) {
			continue
		}
		for i, opens := range is.opens {
			opened[i] = opened[i] || opens
		}
		if is.closes {
			names = append(names, is.name)
		}
	}
	if !slices.Contains(opened, false) {
		return nil
	}
	return names
}

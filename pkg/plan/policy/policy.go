// Package policy says which pods EgressPolicies and EgressClusterPolicies select, which policy decides for a destination, what
// their Services and defaults mean, and what is wrong with them.
//
// It must not know how pods reach an Egress, nor what routers do.
package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// Policy is an EgressPolicy or an EgressClusterPolicy.
type Policy struct {
	// Name has no namespace if the policy is an EgressClusterPolicy.
	Name    types.NamespacedName
	UID     types.UID
	Created time.Time
	// Egress is the Egress that selected pods use. Its name is empty as long as it isn't known.
	Egress types.NamespacedName
	// Destinations are those of the policy; nil stands for all of the Egress's.
	Destinations []netip.Prefix
	// OnFailure is what becomes of packets that no router can forward.
	OnFailure v2.EgressFailure
	// Block is the AddressBlock of the floating address by which the pods leave; empty for none.
	Block string
	// Unresolved says that coil-egress-controller hasn't yet said what the policy's Services or default mean: which pods it
	// selects, or where their packets go, isn't known.
	Unresolved bool

	namespaces labels.Selector // nil: the policy's own namespace
	pods       []labels.Selector
	podCIDRs   []netip.Prefix
	anyPod     bool // it isn't known which pods of the namespace are selected
}

// Pod is a pod as policies see it.
type Pod struct {
	Namespace string
	// NamespaceLabels and Labels are those of the Namespace and of the Pod.
	NamespaceLabels, Labels map[string]string
	Addresses               []netip.Addr
}

// Of returns an EgressPolicy. The error says which selector can't be understood, so that the policy selects nothing.
func Of(p *v2.EgressPolicy) (Policy, error) {
	made := newPolicy(p, p.Spec.EgressUse, p.Status)
	made.podCIDRs = prefixes.Valid(p.Spec.PodCIDRs)
	selectors := resolvedPods(p)
	if p.Spec.Pods != nil {
		selectors = []metav1.LabelSelector{*p.Spec.Pods}
	}
	made.anyPod = len(p.Spec.Services) > 0 && made.stale(p.Generation, p.Status)
	made.Unresolved = made.Unresolved || made.anyPod
	return made, made.selectPods(selectors)
}

// OfCluster returns an EgressClusterPolicy. The error is as in Of.
func OfCluster(p *v2.EgressClusterPolicy) (Policy, error) {
	made := newPolicy(p, p.Spec.EgressUse, p.Status)
	made.podCIDRs = prefixes.Valid(p.Spec.PodCIDRs)
	namespaces, err := metav1.LabelSelectorAsSelector(&p.Spec.NamespaceSelector)
	if err != nil {
		made.namespaces = labels.Nothing()
		return made, fmt.Errorf("namespaceSelector: %w", err)
	}
	made.namespaces = namespaces
	if p.Spec.Pods == nil {
		return made, nil
	}
	return made, made.selectPods([]metav1.LabelSelector{*p.Spec.Pods})
}

func newPolicy(o metav1.Object, use v2.EgressUse, status v2.EgressPolicyStatus) Policy {
	p := Policy{
		Name: types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}, UID: o.GetUID(), Created: o.GetCreationTimestamp().Time,
		OnFailure: cmp.Or(use.OnFailure, v2.EgressFailureClosed),
	}
	if len(use.Destinations) > 0 {
		p.Destinations = append([]netip.Prefix{}, prefixes.Valid(use.Destinations)...) // never nil, which stands for all
	}
	ref := use.Egress
	if ref == nil {
		p.Unresolved = p.stale(o.GetGeneration(), status)
		if r := status.Resolved; r != nil {
			ref = r.Egress
		}
	}
	if r := status.Resolved; r != nil && r.Address != nil {
		p.Block = r.Address.Block
	}
	if ref != nil {
		p.Egress = types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
	}
	return p
}

// stale says whether status.resolved is about another generation.
func (Policy) stale(generation int64, status v2.EgressPolicyStatus) bool {
	return status.Resolved == nil || status.Resolved.ObservedGeneration != generation
}

func resolvedPods(p *v2.EgressPolicy) []metav1.LabelSelector {
	if p.Status.Resolved == nil || len(p.Spec.Services) == 0 {
		return nil
	}
	return p.Status.Resolved.Pods
}

func (p *Policy) selectPods(selectors []metav1.LabelSelector) error {
	for i := range selectors {
		s, err := metav1.LabelSelectorAsSelector(&selectors[i])
		if err != nil {
			p.pods = nil
			return fmt.Errorf("pods: %w", err)
		}
		p.pods = append(p.pods, s)
	}
	return nil
}

// Selects says whether a policy selects a pod, or may select it once it is resolved.
func (p Policy) Selects(pod Pod) bool {
	switch {
	case !p.Concerns(pod.Namespace, pod.NamespaceLabels):
		return false
	case p.anyPod:
		return true
	}
	return slices.ContainsFunc(p.pods, func(s labels.Selector) bool { return s.Matches(labels.Set(pod.Labels)) }) ||
		slices.ContainsFunc(p.podCIDRs, func(r netip.Prefix) bool { return slices.ContainsFunc(pod.Addresses, r.Contains) })
}

// Concerns says whether a policy may select pods of a namespace with some labels.
func (p Policy) Concerns(namespace string, namespaceLabels map[string]string) bool {
	if p.namespaces == nil {
		return p.Name.Namespace == namespace
	}
	return p.namespaces.Matches(labels.Set(namespaceLabels))
}

// String is the kind and the name of a policy.
func (p Policy) String() string {
	if p.Name.Namespace == "" {
		return "EgressClusterPolicy " + p.Name.Name
	}
	return "EgressPolicy " + p.Name.String()
}

// Compare orders policies by their precedence: the older one first, then by name, with EgressClusterPolicies before others. The
// first of those that have the same destination decides.
func Compare(a, b Policy) int {
	return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Name.Namespace, b.Name.Namespace), cmp.Compare(a.Name.Name, b.Name.Name))
}

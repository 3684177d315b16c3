package policy

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan"
	"github.com/coil-net/coil/pkg/plan/floating"
	"github.com/coil-net/coil/pkg/plan/prefixes"
)

// problem is why a policy isn't accepted, and what to do.
type problem struct{ reason, message string }

func problemf(reason, format string, args ...any) *problem {
	return &problem{reason, fmt.Sprintf(format, args...)}
}

// Uses returns the Egress that the pods use, nil if there is none.
func (f Facts) Uses() *v2.Egress {
	ref, _ := f.resolveEgress()
	if ref == nil {
		return nil
	}
	return f.Egress(nameOf(*ref))
}

// resolveEgress returns the Egress that the pods use, nil if there is none, and what is wrong with that.
func (f Facts) resolveEgress() (*v2.EgressReference, *problem) {
	if ref := f.Use.Egress; ref != nil {
		if f.Egress(nameOf(*ref)) == nil {
			return ref, problemf(ReasonEgressNotFound, "There is no Egress %s: make it, or correct spec.egress", nameOf(*ref))
		}
		return ref, nil
	}
	ns := f.Namespace
	if ns == nil {
		if f.Default == nil {
			return nil, problemf(ReasonNoDefaultEgress, "spec.egress isn't set, and the cluster has no default: set spec.egress, or spec.default of an Egress")
		}
		return refTo(f.Default), nil
	}
	const fix = "set spec.egress, the annotation " + v2.AnnotationEgress + " of the Namespace, or spec.default of an Egress"
	refused := ""
	if text := ns.Egress; text != "" {
		ref, ok := parseRef(text)
		if !ok {
			return nil, problemf(ReasonEgressNotFound, "The annotation %s of Namespace %s is %.100q, and not the namespace and the name of an Egress: correct it, as in internet/nat", v2.AnnotationEgress, ns.Name, text)
		}
		e := f.Egress(nameOf(ref))
		if e == nil {
			return nil, problemf(ReasonEgressNotFound, "There is no Egress %s, which the annotation %s of Namespace %s names: make it, or correct the annotation", nameOf(ref), v2.AnnotationEgress, ns.Name)
		}
		if allowed, _ := plan.AllowsNamespace(e, ns.Labels); allowed {
			return &ref, nil
		}
		refused = fmt.Sprintf("; Egress %s, the default of the Namespace, doesn't allow it (spec.allowedNamespaces)", nameOf(ref))
	}
	if f.Default == nil {
		return nil, problemf(ReasonNoDefaultEgress, "spec.egress isn't set, and there is no default%s: %s", refused, fix)
	}
	if allowed, _ := plan.AllowsNamespace(f.Default, ns.Labels); !allowed {
		return nil, problemf(ReasonNoDefaultEgress, "spec.egress isn't set, and Egress %s, the default of the cluster, doesn't allow Namespace %s (spec.allowedNamespaces)%s: %s",
			nameOf(*refTo(f.Default)), ns.Name, refused, fix)
	}
	return refTo(f.Default), nil
}

func refTo(e *v2.Egress) *v2.EgressReference {
	return &v2.EgressReference{Namespace: e.Namespace, Name: e.Name}
}

func nameOf(r v2.EgressReference) types.NamespacedName {
	return types.NamespacedName{Namespace: r.Namespace, Name: r.Name}
}

// parseRef reads an annotation of a Namespace.
func parseRef(text string) (v2.EgressReference, bool) {
	namespace, name, _ := strings.Cut(strings.TrimSpace(text), "/")
	// Others couldn't be written to the status.
	ok := len(validation.IsDNS1123Label(namespace)) == 0 && len(validation.IsDNS1035Label(name)) == 0
	return v2.EgressReference{Namespace: namespace, Name: name}, ok
}

// resolveServices returns the selectors of the Services, and what is wrong with these. As long as one has no selector, those of
// the present status stay if they are of the same spec: pods don't leave by their node because their Service is made anew.
func (f Facts) resolveServices() (selectors []metav1.LabelSelector, problems []*problem) {
	var missing, bare []string
	for _, name := range f.Services {
		s := f.Service(name)
		switch {
		case s == nil:
			missing = append(missing, name)
		case len(s.Spec.Selector) == 0 || s.Spec.Type == corev1.ServiceTypeExternalName:
			bare = append(bare, name)
		default:
			selectors = appendNew(selectors, metav1.LabelSelector{MatchLabels: maps.Clone(s.Spec.Selector)})
		}
	}
	const kept = "Until then pods stay selected that a Service here has selected since spec was changed last"
	if len(missing) > 0 {
		problems = append(problems, problemf(ReasonServiceNotFound, "There is no Service %s in the namespace: make it, or take it out of spec.services. %s", plan.Enumerate(missing), kept))
	}
	if len(bare) > 0 {
		problems = append(problems, problemf(ReasonServiceWithoutSelector, "Service %s has no selector: name one that has, or choose pods by spec.pods. %s", plan.Enumerate(bare), kept))
	}
	if r := f.Status.Resolved; len(problems) > 0 && r != nil && r.ObservedGeneration == f.Generation {
		for _, s := range r.Pods {
			selectors = appendNew(selectors, s)
		}
	}
	return selectors[:min(len(selectors), maxSelectors)], problems
}

// maxSelectors is how many selectors status.resolved may have.
const maxSelectors = 32

func appendNew(all []metav1.LabelSelector, s metav1.LabelSelector) []metav1.LabelSelector {
	if slices.ContainsFunc(all, func(o metav1.LabelSelector) bool { return reflect.DeepEqual(o, s) }) {
		return all
	}
	return append(all, s)
}

// checkDestinations says which destinations can't be had through the Egress.
func (f Facts) checkDestinations(e *v2.Egress) (problems []*problem) {
	name := nameOf(*refTo(e))
	whole, inCluster := prefixes.Valid(e.Spec.Destinations), prefixes.Valid(e.Status.InClusterCIDRs)
	var outside, inside []string
	for _, d := range f.Policy.Destinations {
		switch around := around(d, whole); {
		case len(around) == 0:
			outside = append(outside, d.String())
		case spared(d, around, inCluster):
			inside = append(inside, d.String())
		}
	}
	if len(outside) > 0 {
		problems = append(problems, problemf(ReasonDestinationOutside,
			"Destination %s is within no destination of Egress %s: add it there, or take it out here. Private networks aren't within ranges with public addresses, such as 0.0.0.0/0, and link-local ones are reached without an Egress", plan.Enumerate(outside), name))
	}
	if len(inside) > 0 {
		problems = append(problems, problemf(ReasonDestinationInCluster,
			"Destination %s is inside of the cluster (status.inClusterCIDRs of Egress %s), which is reached without it: take it out", plan.Enumerate(inside), name))
	}
	return problems
}

// Captures says whether clients of an Egress reach an address through its routers.
func Captures(e *v2.Egress, a netip.Addr) bool {
	d := netip.PrefixFrom(a, a.BitLen())
	around := around(d, prefixes.Valid(e.Spec.Destinations))
	return len(around) > 0 && !spared(d, around, prefixes.Valid(e.Status.InClusterCIDRs))
}

// around returns the destinations of an Egress that have all of d. A private network is reached through private ones alone, and a
// link-local one through none.
func around(d netip.Prefix, whole []netip.Prefix) []netip.Prefix {
	switch {
	case prefixes.Within(d, dataplane.LinkLocalRanges):
		return nil
	case prefixes.Within(d, dataplane.PrivateRanges):
		whole = prefixes.Private(whole)
	}
	var all []netip.Prefix
	for _, w := range whole {
		if prefixes.Within(d, []netip.Prefix{w}) {
			all = append(all, w)
		}
	}
	return all
}

// spared says whether clients keep d, which is within destinations of an Egress, off its routers, since it is in the
// cluster. See cluster.Ranges: of private ranges of the cluster a smaller destination is captured.
func spared(d netip.Prefix, around, inCluster []netip.Prefix) bool {
	return slices.ContainsFunc(inCluster, func(r netip.Prefix) bool {
		if !prefixes.Within(d, []netip.Prefix{r}) {
			return false
		}
		captured := prefixes.Within(r, dataplane.PrivateRanges) && slices.ContainsFunc(around, func(w netip.Prefix) bool {
			return w.Bits() > r.Bits() // both have d in them
		})
		return !captured
	})
}

// resolveAddress returns the floating address by which the pods leave; nil if the Egress has none, or none for them.
func (f Facts) resolveAddress(e *v2.Egress) (*v2.ResolvedAddress, *problem) {
	name := nameOf(*refTo(e))
	wants := f.Use.Address
	if !e.Spec.Addresses.For(v2.EgressAddressOfClient) {
		if wants != nil {
			return nil, problemf(ReasonNoAddresses, "Egress %s has no addresses for policies (spec.addresses with use: Client): give it some, or take spec.address out", name)
		}
		return nil, nil
	}
	if a := plan.AddressOf(e, f.Given.Address); a != nil && f.Given.Address != "" {
		return &v2.ResolvedAddress{Block: a.Block, EgressAddress: a.EgressAddress}, nil
	}
	switch f.Given.Reason {
	case "": // nothing was asked for: the policy isn't followed
		return nil, nil
	case floating.NoSuchAddress:
		return nil, problemf(string(f.Given.Reason), "Egress %s doesn't have %s as one address (status.addresses): name one that it has", name, wants)
	case floating.AddressTaken:
		return nil, problemf(string(f.Given.Reason), "%s belongs to another namespace: name another one, or have it added to spec.addresses.shared of Egress %s", wants, name)
	case floating.AddressFull:
		return nil, problemf(string(f.Given.Reason), "%s has as many policies as it may (spec.addresses.assignment of Egress %s): name another one", wants, name)
	}
	if len(e.Status.Addresses) == 0 {
		return nil, problemf(string(f.Given.Reason), "Egress %s has got no address yet: its condition %s says why", name, v2.EgressAddressesReady)
	}
	return nil, problemf(string(f.Given.Reason), "Egress %s has no address left for this namespace: give it more (spec.addresses)", name)
}

// Wanted returns the block of the address that a policy names: empty if it names none, and a name that no block has if the Egress doesn't
// have the address.
func Wanted(e *v2.Egress, a *v2.EgressAddress) string {
	if a == nil {
		return ""
	}
	for _, s := range e.Status.Addresses {
		if a.IPv4 != "" && !same(a.IPv4, s.IPv4) || a.IPv6 != "" && !same(a.IPv6, s.IPv6) {
			continue
		}
		return s.Block
	}
	return "none: " + a.String()
}

// same says whether two texts are one address.
func same(a, b string) bool {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	return errX == nil && errY == nil && x == y
}

package loadbalancer

import (
	"cmp"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/ipam"
)

// State is what a Service is to say.
type State struct {
	// Addresses are those that it is to have. None are known as long as its claim has no answer.
	Addresses ipam.Address
	// FloatingIP is told instead of the IPv4 address, if it is valid.
	FloatingIP netip.Addr
	// Served says that a place answers for the addresses, and forwards to the Service.
	Served bool
	// Assigned and Serving are its conditions, without times.
	Assigned, Serving metav1.Condition
	// Policies is its condition of NetworkPolicies; one without a status is to go, and nil leaves the Service as it is.
	Policies *metav1.Condition
	Now      metav1.Time
}

// Step is the next write into a Service. Metadata and status can't be written together.
type Step struct {
	// Metadata is the Service with other annotations and finalizers, nil if these stay.
	Metadata *corev1.Service
	// Status is the Service with another status, nil if that stays, or if Metadata comes first.
	Status *corev1.Service
}

// Release returns the next step of a Service that is to have no address any more: it is deleted, or of another type or class. No step is left when all that Coil
// wrote into it is gone. The status goes first, so that nobody reads an address there that somebody else may get.
func Release(s *corev1.Service) Step {
	if !Taken(s) {
		return Step{}
	}
	next := s.DeepCopy()
	if !remembers(s) && slices.Contains(s.Finalizers, Finalizer) { // afterwards nothing says that the finalizer is Coil's
		next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == Finalizer })
		return Step{Metadata: next}
	}
	next.Status.LoadBalancer.Ingress = foreign(s)
	for _, c := range []string{ConditionAssigned, ConditionServed, ConditionPolicies} {
		meta.RemoveStatusCondition(&next.Status.Conditions, c)
	}
	if !equal(s.Status, next.Status) {
		return Step{Status: next}
	}
	delete(next.Annotations, AnnotationAssigned)
	delete(next.Annotations, AnnotationFloatingIP)
	next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == Finalizer })
	return Step{Metadata: next}
}

// Serve returns the next step of a Service that is to have addresses. The finalizer comes first. The addresses are remembered before they are told, and told
// when they are served; those that it had are taken out of the status before they are forgotten.
func Serve(s *corev1.Service, want State) Step {
	next := s.DeepCopy()
	status := func(ingress []corev1.LoadBalancerIngress) Step {
		next.Status.LoadBalancer.Ingress = ingress
		conditions := []metav1.Condition{want.Assigned, want.Serving}
		switch {
		case want.Policies == nil:
		case want.Policies.Status == "":
			meta.RemoveStatusCondition(&next.Status.Conditions, ConditionPolicies)
		default:
			conditions = append(conditions, *want.Policies)
		}
		for _, c := range conditions {
			c.ObservedGeneration, c.LastTransitionTime = s.Generation, want.Now
			meta.SetStatusCondition(&next.Status.Conditions, c)
		}
		if equal(s.Status, next.Status) {
			return Step{}
		}
		return Step{Status: next}
	}
	if !slices.Contains(next.Finalizers, Finalizer) {
		next.Finalizers = append(next.Finalizers, Finalizer)
	}
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, AnnotationAssigned, text(want.Addresses.Addrs()))
	if want.FloatingIP.IsValid() {
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, AnnotationFloatingIP, want.FloatingIP.String())
	} else {
		delete(next.Annotations, AnnotationFloatingIP)
	}
	others := !maps.Equal(s.Annotations, next.Annotations)
	wanted, isOurs := ingress(s, want), isOwn(s)
	stay := slices.DeleteFunc(slices.Clone(s.Status.LoadBalancer.Ingress), func(i corev1.LoadBalancerIngress) bool {
		return isOurs(i) && !slices.ContainsFunc(wanted, func(w corev1.LoadBalancerIngress) bool { return w.IP == i.IP })
	})
	if others && len(stay) < len(s.Status.LoadBalancer.Ingress) {
		return status(stay)
	}
	if others || !slices.Equal(s.Finalizers, next.Finalizers) {
		return Step{Metadata: next}
	}
	told := own(s)
	switch {
	case want.Served:
		told = ingress(s, want)
	case !slices.EqualFunc(told, ingress(s, want), same):
		told = nil // of other families
	}
	return status(append(foreign(s), told...))
}

// ingress are the entries of a Service's status for addresses, in the order of the Service's families.
func ingress(s *corev1.Service, want State) (all []corev1.LoadBalancerIngress) {
	for _, f := range s.Spec.IPFamilies {
		a := want.Addresses.IPv4
		if want.FloatingIP.IsValid() {
			a = want.FloatingIP
		}
		if f == corev1.IPv6Protocol {
			a = want.Addresses.IPv6
		}
		if a.IsValid() {
			all = append(all, corev1.LoadBalancerIngress{IP: a.String(), IPMode: new(corev1.LoadBalancerIPModeVIP)})
		}
	}
	return all
}

// Told are the addresses that a Service should tell once it is served, those of Coil's that it tells, and those of others.
func Told(s *corev1.Service, want State) (should, does, others []string) {
	texts := func(entries []corev1.LoadBalancerIngress) (all []string) {
		for _, e := range entries {
			all = append(all, cmp.Or(e.IP, e.Hostname))
		}
		return all
	}
	return texts(ingress(s, want)), texts(own(s)), texts(foreign(s))
}

// FloatingIP is the floating IP that a Service remembers; none or one.
func FloatingIP(s *corev1.Service) []netip.Addr {
	all, _ := addresses(s.Annotations[AnnotationFloatingIP])
	return all
}

func same(a, b corev1.LoadBalancerIngress) bool { return reflect.DeepEqual(a, b) }

// isOwn says whether an entry of a Service's status is about an address that Coil gave to the Service. If the annotation was taken away that remembers these, all entries may be.
func isOwn(s *corev1.Service) func(corev1.LoadBalancerIngress) bool {
	if Taken(s) && !remembers(s) {
		return func(i corev1.LoadBalancerIngress) bool { return i.IP != "" }
	}
	has, _ := addresses(s.Annotations[AnnotationAssigned])
	has = append(has, FloatingIP(s)...)
	return func(i corev1.LoadBalancerIngress) bool {
		a, err := netip.ParseAddr(i.IP)
		return err == nil && slices.Contains(has, a)
	}
}

// own and foreign are the entries of a Service's status that Coil wrote, and those that somebody else wrote, whose they stay.
func own(s *corev1.Service) []corev1.LoadBalancerIngress {
	is := isOwn(s)
	return slices.DeleteFunc(slices.Clone(s.Status.LoadBalancer.Ingress), func(i corev1.LoadBalancerIngress) bool { return !is(i) })
}

func foreign(s *corev1.Service) []corev1.LoadBalancerIngress {
	return slices.DeleteFunc(slices.Clone(s.Status.LoadBalancer.Ingress), isOwn(s))
}

// text is the form of addresses in an annotation.
func text(addrs []netip.Addr) string {
	sorted := slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare)
	all := make([]string, len(sorted))
	for i, a := range sorted {
		all[i] = a.String()
	}
	return strings.Join(all, ",")
}

// equal compares what Coil writes into a status. No entry and none at all are the same.
func equal(a, b corev1.ServiceStatus) bool {
	return slices.EqualFunc(a.LoadBalancer.Ingress, b.LoadBalancer.Ingress, same) &&
		slices.EqualFunc(a.Conditions, b.Conditions, func(x, y metav1.Condition) bool { return x == y })
}

// Managed says whether a Service is Coil's to serve. One without a class is if all of those are to be, unless somebody else has told addresses in its status.
func Managed(s *corev1.Service, withoutClass bool) bool {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer || s.DeletionTimestamp != nil {
		return false
	}
	if class := s.Spec.LoadBalancerClass; class != nil {
		return *class == Class
	}
	return withoutClass && (Taken(s) || len(s.Status.LoadBalancer.Ingress) == 0)
}

// Taken says whether a Service has anything from Coil. The annotation, which may be empty, comes and goes together with the finalizer, which other
// controllers of load balancers write, too. An owner who replaces the Service may take the annotation away; the status, in which only Coil writes the condition, stays.
func Taken(s *corev1.Service) bool {
	return remembers(s) || meta.FindStatusCondition(s.Status.Conditions, ConditionAssigned) != nil
}

// remembers says whether a Service has the annotation with its addresses.
func remembers(s *corev1.Service) bool {
	_, ok := s.Annotations[AnnotationAssigned]
	return ok
}

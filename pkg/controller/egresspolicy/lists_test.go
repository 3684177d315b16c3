package egresspolicy

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/egress"
	"github.com/coil-net/coil/pkg/plan/policy"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// listNaming lists the pods that name Egresses, as another controller does.
func (sc *scene) listNaming() {
	namespaces := func(name string) labels.Set {
		if ns := fakeapi.Find[*metav1.PartialObjectMetadata](sc.s, nsResource, name); ns != nil {
			return ns.Labels
		}
		return nil
	}
	for _, e := range fakeapi.All[*v2.Egress](sc.s, egressResource) {
		list := egress.ListOf(e)
		pods := slices.DeleteFunc(fakeapi.All[*corev1.Pod](sc.s, podResource), func(p *corev1.Pod) bool { return !slices.Contains(egressesOfPod(p), keyOf(e).String()) })
		have := slices.DeleteFunc(fakeapi.All[*discoveryv1.EndpointSlice](sc.s, sliceResource), func(s *discoveryv1.EndpointSlice) bool {
			return s.Namespace != e.Namespace || s.Labels[list.Label] != e.Name
		})
		clients, _, _ := egress.Clients(egress.ClientFacts{Egress: e, Pods: pods, Namespaces: namespaces})
		changes := egress.ClientSlices(have, egress.EndpointsPerSlice, list.With(clients))
		for _, s := range slices.Concat(changes.Create, changes.Update) {
			sc.s.Put(sliceResource, s)
		}
		for _, s := range changes.Delete {
			sc.s.Drop(sliceResource, s.Namespace+"/"+s.Name)
		}
	}
}

// byPolicies returns the slices in which policies list clients.
func (sc *scene) byPolicies() []*discoveryv1.EndpointSlice {
	return slices.DeleteFunc(fakeapi.All[*discoveryv1.EndpointSlice](sc.s, sliceResource), func(s *discoveryv1.EndpointSlice) bool { return len(egressOfSlice(s)) > 0 })
}

// listed returns "pod address" of the clients of a policy, by the Egress that they are listed for.
func (sc *scene) listed(key types.NamespacedName) map[string][]string {
	all := map[string][]string{}
	for _, s := range fakeapi.All[*discoveryv1.EndpointSlice](sc.s, sliceResource) {
		origin, err := policy.ParseOrigin(s.Annotations[v2.AnnotationPolicy])
		if err != nil || origin.Policy() != key {
			continue
		}
		egress := s.Namespace + "/" + s.Labels[v2.LabelPolicyEgress]
		for _, ep := range s.Endpoints {
			all[egress] = append(all[egress], ep.TargetRef.Namespace+"/"+ep.TargetRef.Name+" "+ep.Addresses[0])
		}
		slices.Sort(all[egress])
	}
	return all
}

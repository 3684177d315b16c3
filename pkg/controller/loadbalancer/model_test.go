package loadbalancer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
	"github.com/coil-net/coil/pkg/testkit"
	"github.com/coil-net/coil/pkg/testkit/fakeapi"
)

// TestRandomHistories has caches that lag, lost answers, controllers that end, and Services, nodes and endpoints that come, change and go. Services that nobody
// changes keep their addresses all the time. In the end each Service has what it is to have, and nothing is left of those that are gone.
func TestRandomHistories(t *testing.T) {
	var seen sums
	for seed := range uint64(testkit.LBForm.Times(40, 2000)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inScene(t, func(t *testing.T, sc *scene) {
				h := &history{sc, rand.New(rand.NewPCG(seed, 11))}
				calm := map[string]string{}
				for i := range 4 {
					sc.service(fmt.Sprint("calm-", i), func(s *corev1.Service) { s.Spec.Ports[0].Port = int32(80 + i%2) })
				}
				sc.run(3 * time.Second)
				for i := range 4 {
					name := fmt.Sprint("calm-", i)
					if calm[name] = told(sc.find(name)); calm[name] == "" {
						t.Fatalf("%s has no address", name)
					}
				}
				faults := rand.New(rand.NewPCG(seed, 12))
				sc.s.Fault = func(verb, _ string) (before, after error) {
					switch {
					case faults.IntN(10) > 0:
						return nil, nil
					case faults.IntN(2) == 0:
						return fakeapi.ErrLost, nil
					}
					return nil, fakeapi.ErrLost
				}
				for range 200 {
					h.step()
					if h.r.IntN(30) == 0 { // and another one takes over
						sc.stop()
						sc.start()
					}
					if h.r.IntN(2) == 0 {
						sc.play()
					}
					if h.r.IntN(3) == 0 {
						if h.r.IntN(4) == 0 {
							watched := []string{serviceResource, nodeResource, sliceResource, claimResource, blockResource}
							sc.DeliverOf(watched[h.r.IntN(len(watched))])
						} else {
							sc.Deliver(h.r.IntN(20))
						}
						time.Sleep(time.Duration(h.r.IntN(1000)) * time.Millisecond)
						synctest.Wait()
					}
					for name, addr := range calm {
						if got := told(sc.find(name)); got != addr {
							t.Fatalf("%s had %q, and has %q now", name, addr, got)
						}
					}
				}
				sc.s.Fault = nil
				sc.run(time.Minute)
				h.check(&seen)
				before := sc.s.Events()
				sc.run(5 * time.Minute)
				if n := sc.s.Events() - before; n > 0 {
					t.Log(sc.s.Calls())
					for _, s := range fakeapi.All[*corev1.Service](sc.s, serviceResource) {
						t.Log(s.Name, s.CreationTimestamp, s.Annotations, s.Spec.Ports, s.Spec.IPFamilies, s.Spec.Type, s.Status.Conditions)
					}
					for _, s := range fakeapi.All[*v2.AddressClaim](sc.s, claimResource) {
						t.Log(s.Name, s.Spec, s.Status.Addresses)
					}
					for _, s := range fakeapi.All[*v2.AddressBlock](sc.s, blockResource) {
						t.Log(s.Name, s.Floating)
					}
					t.Errorf("%d writes without a reason", n)
				}
			})
		})
	}
	if seen.served < 200 || seen.shared < 40 || seen.refused < 10 || seen.local < 10 || seen.late < 5 {
		t.Errorf("the histories hardly test: %+v", seen)
	}
}

// sums says what there was at the end of histories.
type sums struct{ served, shared, refused, local, late int }

// history changes everything at random.
type history struct {
	*scene
	r *rand.Rand
}

func (h *history) step() {
	name := fmt.Sprint("s-", h.r.IntN(8))
	switch h.r.IntN(12) {
	case 0:
		h.node(h.r.IntN(3), h.r.IntN(3) > 0)
	case 1:
		if h.find(name) != nil {
			h.service(name, deleted)
		}
	case 2:
		h.endpoints(name)
	case 3:
		if all := fakeapi.All[*v2.AddressClaim](h.s, claimResource); len(all) > 0 && h.r.IntN(4) == 0 {
			h.s.Drop(claimResource, namespace+"/"+all[h.r.IntN(len(all))].Name)
		}
	default:
		if s := h.find(name); s != nil && s.DeletionTimestamp != nil {
			return
		}
		h.service(name, h.change)
	}
}

// change changes what a Service asks for.
func (h *history) change(s *corev1.Service) {
	switch h.r.IntN(8) {
	case 0, 1:
		s.Spec.Ports = []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: int32(80 + h.r.IntN(4))}}
		if h.r.IntN(3) == 0 {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Protocol: corev1.ProtocolUDP, Port: 53})
		}
	case 2:
		s.Annotations[loadbalancer.AnnotationWanted] = []string{"", "", "", elsewhere, "2001:db8::a", "198.51.100.3", "203.0.113.1", "nonsense"}[h.r.IntN(8)]
	case 3:
		s.Annotations[v2.AnnotationPool] = []string{"", "four", "one", "one", "one", "none"}[h.r.IntN(6)]
	case 4:
		s.Annotations[loadbalancer.AnnotationSharing] = []string{"", "none", "group"}[h.r.IntN(3)]
	case 5:
		s.Spec.Type = []corev1.ServiceType{corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeClusterIP}[h.r.IntN(2)]
	case 6:
		s.Spec.IPFamilies = [][]corev1.IPFamily{{corev1.IPv4Protocol}, {corev1.IPv6Protocol}, {corev1.IPv4Protocol, corev1.IPv6Protocol}}[h.r.IntN(3)]
	case 7:
		s.Spec.ExternalTrafficPolicy = []corev1.ServiceExternalTrafficPolicy{corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal}[h.r.IntN(2)]
	}
}

// endpoints puts the endpoint of a Service on another node.
func (h *history) endpoints(name string) {
	s := fakeapi.Find[*discoveryv1.EndpointSlice](h.s, sliceResource, "shop/"+name)
	if s == nil {
		s = &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}}}
	}
	s.Endpoints = []discoveryv1.Endpoint{{NodeName: new(fmt.Sprint("n", h.r.IntN(3)))}}
	h.s.Put(sliceResource, s)
}

// fits says whether a Service can share the only address of the pool "one" with all that have it.
func (h *history) fits(s *corev1.Service) bool {
	for _, o := range fakeapi.All[*corev1.Service](h.s, serviceResource) {
		if o.Annotations[loadbalancer.AnnotationAssigned] != "203.0.113.9" {
			continue
		}
		if o.Annotations[loadbalancer.AnnotationSharing] != s.Annotations[loadbalancer.AnnotationSharing] || s.Annotations[loadbalancer.AnnotationSharing] == loadbalancer.SharingNone ||
			loadbalancer.NeedsEndpoints(o) && loadbalancer.NeedsEndpoints(s) {
			return false
		}
		for _, p := range s.Spec.Ports {
			if slices.ContainsFunc(o.Spec.Ports, func(has corev1.ServicePort) bool { return has.Protocol == p.Protocol && has.Port == p.Port }) {
				return false
			}
		}
	}
	return true
}

// check holds the Services against a plain reading of what they are to have.
func (h *history) check(seen *sums) {
	h.t.Helper()
	owner := map[string]string{} // of address, protocol and port
	users := map[netip.Addr]int{}
	waiting := 0
	var late []*corev1.Service // those that wait as their pool is exhausted
	for _, s := range fakeapi.All[*corev1.Service](h.s, serviceResource) {
		annotation, taken := s.Annotations[loadbalancer.AnnotationAssigned]
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			if taken || len(s.Finalizers)+len(s.Status.LoadBalancer.Ingress)+len(s.Status.Conditions) > 0 {
				h.t.Errorf("%s isn't Coil's any more: %q, %v, %+v", s.Name, annotation, s.Finalizers, s.Status)
			}
			continue
		}
		assigned, served := meta.FindStatusCondition(s.Status.Conditions, loadbalancer.ConditionAssigned), meta.FindStatusCondition(s.Status.Conditions, loadbalancer.ConditionServed)
		if !taken || !slices.Contains(s.Finalizers, loadbalancer.Finalizer) || assigned == nil || served == nil {
			h.t.Errorf("%s: %v, %v, %+v", s.Name, s.Annotations, s.Finalizers, s.Status)
			continue
		}
		if assigned.Reason == loadbalancer.ReasonWaits && s.Annotations[v2.AnnotationPool] == "one" && s.Annotations[loadbalancer.AnnotationWanted] == "" {
			late = append(late, s)
			continue
		}
		if (assigned.Status == metav1.ConditionTrue) != (annotation != "") || served.Status == metav1.ConditionTrue && annotation == "" ||
			assigned.Reason == loadbalancer.ReasonWaits && (s.Annotations[loadbalancer.AnnotationWanted] != elsewhere || !strings.Contains(assigned.Message, "AddressTaken: It belongs to an Egress")) {
			h.t.Errorf("%s has %q, and says %+v, %+v", s.Name, annotation, assigned, served)
		}
		if assigned.Reason == loadbalancer.ReasonWaits {
			waiting = 1
		}
		if annotation == "" {
			seen.refused++
			if told(s) != "" {
				h.t.Errorf("%s has no address, and tells %s", s.Name, told(s))
			}
			continue
		}
		for text := range strings.SplitSeq(annotation, ",") {
			a := netip.MustParseAddr(text)
			users[a]++
			if users[a] == 2 {
				seen.shared++
			}
			for _, f := range s.Spec.IPFamilies {
				if a.Is4() != (f == corev1.IPv4Protocol) {
					continue
				}
				for _, p := range s.Spec.Ports {
					key := fmt.Sprint(a, p.Protocol, p.Port)
					if other := owner[key]; other != "" {
						h.t.Errorf("%s and %s have both %s", s.Name, other, key)
					}
					owner[key] = s.Name
				}
			}
		}
		if loadbalancer.NeedsEndpoints(s) {
			seen.local++
		}
		if served.Status == metav1.ConditionTrue {
			seen.served++
			if told(s) == "" {
				h.t.Errorf("%s is served, and tells nothing: %+v", s.Name, s.Status)
			}
		} else if !loadbalancer.NeedsEndpoints(s) {
			h.t.Errorf("%s isn't served: %+v", s.Name, served)
		}
	}
	for _, s := range late {
		seen.late++
		if h.fits(s) {
			h.t.Errorf("%s waits for an address, and could have 203.0.113.9: %+v", s.Name, s.Status.Conditions)
		}
	}
	for _, a := range fakeapi.All[*v2.AddressClaim](h.s, claimResource) {
		if a.Spec.Pool == "one" && len(a.Status.Addresses) == 0 && len(late) > 0 {
			continue
		}
		if len(a.Spec.Addresses) == 1 && a.Spec.Addresses[0] == elsewhere && waiting > 0 {
			waiting-- // one claim for all that wait
			continue
		}
		if !slices.ContainsFunc(loadbalancer.AddressOf(a).Addrs(), func(addr netip.Addr) bool { return users[addr] > 0 }) {
			h.t.Errorf("the claim %s of %s is left", a.Name, loadbalancer.AddressOf(a))
		}
	}
	for _, b := range fakeapi.All[*v2.AddressBlock](h.s, blockResource) {
		a := fakeapi.Find[*v2.AddressClaim](h.s, claimResource, namespace+"/"+b.Floating.Claim)
		if a == nil {
			h.t.Errorf("%s is left", b.Name)
			continue
		}
		for _, p := range b.Floating.Ports {
			if !slices.ContainsFunc(loadbalancer.AddressOf(a).Addrs(), func(addr netip.Addr) bool { return owner[fmt.Sprint(addr, p.Protocol, p.Port)] != "" }) {
				h.t.Errorf("%s takes packets for port %v, which no Service has", b.Name, p)
			}
		}
	}
}

package loadbalancer_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/coil-net/coil/pkg/ipam"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// others are what others write into a Service, and keep.
var (
	othersEntries    = []corev1.LoadBalancerIngress{{IP: "203.0.113.9"}, {Hostname: "lb.example.org"}}
	othersConditions = []metav1.Condition{{Type: "example.org/Told", Status: metav1.ConditionTrue, Reason: "Told"}}
)

func desired(r *rand.Rand) loadbalancer.State {
	var addrs []netip.Addr
	for _, format := range []string{"192.0.2.%d", "2001:db8::%d"} {
		if r.IntN(4) > 0 {
			addrs = append(addrs, netip.MustParseAddr(fmt.Sprintf(format, 1+r.IntN(2))))
		}
	}
	status := []metav1.ConditionStatus{metav1.ConditionTrue, metav1.ConditionFalse}
	addr, floating := ipam.AddressOf(addrs...), netip.Addr{}
	if addr.IPv4.IsValid() && r.IntN(2) == 0 {
		floating = netip.MustParseAddr(fmt.Sprintf("198.51.100.%d", 1+r.IntN(2)))
	}
	return loadbalancer.State{
		FloatingIP: floating,
		Addresses:  ipam.AddressOf(addrs...), Served: len(addrs) > 0 && r.IntN(2) == 0, Now: metav1.Unix(1, 0),
		Assigned: metav1.Condition{Type: loadbalancer.ConditionAssigned, Status: status[r.IntN(2)], Reason: "A"},
		Serving:  metav1.Condition{Type: loadbalancer.ConditionServed, Status: status[r.IntN(2)], Reason: "S"},
		Policies: []*metav1.Condition{{Type: loadbalancer.ConditionPolicies, Status: metav1.ConditionFalse, Reason: "P"}, {}}[r.IntN(2)],
	}
}

func isOthers(i corev1.LoadBalancerIngress) bool {
	return slices.ContainsFunc(othersEntries, func(o corev1.LoadBalancerIngress) bool { return o.IP == i.IP && o.Hostname == i.Hostname })
}

// told returns the addresses in the status of a Service that others haven't written.
func told(s *corev1.Service) (all []string) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		if !isOthers(i) {
			all = append(all, i.IP)
		}
	}
	return all
}

// A Service comes to what it is to say in a few steps, whatever it said before and however often that changes in between. No address is told that isn't
// remembered, none is remembered without the finalizer, and what others wrote stays.
func TestSteps(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 2))
		s := kubernetes(func(s *corev1.Service) {
			s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}[r.IntN(2):]
			s.Finalizers = []string{"example.org/f"}
			s.Annotations["example.org/a"] = "x"
			s.Status = corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: slices.Clone(othersEntries)}, Conditions: slices.Clone(othersConditions)}
		})
		want, release := desired(r), false
		next := func() loadbalancer.Step {
			if release {
				return loadbalancer.Release(s)
			}
			return loadbalancer.Serve(s, want)
		}
		for n := range 20 {
			if r.IntN(3) == 0 {
				want, release = desired(r), r.IntN(4) == 0
			}
			if r.IntN(8) == 0 {
				s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}[r.IntN(2):]
			}
			step := next()
			if step.Metadata != nil && step.Status != nil {
				t.Fatalf("seed %d: two writes at once", seed)
			}
			if step.Metadata != nil {
				s.ObjectMeta = step.Metadata.ObjectMeta
			}
			if step.Status != nil {
				s.Status = step.Status.Status
			}
			invariants(t, s)
			if t.Failed() {
				t.Fatalf("seed %d, step %d: %+v", seed, n, s)
			}
		}
		for n := 0; ; n++ {
			step := next()
			if step == (loadbalancer.Step{}) {
				break
			}
			if n > 5 {
				t.Fatalf("seed %d: after %d steps another: %+v", seed, n, step)
			}
			if step.Metadata != nil {
				s.ObjectMeta = step.Metadata.ObjectMeta
			} else {
				s.Status = step.Status.Status
			}
		}
		settled(t, s, want, release)
		if t.Failed() {
			t.Fatalf("seed %d: %+v of %+v", seed, s, want)
		}
	}
}

func invariants(t *testing.T, s *corev1.Service) {
	has := append(loadbalancer.Of(s).Has, loadbalancer.FloatingIP(s)...)
	for _, a := range told(s) {
		if !slices.Contains(has, netip.MustParseAddr(a)) {
			t.Errorf("%s is told, remembered are %s", a, has)
		}
	}
	if loadbalancer.Taken(s) != slices.Contains(s.Finalizers, loadbalancer.Finalizer) {
		t.Error("the finalizer and the annotation don't come and go together")
	}
	if i := s.Status.LoadBalancer.Ingress; len(i)-len(told(s)) != len(othersEntries) {
		t.Errorf("of others there is %+v", i)
	}
	if !slices.Contains(s.Status.Conditions, othersConditions[0]) || s.Annotations["example.org/a"] != "x" || s.Finalizers[0] != "example.org/f" {
		t.Error("something of others is gone")
	}
}

func settled(t *testing.T, s *corev1.Service, want loadbalancer.State, release bool) {
	if release {
		if loadbalancer.Taken(s) || len(loadbalancer.FloatingIP(s)) > 0 || len(told(s)) > 0 || len(s.Status.Conditions) > 1 || len(s.Finalizers) > 1 {
			t.Error("something is left")
		}
		return
	}
	if has := ipam.AddressOf(loadbalancer.Of(s).Has...); has != want.Addresses {
		t.Errorf("it has %s", has)
	}
	conditions := 3
	if want.Policies.Status != "" {
		conditions++
	}
	if len(s.Status.Conditions) != conditions {
		t.Errorf("it has the conditions %+v", s.Status.Conditions)
	}
	var addrs []string
	for _, f := range s.Spec.IPFamilies {
		for _, a := range want.Addresses.Addrs() {
			switch {
			case a.Is6() != (f == corev1.IPv6Protocol):
			case a.Is4() && want.FloatingIP.IsValid():
				addrs = append(addrs, want.FloatingIP.String())
			default:
				addrs = append(addrs, a.String())
			}
		}
	}
	if served := slices.Equal(told(s), addrs); !served && (want.Served || len(told(s)) > 0) {
		t.Errorf("it tells %s, want %s", told(s), addrs)
	}
}

// A Service of which somebody takes the annotation away, as with kubectl replace, is still Coil's: it goes on telling what it is to have, and tells nothing else.
func TestAnnotationIsTakenAway(t *testing.T) {
	state := func(addr string) loadbalancer.State {
		return loadbalancer.State{
			Addresses: ipam.AddressOf(netip.MustParseAddr(addr)), Served: true, Now: metav1.Unix(1, 0), Policies: &metav1.Condition{},
			Assigned: metav1.Condition{Type: loadbalancer.ConditionAssigned, Status: metav1.ConditionTrue, Reason: "A"},
			Serving:  metav1.Condition{Type: loadbalancer.ConditionServed, Status: metav1.ConditionTrue, Reason: "S"},
		}
	}
	for name, c := range map[string]struct {
		next func(*corev1.Service) loadbalancer.Step
		told []string // after each step, as long as the Service is Coil's
		left bool
	}{
		"it keeps its address": {func(s *corev1.Service) loadbalancer.Step { return loadbalancer.Serve(s, state("192.0.2.1")) }, []string{"192.0.2.1"}, true},
		"it gets another one":  {func(s *corev1.Service) loadbalancer.Step { return loadbalancer.Serve(s, state("192.0.2.2")) }, []string{"", "", "192.0.2.2"}, true},
		"it is released":       {loadbalancer.Release, []string{"192.0.2.1", ""}, false},
	} {
		for _, finalizer := range []bool{true, false} { // kubectl annotate leaves it
			s := kubernetes(func(s *corev1.Service) { s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol} })
			apply := func(step loadbalancer.Step) {
				if step.Metadata != nil {
					s.ObjectMeta = step.Metadata.ObjectMeta
				} else {
					s.Status = step.Status.Status
				}
			}
			for step := loadbalancer.Serve(s, state("192.0.2.1")); step != (loadbalancer.Step{}); step = loadbalancer.Serve(s, state("192.0.2.1")) {
				apply(step)
			}
			if delete(s.Annotations, loadbalancer.AnnotationAssigned); !finalizer {
				s.Finalizers = nil
			}
			if !loadbalancer.Taken(s) || !loadbalancer.Managed(s, true) {
				t.Errorf("%s: Coil forgets it", name)
			}
			var all []string
			for step := c.next(s); step != (loadbalancer.Step{}) && len(all) < 9; step = c.next(s) {
				apply(step)
				all = append(all, strings.Join(told(s), ","))
			}
			want := c.told
			if !finalizer && !c.left {
				want = want[1:]
			}
			if !slices.Equal(all, want) {
				t.Errorf("%s, with the finalizer %t: it tells %q, want %q", name, finalizer, all, want)
			}
			if left := len(s.Finalizers) > 0; left != c.left || loadbalancer.Taken(s) != c.left {
				t.Errorf("%s, with the finalizer %t: %+v", name, finalizer, s)
			}
		}
	}
}

// Coil serves its class, and Services without a class if it is told so. What another controller has told stays its own.
func TestManaged(t *testing.T) {
	class := func(name string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Spec.LoadBalancerClass = &name }
	}
	for name, c := range map[string]struct {
		service     func(*corev1.Service)
		always, all bool
	}{
		"its class":       {class(loadbalancer.Class), true, true},
		"another class":   {class("example.org/lb"), false, false},
		"no class":        {func(*corev1.Service) {}, false, true},
		"a ClusterIP":     {func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }, false, false},
		"one that ends":   {func(s *corev1.Service) { class(loadbalancer.Class)(s); s.DeletionTimestamp = new(metav1.Now()) }, false, false},
		"told by another": {func(s *corev1.Service) { s.Status.LoadBalancer.Ingress = othersEntries }, false, false},
		"told by Coil": {func(s *corev1.Service) {
			s.Annotations[loadbalancer.AnnotationAssigned], s.Status.LoadBalancer.Ingress = "192.0.2.1", []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}
		}, false, true},
		"its class, told by another": {func(s *corev1.Service) { class(loadbalancer.Class)(s); s.Status.LoadBalancer.Ingress = othersEntries }, true, true},
	} {
		s := kubernetes(c.service)
		if got := loadbalancer.Managed(s, false); got != c.always {
			t.Errorf("%s: managed %t", name, got)
		}
		if got := loadbalancer.Managed(s, true); got != c.all {
			t.Errorf("%s: managed %t if all without a class are", name, got)
		}
	}
}

package loadbalancer_test

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/dataplane"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// kubernetes returns a Service as the API server keeps it.
func kubernetes(change func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "front", UID: "u", CreationTimestamp: metav1.Unix(7, 0), Annotations: map[string]string{}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: new(corev1.IPFamilyPolicySingleStack),
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 443}}, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster,
			Selector: map[string]string{"b": "2", "a": "1"},
		},
	}
	change(s)
	return s
}

func TestOf(t *testing.T) {
	plain := loadbalancer.Service{
		Name: types.NamespacedName{Namespace: "shop", Name: "front"}, UID: "u", Created: time.Unix(7, 0), Ports: []loadbalancer.Port{{Protocol: corev1.ProtocolTCP, Number: 443}},
		Families: []dataplane.Family{dataplane.IPv4},
	}
	wants := func(addrs ...string) func(*loadbalancer.Service) {
		return func(s *loadbalancer.Service) {
			for _, a := range addrs {
				s.Wants = append(s.Wants, netip.MustParseAddr(a))
			}
		}
	}
	annotated := func(key, value string) func(*corev1.Service) {
		return func(s *corev1.Service) { s.Annotations[key] = value }
	}
	for name, c := range map[string]struct {
		service func(*corev1.Service)
		want    func(*loadbalancer.Service)
	}{
		"plain":                     {func(*corev1.Service) {}, func(*loadbalancer.Service) {}},
		"a port without a protocol": {func(s *corev1.Service) { s.Spec.Ports[0].Protocol = "" }, func(*loadbalancer.Service) {}},
		"both families": {func(s *corev1.Service) {
			s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol, corev1.IPv4Protocol}
			s.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
		}, func(s *loadbalancer.Service) {
			s.Families, s.Both = []dataplane.Family{dataplane.IPv6, dataplane.IPv4}, true
		}},
		"local endpoints": {func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal }, func(s *loadbalancer.Service) { s.Endpoints = "shop?a=1,b=2" }},
		"local endpoints of its own": {func(s *corev1.Service) {
			s.Spec.ExternalTrafficPolicy, s.Spec.Selector = corev1.ServiceExternalTrafficPolicyLocal, nil
		}, func(s *loadbalancer.Service) { s.Endpoints = "shop/front" }},
		"a pool":                {annotated(v2.AnnotationPool, "public"), func(s *loadbalancer.Service) { s.Pool = "public" }},
		"alone":                 {annotated(loadbalancer.AnnotationSharing, loadbalancer.SharingNone), func(s *loadbalancer.Service) { s.Alone = true }},
		"a group":               {annotated(loadbalancer.AnnotationSharing, "team-a"), func(s *loadbalancer.Service) { s.Group = "team-a" }},
		"assigned":              {annotated(loadbalancer.AnnotationAssigned, "192.0.2.1"), func(s *loadbalancer.Service) { s.Has = []netip.Addr{netip.MustParseAddr("192.0.2.1")} }},
		"forgotten":             {annotated(loadbalancer.AnnotationAssigned, "x"), func(*loadbalancer.Service) {}},
		"wanted":                {annotated(loadbalancer.AnnotationWanted, "2001:db8::1, 192.0.2.1"), wants("192.0.2.1", "2001:db8::1")},
		"wanted in the old way": {func(s *corev1.Service) { s.Spec.LoadBalancerIP = "::ffff:192.0.2.1" }, wants("192.0.2.1")},
		"wanted in both ways": {func(s *corev1.Service) {
			s.Spec.LoadBalancerIP, s.Annotations[loadbalancer.AnnotationWanted] = "192.0.2.1", "192.0.2.2"
		}, wants("192.0.2.2")},
	} {
		t.Run(name, func(t *testing.T) {
			want := plain
			c.want(&want)
			want.Kind()
			if got := loadbalancer.Of(kubernetes(c.service)); !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

// Addresses that can't be understood are told, with the place in which they are.
func TestInvalid(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.300":         `"192.0.2.300" isn't an address`,
		"fe80::1%eth0":        `"fe80::1%eth0" isn't an address`,
		"192.0.2.1,192.0.2.2": `has two addresses of one family`,
		"192.0.2.1,":          `"" isn't an address`,
	} {
		got := loadbalancer.Of(kubernetes(func(s *corev1.Service) { s.Annotations[loadbalancer.AnnotationWanted] = text })).Invalid
		if !strings.Contains(got, want) || !strings.Contains(got, loadbalancer.AnnotationWanted) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
		got = loadbalancer.Of(kubernetes(func(s *corev1.Service) { s.Spec.LoadBalancerIP = text })).Invalid
		if !strings.Contains(got, want) || !strings.Contains(got, "spec.loadBalancerIP") {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}

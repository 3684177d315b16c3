package loadbalancer

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// A port that two Services have in a family, since one of them was changed, is the one's that had it before. In different families both have it.
func TestPortOfTwo(t *testing.T) {
	port := func(service string, number int32) v2.FloatingPort {
		return v2.FloatingPort{Protocol: corev1.ProtocolTCP, Port: number, Service: service}
	}
	of := func(service string, number int32, families ...corev1.IPFamily) entrance {
		return entrance{port(service, number), families}
	}
	const v4, v6 = corev1.IPv4Protocol, corev1.IPv6Protocol
	before := []v2.FloatingPort{port("b", 80), port("a", 443)}
	got := sorted([]entrance{of("a", 443, v4, v6), of("a", 80, v4, v6), of("b", 80, v4), of("a", 22, v4, v6), of("d", 53, v6), of("c", 53, v4)}, before)
	if diff := cmp.Diff([]v2.FloatingPort{port("a", 22), port("c", 53), port("d", 53), port("b", 80), port("a", 443)}, got); diff != "" {
		t.Errorf("the ports (-want +got):\n%s", diff)
	}
}

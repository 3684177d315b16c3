package loadbalancer

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
)

// A port that two Services have, since one of them was changed, is the one's that had it before: a block has each port once.
func TestPortOfTwo(t *testing.T) {
	port := func(service string, number int32) v2.FloatingPort {
		return v2.FloatingPort{Protocol: corev1.ProtocolTCP, Port: number, Service: service}
	}
	before := []v2.FloatingPort{port("b", 80), port("a", 443)}
	got := sorted([]v2.FloatingPort{port("a", 443), port("a", 80), port("b", 80), port("a", 22)}, before)
	if diff := cmp.Diff([]v2.FloatingPort{port("a", 22), port("b", 80), port("a", 443)}, got); diff != "" {
		t.Errorf("the ports (-want +got):\n%s", diff)
	}
}

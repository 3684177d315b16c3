package loadbalancer

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"

	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// remembered is the floating IP that a Service has, invalid if there is none.
func remembered(s *corev1.Service) netip.Addr {
	if all := loadbalancer.FloatingIP(s); len(all) > 0 {
		return all[0]
	}
	return netip.Addr{}
}

package loadbalancer

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	v2 "github.com/coil-net/coil/pkg/apis/coil/v2"
	"github.com/coil-net/coil/pkg/plan/loadbalancer"
)

// remembered is the floating IP that a Service has, invalid if there is none.
func remembered(s *corev1.Service) netip.Addr {
	if all := loadbalancer.FloatingIP(s); len(all) > 0 {
		return all[0]
	}
	return netip.Addr{}
}

// provided has a Service say what OpenStack provides, and what it has refused since.
func provided(want *loadbalancer.State, claim *v2.AddressClaim) {
	if floating, err := netip.ParseAddr(claim.Status.Provided.FloatingIP); err == nil {
		want.FloatingIP = floating
		want.Assigned.Message += fmt.Sprintf(", to which OpenStack leads the floating IP %s", floating)
	}
	if is := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimProvided); is != nil && is.Status == metav1.ConditionFalse {
		want.Assigned.Message += fmt.Sprintf("; OpenStack doesn't have all of it, %s: %s", is.Reason, is.Message)
	}
}

// allowed says whether the ports of gateways may use the address of a claim; empty if they may. also is what is to be told beside that.
func allowed(claim *v2.AddressClaim) (reason, message, also string) {
	if claim.Status.Provided == nil {
		return "", "", ""
	}
	is := meta.FindStatusCondition(claim.Status.Conditions, v2.ClaimAllowed)
	switch {
	case is == nil:
		return reasonPairs, fmt.Sprintf("The gateways' ports in OpenStack may not use the address of AddressClaim %s yet", klog.KObj(claim)), ""
	case is.Status != metav1.ConditionTrue:
		return is.Reason, is.Message, ""
	case is.Message != "":
		return "", "", "; " + is.Message
	}
	return "", "", ""
}
